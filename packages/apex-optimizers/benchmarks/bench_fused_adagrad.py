"""A whole Adagrad step(), Python included.  Traffic per fp32 element: read p, g, sum and write
p, sum = 20 bytes."""

import torch

from apex.optimizers import FusedAdagrad
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import compiled_peer, models, params_with_grads

DEVICE = chosen_device()
EMBEDDING = [20_000_000, 1_000_000, 1_000_000]


def stepper(cls, sizes, **options):
    return cls(params_with_grads(sizes, DEVICE), lr=1e-3, weight_decay=0.01, **options).step


MODELS = models(DEVICE, **{"embedding, mlp": EMBEDDING})
for case, sizes in MODELS.items():
    peers = {"torch_foreach": stepper(torch.optim.Adagrad, sizes, foreach=True)}
    if DEVICE == "cpu":  # torch has it fused there only
        peers["torch_fused"] = stepper(torch.optim.Adagrad, sizes, fused=True)
    compare(
        "adagrad_step",
        case,
        bytes_moved=20 * sum(sizes),
        device=DEVICE,
        apex=stepper(FusedAdagrad, sizes),
        **peers,
    )

# At the end: what the compiler leaves on the heap lies between the tensors of later cases.
for case, sizes in MODELS.items():
    if compiled := compiled_peer(torch.optim.Adagrad, sizes, DEVICE):
        compare(
            "adagrad_step_compiled",
            case,
            bytes_moved=20 * sum(sizes),
            device=DEVICE,
            apex=stepper(FusedAdagrad, sizes),
            **compiled,
        )
