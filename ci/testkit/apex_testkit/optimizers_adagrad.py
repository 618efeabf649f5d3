"""Adagrad's formula in plain PyTorch, as an oracle."""

import torch


def adagrad_reference(p, *grads, lr, eps=1e-10, weight_decay=0.0, **options):
    """The formula, step by step, in the dtype of its inputs (torch.optim rounds 16-bit sums)."""
    decoupled, sign = options.get("adagrad_w_mode", False), -1 if options.get("maximize") else 1
    total = torch.zeros_like(p)
    for g in grads:
        g = sign * g
        if not decoupled:
            g = g + weight_decay * p
        total = total + g * g
        update = g / (total.sqrt() + eps)
        if decoupled:
            update = update + weight_decay * p
        p = p - lr * update
    return p
