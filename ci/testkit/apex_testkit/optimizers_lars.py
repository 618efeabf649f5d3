"""LARS' formula in plain PyTorch, as an oracle."""

import torch


def lars_reference(p, *grads, lr, momentum=0.0, weight_decay=0.0, **options):
    """The formula for one tensor, step by step, in the dtype of its inputs."""
    trust, eps = options.get("trust_coefficient", 0.001), options.get("eps", 0.0)
    sign = -1 if options.get("maximize") else 1
    buffer = torch.zeros_like(p)
    for g in grads:
        grad_norm, param_norm = g.norm(), p.norm()
        ratio = trust * param_norm / (grad_norm + weight_decay * param_norm + eps)
        if options.get("is_skipped") or grad_norm == 0 or param_norm == 0:
            ratio = 1.0
        update = lr * ratio * (sign * g + weight_decay * p)
        buffer = momentum * buffer - update
        p = p + (momentum * buffer - update if options.get("nesterov") else buffer)
    return p
