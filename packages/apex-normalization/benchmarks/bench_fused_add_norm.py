"""Residual connection with RMS and layer norm behind it, forward and forward with backward.

Traffic per element, in units of the dtype's size: forward reads x and the residual and writes the
sum and y (4); backward reads dy, dsum and the sum and writes dx (4). Weights and statistics are
small beside that.
"""

import torch
import torch.nn.functional as F

from apex.normalization import fused_add_layer_norm, fused_add_rms_norm
from apex_testkit.bench import chosen_device, compare

SHAPES = [(4096, 4096), (8192, 1024), (64, 1024)]
GPU_SHAPES = [(16_384, 8192), *SHAPES]  # beyond every cache, in bfloat16 too
EPS = 1e-5


def torch_layer_norm(x, residual, weight, bias):
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, EPS), total


def torch_rms_norm(x, residual, weight, bias):
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, EPS), total


def apex_layer_norm(x, residual, weight, bias):
    return fused_add_layer_norm(x, residual, weight, bias, EPS, prenorm=True)


def apex_rms_norm(x, residual, weight, bias):
    return fused_add_rms_norm(x, residual, weight, EPS, prenorm=True)


KINDS = {
    "layer_norm": (apex_layer_norm, torch_layer_norm),
    "rms_norm": (apex_rms_norm, torch_rms_norm),
}


def run(kind: str, rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Measure one norm, shape and dtype."""
    ours, theirs = KINDS[kind]
    like = {"device": device, "dtype": dtype}
    inputs = [torch.randn(rows, columns, **like) for _ in range(2)]
    inputs = [t.requires_grad_() for t in (*inputs, *torch.randn(2, columns, **like))]
    used = inputs if kind == "layer_norm" else inputs[:3]
    grads = torch.randn(2, rows, columns, **like).unbind()
    frozen = [t.detach() for t in inputs]
    torch.compiler.reset()
    compiled = torch.compile(theirs, dynamic=False)
    norms = {"apex": ours, "torch": theirs, "torch_compiled": compiled}

    def forward(norm):
        return lambda: norm(*frozen)

    def training(norm):
        return lambda: torch.autograd.grad(norm(*inputs), used, grads)

    case = f"{str(dtype).removeprefix('torch.')} {rows}x{columns}"
    size = rows * columns * dtype.itemsize
    for op, step, passes in (("fwd", forward, 4), ("fwd+bwd", training, 8)):
        contestants = {name: step(norm) for name, norm in norms.items()}
        moved = passes * size
        compare(f"add_{kind} {op}", case, bytes_moved=moved, device=device, **contestants)


if __name__ == "__main__":
    device = chosen_device()
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float32):
            for rows, columns in GPU_SHAPES if device == "cuda" else SHAPES:
                run(kind, rows, columns, dtype, device)
