"""A whole SGD step() with momentum, Python included.  Traffic per fp32 element: read p, g, buffer
and write p, buffer = 20 bytes."""

import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex_testkit.bench import chosen_device, compare

DEVICE = chosen_device()

# Parameters of torchvision's resnet50: element counts and how often each occurs.
RESNET50_COUNTS = {
    64: 14, 128: 16, 256: 34, 512: 22, 1024: 14, 2048: 8, 1000: 1,
    4096: 1, 9408: 1, 16384: 6, 32768: 1, 36864: 3, 65536: 7, 131072: 2, 147456: 4, 262144: 10,
    524288: 3, 589824: 6, 1048576: 7, 2048000: 1, 2097152: 1, 2359296: 3,
}  # fmt: skip
MODELS = {
    "resnet50": [n for n, count in RESNET50_COUNTS.items() for _ in range(count)],
    "10,000 x 100": [100] * 10_000,
    "norms 400 x 1k": [1_000] * 400,
    "mlp 2 x 10M": [10_000_000] * 2,
    **({"mlp 2 x 200M": [200_000_000] * 2} if DEVICE == "cuda" else {}),
}


def stepper(cls, sizes, **options):
    params = [torch.nn.Parameter(torch.randn(n, device=DEVICE)) for n in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return cls(params, lr=1e-3, momentum=0.9, weight_decay=0.01, **options).step


for case, sizes in MODELS.items():
    compare(
        "sgd_step",
        case,
        bytes_moved=20 * sum(sizes),
        device=DEVICE,
        apex=stepper(FusedSGD, sizes),
        torch_fused=stepper(torch.optim.SGD, sizes, fused=True),
        torch_foreach=stepper(torch.optim.SGD, sizes, foreach=True),
    )
