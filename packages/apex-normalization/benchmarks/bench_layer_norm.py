"""Layer normalization, forward and forward with backward.

Traffic per element, in units of the dtype's size: forward reads x and writes y (2); backward reads
x and dy and writes dx (3). Weights and statistics are small beside that.
"""

import torch
import torch.nn.functional as F

from apex.normalization.fused_layer_norm import fused_layer_norm_affine
from apex_testkit.bench import chosen_device, compare

SHAPES = [(4096, 4096), (8192, 1024), (64, 1024), (512, 768)]
GPU_SHAPES = [(16_384, 8192), *SHAPES]  # beyond every cache, in bfloat16 too
EPS = 1e-5

try:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Liger
except ImportError:  # a peer on GPUs, where it is installed
    Liger = None


def torch_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def apex_layer_norm(x, weight, bias):
    return fused_layer_norm_affine(x, weight, bias, x.shape[-1:], EPS)


def liger_layer_norm(x, weight, bias):
    return Liger.apply(x, weight, bias, EPS)


def run(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype."""
    x = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    weight, bias = (
        torch.randn(columns, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    dy, frozen = torch.randn_like(x), [t.detach() for t in (x, weight, bias)]
    torch.compiler.reset()
    compiled = torch.compile(torch_layer_norm, dynamic=False)
    norms = {"apex": apex_layer_norm, "torch": torch_layer_norm, "torch_compiled": compiled}
    if Liger and device == "cuda":
        norms["liger"] = liger_layer_norm

    def forward(norm):
        return lambda: norm(*frozen)

    def training(norm):
        return lambda: torch.autograd.grad(norm(x, weight, bias), (x, weight, bias), dy)

    case = f"{str(dtype).removeprefix('torch.')} {rows}x{columns}"
    size = x.numel() * x.element_size()
    for op, step, passes in (("layer_norm fwd", forward, 2), ("layer_norm fwd+bwd", training, 5)):
        contestants = {name: step(norm) for name, norm in norms.items()}
        compare(op, case, bytes_moved=passes * size, device=device, **contestants)


if __name__ == "__main__":
    device = chosen_device()
    for dtype in (torch.bfloat16, torch.float32):
        for rows, columns in GPU_SHAPES if device == "cuda" else SHAPES:
            run(rows, columns, dtype, device)
