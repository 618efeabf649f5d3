"""Unscaling of gradients with the test for inf and NaN.

Traffic per float32 element: read and write the gradient = 8 bytes; from float16 gradients to
float32 masters: read 2, write 4. The peer is the kernel of torch.amp.GradScaler, in place too; it
has none that casts, so its recipe for masters is a foreach copy before it.
"""

import torch

from apex.amp.multi_tensor import scale, scale_
from apex.amp.scaler import LossScaler
from apex_testkit.bench import chosen_device, compare

FACTOR = 1 / 65536


def resnet50():
    """The sizes of ResNet-50's 161 parameters."""
    sizes, inputs = [9408, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            sizes += [inputs * width, 9 * width * width, width * outputs]
            sizes += [width] * 4 + [outputs] * 2
            if block == 0:
                sizes += [inputs * outputs, outputs, outputs]
            inputs = outputs
    return [*sizes, 2048 * 1000, 1000]


CASES = {"resnet50": resnet50(), "10,000 x 100": [100] * 10_000}


def in_place(case, sizes, device):
    """The ops on lists that are ready: float32 gradients, in place."""
    lists = [[torch.randn(n, device=device) for n in sizes] for _ in range(3)]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    found = torch.zeros(1, device=device)
    one = torch.ones(1, device=device)  # keeps the values away from subnormals
    unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
    scaler = LossScaler(1.0)
    compare(
        "unscale_in_place",
        f"{case} fp32",
        bytes_moved=8 * sum(sizes),
        device=device,
        apex=lambda: scale_(lists[0], flag, 1.0),
        apex_with_sorting=lambda: scaler.unscale(lists[1], lists[1], scale_override=1.0),
        torch_foreach=lambda: unscale_(lists[2], found, one),
    )


def to_masters(case, sizes, device):
    """float16 gradients of a model to float32 gradients of masters, as in O2."""
    grads = [torch.randn(n, device=device).half() for n in sizes]
    masters = [[torch.empty_like(g, dtype=torch.float32) for g in grads] for _ in range(2)]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    found = torch.zeros(1, device=device)
    factor = torch.full((1,), FACTOR, device=device)

    def recipe():
        torch._foreach_copy_(masters[1], grads)
        torch._amp_foreach_non_finite_check_and_unscale_(masters[1], found, factor)

    compare(
        "unscale_to_masters",
        f"{case} fp16 to fp32",
        bytes_moved=6 * sum(sizes),
        device=device,
        apex=lambda: scale(grads, masters[0], flag, FACTOR),
        torch_foreach=recipe,
    )


if __name__ == "__main__":
    for name, all_sizes in CASES.items():
        in_place(name, all_sizes, chosen_device())
        to_masters(name, all_sizes, chosen_device())
