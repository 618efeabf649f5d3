"""Group normalization of channels-last tensors, with SiLU and without, forward and backward.

Traffic: the forward reads x and writes y; sums over a sample read it once more (3). The backward
reads dy and x twice and writes dx (5).
"""

import torch
from torch.nn import functional as F

from apex.contrib.group_norm import GroupNorm
from apex_testkit.bench import chosen_device, compare

# (batch, channels, height and width): blocks of Stable Diffusion's UNet, of its decoder, and small.
SHAPES = [
    (2, 320, 64),
    (8, 640, 32),
    (2, 1280, 16),
    (1, 128, 256),
    (3, 320, 32),
    (16, 64, 8),
    (2, 96, 7),
]
GROUPS = 32


def measure(batch: int, channels: int, side: int, silu: bool, dtype: torch.dtype, device: str):
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    x = torch.randn(batch, channels, side, side, device=device).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    seed = torch.randn_like(x)
    ours = GroupNorm(GROUPS, channels, device=device, dtype=dtype, act="silu" if silu else None)
    weight, bias = ours.weight, ours.bias

    def plain(x):
        y = F.group_norm(x, GROUPS, weight, bias)
        return F.silu(y) if silu else y

    given = {
        "apex": ours,
        "torch": plain,
        "torch_compiled": torch.compile(plain, dynamic=False),
    }
    leaves, values = (x, weight, bias), x.detach()
    label = f"{str(dtype).removeprefix('torch.')} {batch}x{channels}x{side}x{side}"
    name = f"group_norm{' silu' if silu else ''}"
    moved = x.numel() * x.element_size()
    with torch.no_grad():
        steps = {peer: lambda f=f: f(values) for peer, f in given.items()}
        compare(f"{name} fwd", label, bytes_moved=3 * moved, device=device, **steps)
    steps = {peer: lambda f=f: torch.autograd.grad(f(x), leaves, seed) for peer, f in given.items()}
    compare(f"{name} fwd+bwd", label, bytes_moved=8 * moved, device=device, **steps)


for dtype in (torch.float32, torch.bfloat16):
    for silu in (False, True):
        for shape in SHAPES:
            measure(*shape, silu, dtype, chosen_device())
