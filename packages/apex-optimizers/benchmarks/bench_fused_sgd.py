"""A whole SGD step() with momentum, Python included.  Traffic per fp32 element: read p, g, buffer
and write p, buffer = 20 bytes. Gradients are the same tensors in every step, unless they are "new":
then giving each parameter another one is part of the time."""

import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import (
    RESNET50,
    compiled_peer,
    models,
    params_with_grads,
    with_new_grads,
)

DEVICE = chosen_device()
TINY = "10,000 x 100"
NEW_GRADS = f"{TINY}, new gradients"


def stepper(cls, sizes, has_new_grads=False, dtype=torch.float32, **options):
    params = params_with_grads(sizes, DEVICE, dtype)
    step = cls(params, lr=1e-3, momentum=0.9, weight_decay=0.01, **options).step
    return with_new_grads(params, step) if has_new_grads else step


MODELS = models(DEVICE, resnet50=RESNET50)
for case, sizes in [*MODELS.items(), (NEW_GRADS, MODELS[TINY])]:
    options = {"has_new_grads": case == NEW_GRADS}
    compare(
        "sgd_step",
        case,
        bytes_moved=20 * sum(sizes),
        device=DEVICE,
        apex=stepper(FusedSGD, sizes, **options),
        torch_fused=stepper(torch.optim.SGD, sizes, fused=True, **options),
        torch_foreach=stepper(torch.optim.SGD, sizes, foreach=True, **options),
    )

BF16 = {"dtype": torch.bfloat16}
compare(
    "sgd_step_by_chance",
    "resnet50, bf16 parameters",
    bytes_moved=10 * sum(RESNET50),
    device=DEVICE,
    apex=stepper(FusedSGD, RESNET50, stochastic_rounding=True, **BF16),
    apex_to_nearest=stepper(FusedSGD, RESNET50, **BF16),
)

# At the end: what the compiler leaves on the heap lies between the tensors of later cases.
for case, sizes in MODELS.items():
    if compiled := compiled_peer(torch.optim.SGD, sizes, DEVICE, momentum=0.9):
        compare(
            "sgd_step_compiled",
            case,
            bytes_moved=20 * sum(sizes),
            device=DEVICE,
            apex=stepper(FusedSGD, sizes),
            **compiled,
        )
