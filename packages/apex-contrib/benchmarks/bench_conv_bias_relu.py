"""Convolutions with bias and ReLU, in channels_last: forward and backward.

The convolutions are nearly all of the time, so no traffic is counted.
"""

import torch
from torch.nn import functional as F

from apex.contrib.conv_bias_relu import ConvBiasReLU, ConvFrozenScaleBiasReLU
from apex_testkit.bench import chosen_device, compare

# (batch, channels in, height and width, channels out, kernel)
SHAPES = {
    torch.float32: [(8, 64, 56, 64, 3), (8, 256, 56, 64, 1)],
    torch.bfloat16: [(8, 64, 56, 64, 3), (8, 256, 56, 64, 1)],
    torch.float16: [(2, 64, 28, 64, 3)],  # seconds for torch, where a CPU has no float16 products
}


def relu(x, weight, bias, padding):
    return F.conv2d(x, weight, bias, 1, padding).relu()


def frozen(x, weight, scale, bias, padding):
    return (F.conv2d(x, weight, None, 1, padding) * scale + bias).relu()


def run(batch, channels, size, out, kernel, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(channels, out, kernel, device=device, dtype=dtype)
    conv = conv.to(memory_format=torch.channels_last)
    x, dy = (
        torch.randn(batch, c, size, size, device=device)
        .to(dtype)
        .contiguous(memory_format=torch.channels_last)
        for c in (channels, out)
    )
    x.requires_grad_()
    padding = kernel // 2
    shape = f"{batch}x{channels}x{size}x{size} to {out}, {kernel}x{kernel}"
    case = f"{str(dtype).removeprefix('torch.')} {shape}"

    def both(function, *given):
        leaves = [x, *(t for t in given if isinstance(t, torch.Tensor) and t.requires_grad)]
        return lambda: torch.autograd.grad(function(x, *given), leaves, dy)

    given = conv.weight, conv.bias
    compare(
        "conv_bias_relu fwd+bwd",
        case,
        device=device,
        apex=both(ConvBiasReLU, *given, padding, 1),
        torch=both(relu, *given, padding),
        torch_compiled=both(torch.compile(relu, dynamic=False), *given, padding),
    )
    vectors = [torch.rand(1, out, 1, 1, device=device).to(dtype) for _ in range(2)]
    compare(
        "conv_frozen_scale_bias_relu fwd+bwd",
        case,
        device=device,
        apex=both(ConvFrozenScaleBiasReLU, conv.weight, *vectors, padding, 1),
        torch=both(frozen, conv.weight, *vectors, padding),
        torch_compiled=both(torch.compile(frozen, dynamic=False), conv.weight, *vectors, padding),
    )


for dtype, shapes in SHAPES.items():
    for shape in shapes:
        run(*shape, dtype, chosen_device())
