"""Norm, clipping and unscaling over lists of gradients.  Traffic per fp32 element: the norm reads 4
bytes; clipping reads twice and writes once, 12; unscaling reads and writes, 8."""

import torch

from apex.multi_tensor_apply import multi_tensor_l2norm, multi_tensor_scale
from apex_testkit.bench import chosen_device, compare

DEVICE = chosen_device()

LISTS = {
    "32 x 1M": [1_000_000] * 32,
    "10,000 x 100": [100] * 10_000,
    "400 x 10k": [10_000] * 400,
    **({"8 x 100M": [100_000_000] * 8} if DEVICE == "cuda" else {}),
}


def gradients(sizes):
    """Gradients where a training loop has them: in .grad of parameters."""
    params = [torch.nn.Parameter(torch.empty(n, device=DEVICE)) for n in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params, [p.grad for p in params]


def clipper(grads):
    """What clip_grad_norm_ does: scales in place if the norm exceeds 1."""
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def clip():
        norm, _ = multi_tensor_l2norm(grads)
        multi_tensor_scale(grads, grads, flag, min(1.0, 1.0 / (norm.item() + 1e-6)))

    return clip


for case, sizes in LISTS.items():
    numel = sum(sizes)
    params, grads = gradients(sizes)
    compare(
        "l2norm",
        case,
        bytes_moved=4 * numel,
        device=DEVICE,
        apex=lambda grads=grads: multi_tensor_l2norm(grads),
        torch_foreach_norm=lambda grads=grads: torch._foreach_norm(grads),
        torch_total_norm=lambda grads=grads: torch.nn.utils.get_total_norm(grads, foreach=True),
    )
    compare(
        "clip_grad_norm",
        case,
        bytes_moved=12 * numel,
        device=DEVICE,
        apex=clipper(grads),
        torch_foreach=lambda params=params: torch.nn.utils.clip_grad_norm_(
            params, 1.0, foreach=True
        ),
    )
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found_inf, one = torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
    compare(
        "unscale",
        case,
        bytes_moved=8 * numel,
        device=DEVICE,
        apex=lambda grads=grads, flag=flag: multi_tensor_scale(grads, grads, flag, 1.0),
        torch_amp=lambda grads=grads, found_inf=found_inf, one=one: (
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, one)
        ),
    )
