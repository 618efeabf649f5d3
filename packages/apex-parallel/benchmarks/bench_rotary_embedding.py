"""Rotary position embeddings, forward and backward.

Traffic, in units of the tokens' size: each direction reads them (1) and writes them (1). Tables, a
row for all heads of a token, are not counted.
"""

import torch

from apex.transformer.functional import fused_apply_rotary_pos_emb_cached
from apex_testkit.bench import chosen_device, compare

# (sequence, batch, heads, channels, rotated channels)
SHAPES = [
    (4096, 1, 32, 128, 128),
    (2048, 1, 16, 64, 64),
    (1024, 2, 16, 128, 64),
    (1024, 2, 8, 80, 40),
]


def eager(t, cos, sin):
    """What Megatron computes without kernels."""
    width = cos.shape[-1]
    rotated, rest = t[..., :width], t[..., width:]
    a, b = rotated.chunk(2, -1)
    y = rotated * cos + torch.cat((-b, a), -1) * sin
    return y if rest.shape[-1] == 0 else torch.cat((y, rest), -1)


def run(shape: tuple[int, ...], width: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype, forward alone and with the backward."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    t = torch.randn(shape, device=device).to(dtype).requires_grad_()
    dy = torch.randn(shape, device=device).to(dtype)
    angles = torch.randn(shape[0], 1, 1, width, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    compiled = torch.compile(eager, dynamic=False)

    def forward(function):
        return lambda: function(t.detach(), cos, sin)

    def both(function):
        return lambda: torch.autograd.grad(function(t, cos, sin), t, dy)

    for name, step, units in (("fwd", forward, 2), ("fwd+bwd", both, 4)):
        compare(
            f"rotary_embedding {name}",
            f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))} of {width}",
            bytes_moved=units * dy.numel() * dy.element_size(),
            device=device,
            apex=step(fused_apply_rotary_pos_emb_cached),
            torch=step(eager),
            torch_compiled=step(compiled),
        )


for dtype in (torch.float32, torch.bfloat16):
    for *shape, width in SHAPES:
        run(tuple(shape), width, dtype, chosen_device())
