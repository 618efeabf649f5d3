"""Batch norm in training with residual and ReLU, in channels_last: forward and backward.

Traffic: forward reads x twice and z, and writes y; backward reads dy, y and x, writes dz, reads it
and x, and writes dx: 11 elements per element of x.
"""

import torch
from torch import nn

from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex_testkit.bench import chosen_device, compare

SHAPES = [(32, 56, 56, 64), (32, 28, 28, 256), (32, 14, 14, 1024)]  # of a ResNet-50


def run(shape, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    torch.manual_seed(0)
    x, z, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    ours = BatchNorm2d_NHWC(shape[-1], fuse_relu=True).to(device)
    theirs = nn.BatchNorm2d(shape[-1]).to(device)
    x, z = x.requires_grad_(), z.requires_grad_()

    def plain(x, z):
        return torch.relu(theirs(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) + z)

    def in_place(x, z):
        y = theirs(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return y.add_(z).relu_()

    def both(function, norm):
        leaves = [x, z, norm.weight, norm.bias]
        return lambda: torch.autograd.grad(function(x, z), leaves, dy)

    compare(
        "groupbn fwd+bwd",
        f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}",
        device=device,
        bytes_moved=11 * x.numel() * x.element_size(),
        apex=both(ours, ours),
        torch=both(plain, theirs),
        torch_in_place=both(in_place, theirs),
        torch_compiled=both(torch.compile(plain, dynamic=False), theirs),
    )


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape in SHAPES:
        run(shape, dtype, chosen_device())
