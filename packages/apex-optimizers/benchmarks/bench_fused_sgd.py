"""A whole SGD step() with momentum, Python included.  Traffic per fp32 element: read p, g, buffer
and write p, buffer = 20 bytes."""

import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import RESNET50, models, params_with_grads

DEVICE = chosen_device()


def stepper(cls, sizes, **options):
    return cls(
        params_with_grads(sizes, DEVICE), lr=1e-3, momentum=0.9, weight_decay=0.01, **options
    ).step


for case, sizes in models(DEVICE, resnet50=RESNET50).items():
    compare(
        "sgd_step",
        case,
        bytes_moved=20 * sum(sizes),
        device=DEVICE,
        apex=stepper(FusedSGD, sizes),
        torch_fused=stepper(torch.optim.SGD, sizes, fused=True),
        torch_foreach=stepper(torch.optim.SGD, sizes, foreach=True),
    )
