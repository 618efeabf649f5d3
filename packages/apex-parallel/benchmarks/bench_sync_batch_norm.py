"""Batch norm in training, forward and backward, in one process, against torch's.

Traffic: forward reads x twice (statistics, normalization) and writes y; backward reads dy and x
twice and writes dx: 8 elements.
"""

import torch
from torch import nn
from torch.nn import functional as F

from apex.parallel import SyncBatchNorm
from apex_testkit.bench import chosen_device, compare

SHAPES = {
    "32x64x56x56": (32, 64, 56, 56),
    "32x256x14x14": (32, 256, 14, 14),
    "32x512x7x7": (32, 512, 7, 7),
}
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def step(module, x, dy):
    def run():
        module(x).backward(dy)
        x.grad = None
        module.zero_grad()

    return run


class Formula(nn.BatchNorm2d):
    """The formula of torch.nn.SyncBatchNorm, whose own kernels are for GPUs, in torch calls."""

    def forward(self, x):
        var, mean = torch.var_mean(x.float(), (0, 2, 3), unbiased=False)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        scale = self.weight * torch.rsqrt(var + self.eps)
        wide = lambda v: v.view(1, -1, 1, 1)
        return ((x - wide(mean)) * wide(scale) + wide(self.bias)).to(x.dtype)


class ReluAfter(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x), inplace=True)


def main():
    device = chosen_device()
    for dtype in (torch.float32, torch.bfloat16):
        for shape_name, shape in SHAPES.items():
            for format_name, memory_format in FORMATS.items():
                x, dy = (
                    torch.randn(shape, device=device, dtype=dtype).to(memory_format=memory_format)
                    for _ in range(2)
                )
                x.requires_grad_()
                case = f"{shape_name} {format_name} {str(dtype).removeprefix('torch.')}"
                size, channels = x.element_size(), shape[1]
                compare(
                    "sync_batch_norm",
                    case,
                    bytes_moved=8 * size * x.numel(),
                    device=device,
                    apex=step(SyncBatchNorm(channels).to(device), x, dy),
                    torch_batch_norm=step(nn.BatchNorm2d(channels).to(device), x, dy),
                    torch_formula=step(Formula(channels).to(device), x, dy),
                )
                compare(
                    "sync_batch_norm_relu",
                    case,
                    bytes_moved=11 * size * x.numel(),
                    device=device,
                    apex=step(SyncBatchNorm(channels, fuse_relu=True).to(device), x, dy),
                    torch_batch_norm=step(ReluAfter(channels).to(device), x, dy),
                )


if __name__ == "__main__":
    main()
