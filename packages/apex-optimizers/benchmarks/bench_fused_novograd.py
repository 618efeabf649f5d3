"""A whole NovoGrad step(), Python included.  Traffic per fp32 element: read g for the norm; read
p, g, m and write p, m = 24 bytes.  Nobody else has NovoGrad fused: the peer is a composition of
torch's foreach functions."""

import torch

from apex.optimizers import FusedNovoGrad
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import models, params_with_grads

DEVICE = chosen_device()
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.95, 0.98, 1e-8, 0.01


class Composition:
    """NovoGrad in torch's foreach functions, as a careful user writes it."""

    def __init__(self, sizes):
        self.params = params_with_grads(sizes, DEVICE)
        self.grads = [p.grad for p in self.params]
        self.exp_avgs = [torch.zeros_like(p) for p in self.params]
        self.norms = torch.stack(torch._foreach_norm(self.grads))
        self.step = 0

    @torch.no_grad()
    def __call__(self):
        self.step += 1
        grad_norms = torch.stack(torch._foreach_norm(self.grads))
        self.norms = (BETA2 * self.norms**2 + (1 - BETA2) * grad_norms**2).sqrt_()
        denominators = self.norms / (1 - BETA2**self.step) ** 0.5 + EPS
        torch._foreach_lerp_(self.exp_avgs, self.grads, 1 - BETA1)
        scales = (1 - BETA1**self.step) * denominators
        updates = torch._foreach_div(self.exp_avgs, list(scales.unbind()))
        torch._foreach_add_(updates, self.params, alpha=DECAY)
        torch._foreach_add_(self.params, updates, alpha=-LR)


def fused(sizes):
    return FusedNovoGrad(
        params_with_grads(sizes, DEVICE), lr=LR, betas=(BETA1, BETA2), weight_decay=DECAY
    ).step


for case, sizes in models(DEVICE).items():
    compare(
        "novograd_step",
        case,
        bytes_moved=24 * sum(sizes),
        device=DEVICE,
        apex=fused(sizes),
        torch_foreach=Composition(sizes),
    )
