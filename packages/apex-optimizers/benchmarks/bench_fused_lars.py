"""A whole LARS step() with momentum, Python included.  Traffic per fp32 element: read p and g for
the norms; read p, g, buffer and write p, buffer = 28 bytes.  Nobody else has LARS fused: the peer
is a composition of torch's foreach functions."""

import torch

from apex.optimizers import FusedLARS
from apex_testkit.bench import chosen_device, compare

DEVICE = chosen_device()
LR, MOMENTUM, DECAY, TRUST = 0.1, 0.9, 1e-4, 1e-3
MODELS = {
    "mlp 2 x 10M": [10_000_000] * 2,
    "10,000 x 100": [100] * 10_000,
    "norms 400 x 1k": [1_000] * 400,
    **({"mlp 2 x 200M": [200_000_000] * 2} if DEVICE == "cuda" else {}),
}


def make(sizes):
    params = [torch.nn.Parameter(torch.randn(n, device=DEVICE)) for n in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


class Composition:
    """LARS in torch's foreach functions, as a careful user writes it."""

    def __init__(self, sizes):
        self.params = make(sizes)
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
    return FusedLARS(make(sizes), lr=LR, **options).step


for case, sizes in MODELS.items():
    compare(
        "lars_step",
        case,
        bytes_moved=28 * sum(sizes),
        device=DEVICE,
        apex=fused(sizes),
        torch_foreach=Composition(sizes),
    )
