"""Softmaxes of attention scores, causal and masked, forward and backward.

Traffic, in units of the scores' size: the forward reads scores (1) and writes probabilities (1).
The backward reads gradient and probabilities (2) and writes the scores' gradient (1). Causal rows
read half. The mask, a byte for each score of a head, is not counted.
"""

import torch

from apex.transformer.functional.fused_softmax import (
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)
from apex_testkit.bench import chosen_device, compare

# (batch, heads, sequence): a long context, a usual one, a short one, and rows of an odd length.
SHAPES = [(1, 8, 2048), (4, 16, 256), (32, 1, 256), (8, 16, 63)]
SCALE = 0.125


def eager(scores, mask):
    """What users write: masked scores are -10000, computed in float32."""
    wide = (scores.float() * SCALE).masked_fill(mask, -10000.0)
    return torch.softmax(wide, -1).to(scores.dtype)


def causal(scores, mask):
    return scaled_upper_triang_masked_softmax(scores, mask, SCALE)


def masked(scores, mask):
    return scaled_masked_softmax(scores, mask, SCALE)


def run(batch: int, heads: int, sequence: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype, forward alone and with the backward."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    shape = (batch, heads, sequence, sequence)
    scores = torch.randn(shape, device=device).to(dtype).requires_grad_()
    dy = torch.randn(shape, device=device).to(dtype)
    above = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=device).triu(1)
    padding = torch.rand(batch, 1, sequence, sequence, device=device) < 0.2
    compiled = torch.compile(eager, dynamic=False)
    for kind, ours, mask, reads in (("causal", causal, above, 0.5), ("masked", masked, padding, 1)):

        def forward(function, mask=mask):
            return lambda: function(scores.detach(), mask)

        def both(function, mask=mask):
            return lambda: torch.autograd.grad(function(scores, mask), scores, dy)

        for name, step, units in (("fwd", forward, reads + 1), ("fwd+bwd", both, 3 * reads + 2)):
            compare(
                f"scaled_softmax {kind} {name}",
                f"{str(dtype).removeprefix('torch.')} {batch}x{heads}x{sequence}x{sequence}",
                bytes_moved=int(units * dy.numel() * dy.element_size()),
                device=device,
                apex=step(ours),
                torch=step(eager),
                torch_compiled=step(compiled),
            )


for dtype in (torch.float32, torch.bfloat16):
    for shape in SHAPES:
        run(*shape, dtype, chosen_device())
