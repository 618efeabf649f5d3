"""RMS normalization, forward and forward with backward.

Traffic per element, in units of the dtype's size: forward reads x and writes y (2); backward reads
x and dy and writes dx (3). Weights and statistics are small beside that.
"""

import torch
import torch.nn.functional as F

from apex.normalization.fused_layer_norm import fused_rms_norm_affine
from apex_testkit.bench import chosen_device, compare

SHAPES = [(4096, 4096), (8192, 1024), (64, 1024), (512, 768)]
GPU_SHAPES = [(16_384, 8192), *SHAPES]  # beyond every cache, in bfloat16 too
EPS = 1e-5

try:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Liger
except ImportError:  # a peer on GPUs, where it is installed
    Liger = None


def torch_rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def apex_rms_norm(x, weight):
    return fused_rms_norm_affine(x, weight, x.shape[-1:], EPS)


def liger_rms_norm(x, weight):
    # Not in place: that would overwrite the gradient that the other contestants read.
    return Liger.apply(x, weight, EPS, 0.0, "llama", False)


def run(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype."""
    x = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(columns, device=device, dtype=dtype, requires_grad=True)
    dy, frozen = torch.randn_like(x), [t.detach() for t in (x, weight)]
    torch.compiler.reset()
    compiled = torch.compile(torch_rms_norm, dynamic=False)
    norms = {"apex": apex_rms_norm, "torch": torch_rms_norm, "torch_compiled": compiled}
    if Liger and device == "cuda":
        norms["liger"] = liger_rms_norm

    def forward(norm):
        return lambda: norm(*frozen)

    def training(norm):
        return lambda: torch.autograd.grad(norm(x, weight), (x, weight), dy)

    case = f"{str(dtype).removeprefix('torch.')} {rows}x{columns}"
    size = x.numel() * x.element_size()
    for op, step, passes in (("rms_norm fwd", forward, 2), ("rms_norm fwd+bwd", training, 5)):
        contestants = {name: step(norm) for name, norm in norms.items()}
        compare(op, case, bytes_moved=passes * size, device=device, **contestants)


if __name__ == "__main__":
    device = chosen_device()
    for dtype in (torch.bfloat16, torch.float32):
        for rows, columns in GPU_SHAPES if device == "cuda" else SHAPES:
            run(rows, columns, dtype, device)
