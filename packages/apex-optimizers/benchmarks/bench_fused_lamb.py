"""A whole LAMB step(), Python included.  Traffic per fp32 element: read g for the norm; read
p, g, m, v and write m, v; read p, m, v and write p = 44 bytes.  Nobody else has LAMB fused: the
peers are compositions of torch's foreach functions, and the formula compiled."""

import torch

from apex.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from apex_testkit.bench import chosen_device, compare
from apex_testkit.bench_models import BERT_BASE, models, params_with_grads

DEVICE = chosen_device()
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-6, 0.01

MODELS = models(DEVICE, **{"bert base": BERT_BASE})


def stepper(cls, sizes, dtype=torch.float32, **options):
    return cls(params_with_grads(sizes, DEVICE, dtype), lr=LR, weight_decay=DECAY, **options).step


class Composition:
    """LAMB in torch's foreach functions, as a careful user writes it."""

    def __init__(self, sizes):
        self.params = params_with_grads(sizes, DEVICE)
        self.grads = [p.grad for p in self.params]
        self.exp_avgs = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sqs = [torch.zeros_like(p) for p in self.params]
        self.step = 0

    @torch.no_grad()
    def __call__(self):
        self.step += 1
        norm = torch.stack(torch._foreach_norm(self.grads)).norm()
        grads = torch._foreach_mul(self.grads, 1 / norm.clamp(min=1.0))
        torch._foreach_lerp_(self.exp_avgs, grads, 1 - BETA1)
        torch._foreach_mul_(self.exp_avg_sqs, BETA2)
        torch._foreach_addcmul_(self.exp_avg_sqs, grads, grads, 1 - BETA2)
        roots = torch._foreach_div(self.exp_avg_sqs, 1 - BETA2**self.step)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, EPS)
        updates = torch._foreach_div(self.exp_avgs, 1 - BETA1**self.step)
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, self.params, alpha=DECAY)
        rates = torch._foreach_div(torch._foreach_norm(self.params), torch._foreach_norm(updates))
        torch._foreach_mul_(updates, rates)
        torch._foreach_add_(self.params, updates, alpha=-LR)


class Compiled:
    """The formula for all tensors in one graph, compiled."""

    def __init__(self, sizes):
        self.params = params_with_grads(sizes, DEVICE)
        self.grads = [p.grad for p in self.params]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.step = torch.zeros((), device=DEVICE)
        self.run = torch.compile(self.eager)

    def eager(self, params, grads, moments, step):
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        factor = 1 / norm.clamp(min=1.0)
        for p, g, (m, v) in zip(params, grads, moments, strict=True):
            m.lerp_(g * factor, 1 - BETA1)
            v.mul_(BETA2).add_((1 - BETA2) * (g * factor).square())
            root = (v / (1 - BETA2**step)).sqrt() + EPS
            update = m / (1 - BETA1**step) / root + DECAY * p
            p.sub_(LR * p.norm() / update.norm() * update)

    @torch.no_grad()
    def __call__(self):
        self.step += 1
        self.run(self.params, self.grads, self.moments, self.step)


for case, sizes in MODELS.items():
    # Compiling a graph of hundreds of tensors takes minutes.
    compiled = {"torch_compiled": Compiled(sizes)} if len(sizes) < 10 else {}
    compare(
        "lamb_step",
        case,
        bytes_moved=44 * sum(sizes),
        device=DEVICE,
        apex=stepper(FusedLAMB, sizes),
        torch_foreach=Composition(sizes),
        **compiled,
    )

sizes = MODELS["mlp 2 x 10M"]
compare(
    "lamb_step_by_chance",
    "mlp 2 x 10M, bf16 parameters",
    device=DEVICE,
    apex=stepper(FusedLAMB, sizes, torch.bfloat16, stochastic_rounding=True),
    apex_to_nearest=stepper(FusedLAMB, sizes, torch.bfloat16),
)
compare(
    "lamb_step_bf16",
    "mlp 2 x 10M, fp32 masters and states",
    # The norm of g; p, g, m, v and m, v; p, m, v and p with its copy.
    bytes_moved=(2 + 22 + 18) * sum(sizes),
    device=DEVICE,
    apex=stepper(
        FusedMixedPrecisionLamb, sizes, torch.bfloat16, reduced_precision_dtype=torch.bfloat16
    ),
    torch_foreach_fp32=Composition(sizes),
)
