"""A whole LARS step() with momentum, Python included.  Traffic per fp32 element: read p and g for
the norms; read p, g, buffer and write p, buffer = 28 bytes.  Nobody else has LARS fused: the peer
is a composition of torch's foreach functions."""

import torch

from apex.optimizers import FusedLARS
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import models, params_with_grads

DEVICE = chosen_device()
LR, MOMENTUM, DECAY, TRUST = 0.1, 0.9, 1e-4, 1e-3


class Composition:
    """LARS in torch's foreach functions, as a careful user writes it."""

    def __init__(self, sizes):
        self.params = params_with_grads(sizes, DEVICE)
        self.grads = [p.grad for p in self.params]
        self.buffers = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def __call__(self):
        grad_norms = torch.stack(torch._foreach_norm(self.grads))
        param_norms = torch.stack(torch._foreach_norm(self.params))
        ratios = TRUST * param_norms / (grad_norms + DECAY * param_norms)
        rates = LR * torch.where((grad_norms == 0) | (param_norms == 0), 1.0, ratios)
        updates = torch._foreach_add(self.grads, self.params, alpha=DECAY)
        torch._foreach_mul_(updates, list(rates.unbind()))
        torch._foreach_mul_(self.buffers, MOMENTUM)
        torch._foreach_sub_(self.buffers, updates)
        torch._foreach_add_(self.params, self.buffers)


def fused(sizes):
    options = {"momentum": MOMENTUM, "weight_decay": DECAY, "trust_coefficient": TRUST}
    return FusedLARS(params_with_grads(sizes, DEVICE), lr=LR, **options).step


for case, sizes in models(DEVICE).items():
    compare(
        "lars_step",
        case,
        bytes_moved=28 * sum(sizes),
        device=DEVICE,
        apex=fused(sizes),
        torch_foreach=Composition(sizes),
    )
