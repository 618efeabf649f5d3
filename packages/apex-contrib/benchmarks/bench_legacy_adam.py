"""Steps of the deprecated optimizers on scaled 16-bit gradients, which also write the model.

Traffic per element: read a 16-bit gradient, read and write float32 master and moments, write the
16-bit parameter: 28 bytes for Adam, 20 for SGD with momentum. Before Apex's class one unscales into
float32 gradients, steps torch's fused optimizer and copies the masters.
"""

import torch

from apex.contrib.optimizers import FusedAdam
from apex.contrib.optimizers.fused_sgd import FusedSGD
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import models, params_with_grads

DEVICE, SCALE = chosen_device(), 1024.0


def ours(cls, sizes, **options):
    model = params_with_grads(sizes, DEVICE, torch.bfloat16)
    masters = [p.detach().float() for p in model]
    grads, outputs = [p.grad for p in model], [p.data for p in model]
    optimizer = cls(masters, lr=1e-3, **options)
    return lambda: optimizer.step(grads=grads, output_params=outputs, scale=SCALE)


def torchs(cls, sizes, **options):
    model = params_with_grads(sizes, DEVICE, torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model]
    for master in masters:
        master.grad = torch.zeros_like(master)
    scaled, grads = [p.grad for p in model], [master.grad for master in masters]
    optimizer = cls(masters, lr=1e-3, fused=True, **options)

    @torch.no_grad()
    def step():
        torch._foreach_copy_(grads, scaled)
        torch._foreach_mul_(grads, 1 / SCALE)
        optimizer.step()
        torch._foreach_copy_(model, masters)

    return step


for case, sizes in models(DEVICE).items():
    compare(
        "scaled_adam_step",
        case,
        bytes_moved=28 * sum(sizes),
        device=DEVICE,
        apex=ours(FusedAdam, sizes),
        torch_fused=torchs(torch.optim.AdamW, sizes, weight_decay=0.0),
    )
    compare(
        "masters_sgd_step",
        case,
        bytes_moved=20 * sum(sizes),
        device=DEVICE,
        apex=ours(FusedSGD, sizes, momentum=0.9),
        torch_fused=torchs(torch.optim.SGD, sizes, momentum=0.9),
    )
