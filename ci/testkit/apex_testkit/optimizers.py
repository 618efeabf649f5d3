"""Optimizers: formulas in plain PyTorch as oracles, and a training loop on given gradients."""

import torch


def adam_reference(p, *grads, lr, weight_decay=0.0, eps=1e-8, adam_w_mode=True, **options):
    """The formula, step by step, in the dtype of its inputs (torch.optim rounds 16-bit moments)."""
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    correct = options.get("bias_correction", True)
    m, v, largest = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        if not adam_w_mode:
            g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        largest = torch.maximum(largest, v) if options.get("amsgrad", False) else v
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if correct else (1, 1)
        update = (m / c1) / ((largest / c2).sqrt() + eps)
        if adam_w_mode:
            update = update + weight_decay * p
        p = p - lr * update
    return p


def sgd_reference(p, *grads, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, **options):
    """The formula, step by step, in the dtype of its inputs (torch.optim rounds 16-bit buffers)."""
    nesterov, late_decay = options.get("nesterov", False), options.get("wd_after_momentum", False)
    sign = -1 if options.get("maximize", False) else 1
    buffer = None
    for g in grads:
        g = sign * g
        if not late_decay:
            g = g + weight_decay * p
        update = g
        if momentum:
            buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
            update = g + momentum * buffer if nesterov else buffer
        if late_decay:
            update = update + weight_decay * p
        p = p - lr * update
    return p


def run_steps(optimizer_class, params, grads_per_step, **hyper):
    """Make an optimizer, take one step for every list of gradients, and return it."""
    optimizer = optimizer_class(params, **hyper)
    for grads in grads_per_step:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return optimizer
