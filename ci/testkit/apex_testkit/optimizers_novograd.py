"""NovoGrad's formula in plain PyTorch, as an oracle."""

import torch


def novograd_reference(p, *grads, lr, eps=1e-8, weight_decay=0.0, **options):
    """The formula for one tensor, step by step, in the dtype of its inputs."""
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    correct = options.get("bias_correction", True)
    alpha1 = 1 - beta1 if options.get("grad_averaging", True) else 1
    sign = -1 if options.get("maximize") else 1
    m, norm = torch.zeros_like(p), p.new_zeros(())
    for t, g in enumerate(grads, start=1):
        norm = _blended(norm, g, beta2, t == 1 and not options.get("init_zero"), options)
        c1, c2 = (1 - beta1**t, (1 - beta2**t) ** 0.5) if correct else (1, 1)
        denominator = norm / c2 + eps
        if options.get("reg_inside_moment"):
            m = beta1 * m + alpha1 * (sign * g / denominator + weight_decay * p)
            p = p - lr * (m / c1)
        else:
            m = beta1 * m + alpha1 * sign * g
            p = p - lr * ((m / c1) / denominator + weight_decay * p)
    return p


def _blended(norm, g, beta2, is_first, options):
    if options.get("norm_type", 2) == 0:
        own = g.abs().max() if g.numel() else norm * 0
        blended = beta2 * norm + (1 - beta2) * own
    else:
        own = g.norm()
        blended = (beta2 * norm**2 + (1 - beta2) * own**2).sqrt()
    return own if is_first else blended
