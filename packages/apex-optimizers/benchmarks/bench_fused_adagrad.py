"""A whole Adagrad step(), Python included.  Traffic per fp32 element: read p, g, sum and write
p, sum = 20 bytes."""

import torch

from apex.optimizers import FusedAdagrad
from apex_testkit.bench import chosen_device, compare

DEVICE = chosen_device()
MODELS = {
    "embedding 1 x 20M, mlp 2 x 1M": [20_000_000, 1_000_000, 1_000_000],
    "10,000 x 100": [100] * 10_000,
    "norms 400 x 1k": [1_000] * 400,
    **({"mlp 2 x 200M": [200_000_000] * 2} if DEVICE == "cuda" else {}),
}


def stepper(cls, sizes, **options):
    params = [torch.nn.Parameter(torch.randn(n, device=DEVICE)) for n in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return cls(params, lr=1e-3, weight_decay=0.01, **options).step


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
