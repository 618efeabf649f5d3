"""Attention of packed sequences, forward and backward, with and without dropout.

The peer is ``scaled_dot_product_attention``, called for one sequence after the other. Products take
most of the time, so no bandwidth is given.
"""

import torch
from torch.nn import functional as F

from apex.contrib.fmha import FMHAFun
from apex_testkit.bench import chosen_device, compare

HEADS, SIZE = 8, 64
# About even, uneven, and many short ones.
LENGTHS = [[128, 100, 77, 120], [512, 300, 77, 120], [16] * 64]


def run(lengths: list[int], dtype: torch.dtype, p: float, device: str) -> None:
    """Measure packed sequences against PyTorch, one sequence after the other."""
    total = sum(lengths)
    qkv = torch.randn(total, 3, HEADS, SIZE, device=device).to(dtype).requires_grad_()
    dy = torch.randn(total, HEADS, SIZE, device=device).to(dtype)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

    def each():
        q, k, v = qkv.permute(1, 2, 0, 3).unbind(0)
        parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
        results = [F.scaled_dot_product_attention(*part, dropout_p=p) for part in parts]
        return torch.cat(results, 1).transpose(0, 1)

    case = f"{len(lengths)} of {lengths[0]} to {min(lengths)} tokens"
    ours = lambda: FMHAFun.apply(qkv, starts, p, max(lengths), True)
    compare(
        f"fmha {'dropout' if p else 'no dropout'} fwd+bwd",
        f"{str(dtype).removeprefix('torch.')} {case}",
        device=device,
        apex=lambda: torch.autograd.grad(ours(), qkv, dy),
        torch_sdpa=lambda: torch.autograd.grad(each(), qkv, dy),
    )


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for p in (0.0, 0.1):
        for lengths in LENGTHS:
            run(lengths, dtype, p, chosen_device())
