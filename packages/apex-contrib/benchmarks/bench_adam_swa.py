"""Steps of Adam on float32 parameters of a bfloat16 model, with an average of the parameters.

Traffic per element: read a 16-bit gradient, read and write float32 parameter, moments and average,
write the 16-bit copy: 36 bytes. Without FusedAdamSWA one copies gradients into float32, steps
torch's fused optimizer, copies the parameters to the model, and moves the average.
"""

import torch

from apex.contrib.openfold_triton.fused_adam_swa import FusedAdamSWA
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import models, params_with_grads

DEVICE, DECAY = chosen_device(), 0.999


def ours(sizes):
    model = params_with_grads(sizes, DEVICE, torch.bfloat16)
    params = [p.detach().float() for p in model]
    averages = [p.clone() for p in params]
    optimizer = FusedAdamSWA(params, model, averages, DECAY, lr=1e-3)
    return lambda: optimizer.step(grad_clip_scale=0.5)


def torchs(sizes):
    model = params_with_grads(sizes, DEVICE, torch.bfloat16)
    params = [p.detach().float().requires_grad_() for p in model]
    averages = [p.detach().clone() for p in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    own, wide = [p.grad for p in model], [p.grad for p in params]
    optimizer = torch.optim.Adam(params, lr=1e-3, fused=True)

    @torch.no_grad()
    def step():
        torch._foreach_copy_(wide, own)
        torch._foreach_mul_(wide, 0.5)
        optimizer.step()
        torch._foreach_copy_(model, params)
        torch._foreach_lerp_(averages, params, 1 - DECAY)

    return step


for case, sizes in models(DEVICE).items():
    compare(
        "adam_swa_step",
        case,
        bytes_moved=36 * sum(sizes),
        device=DEVICE,
        apex=ours(sizes),
        torch_fused=torchs(sizes),
    )
