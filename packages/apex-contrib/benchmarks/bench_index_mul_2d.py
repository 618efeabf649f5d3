"""Rows of a matrix, picked by an index, times the rows of another; forward and backward.

Traffic, in units of in2's size, with as many rows in in1: the forward reads both (2) and writes the
result (1), the backward reads both and the gradient (3) and writes two gradients (2).
"""

import torch

from apex.contrib.index_mul_2d import index_mul_2d
from apex_testkit.bench import chosen_device, compare

# (rows of in1, rows of in2, H): features of points picked by their neighbours, long rows, short
# rows, many rows on few, and what fits into the caches.
SHAPES = [
    (65_536, 65_536, 64),
    (8192, 8192, 1024),
    (262_144, 262_144, 16),
    (64, 65_536, 128),
    (512, 512, 64),
]


def eager(in1, in2, idx1):
    return in1[idx1] * in2


def run(picked: int, rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype, forward alone and with the backward."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    in1 = torch.randn(picked, columns, device=device).to(dtype).requires_grad_()
    in2 = torch.randn(rows, columns, device=device).to(dtype).requires_grad_()
    idx1 = torch.randint(0, picked, (rows,), device=device)
    dy = torch.randn_like(in2)
    compiled = torch.compile(eager, dynamic=False)

    def forward(function):
        return lambda: function(in1.detach(), in2.detach(), idx1)

    def both(function):
        return lambda: torch.autograd.grad(function(in1, in2, idx1), (in1, in2), dy)

    size, size1 = (t.numel() * t.element_size() for t in (in2, in1))
    for name, step, moved in (
        ("fwd", forward, 2 * size + size1),
        ("fwd+bwd", both, 5 * size + 3 * size1),
    ):
        compare(
            f"index_mul_2d {name}",
            f"{str(dtype).removeprefix('torch.')} {picked} of {rows}x{columns}",
            bytes_moved=moved,
            device=device,
            apex=step(index_mul_2d),
            torch=step(eager),
            torch_compiled=step(compiled),
        )


for dtype in (torch.float32, torch.bfloat16):
    for shape in SHAPES:
        run(*shape, dtype, chosen_device())
