"""SwiGLU with bias, forward and backward.

Traffic, in units of the output's size: the forward reads the input (2) and writes the output (1),
the backward reads gradient (1) and input (2) and writes the input's gradient (2).
"""

import torch
from torch.nn import functional as F

from apex.fused_bias_swiglu import fused_bias_swiglu
from apex_testkit.bench import chosen_device, compare

# (rows, H): MLPs of a language model, of a small one, and rows too short to vectorize well.
SHAPES = [(1024, 11_008), (4096, 1408), (65_536, 63)]


def eager(input, bias):
    a, b = (input + bias).chunk(2, -1)
    return F.silu(a) * b


def run(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype, forward alone and with the backward."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    input = torch.randn(rows, 2 * columns, device=device).to(dtype).requires_grad_()
    bias = torch.randn(2 * columns, device=device).to(dtype).requires_grad_()
    dy = torch.randn(rows, columns, device=device).to(dtype)
    compiled = torch.compile(eager, dynamic=False)

    def forward(function):
        return lambda: function(input.detach(), bias.detach())

    def both(function):
        return lambda: torch.autograd.grad(function(input, bias), (input, bias), dy)

    for name, step, units in (("fwd", forward, 3), ("fwd+bwd", both, 8)):
        compare(
            f"fused_bias_swiglu {name}",
            f"{str(dtype).removeprefix('torch.')} {rows}x{columns}",
            bytes_moved=units * dy.numel() * dy.element_size(),
            device=device,
            apex=step(fused_bias_swiglu),
            torch=step(eager),
            torch_compiled=step(compiled),
        )


for dtype in (torch.float32, torch.bfloat16):
    for shape in SHAPES:
        run(*shape, dtype, chosen_device())
