"""LAMB in plain PyTorch, as an oracle."""

import torch


def lamb_reference(params, *grads_per_step, lr, weight_decay=0.01, eps=1e-6, **options):
    """The formula, step by step, in the dtype of its inputs; returns the parameters.

    Args:
        params: list of tensors.
        grads_per_step: for each step a list of gradients; None where a parameter has none.
        options: as of FusedLAMB.
    """
    counts = [0] * len(params)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    params = list(params)
    hyper = {"lr": lr, "weight_decay": weight_decay, "eps": eps, **options}
    limit = options.get("max_grad_norm", 1.0)
    for grads in grads_per_step:
        norms = [g.square().sum() for g in grads if g is not None]
        norm = torch.stack(norms).sum().sqrt() if norms else 0.0
        clip = norm / limit if limit > 0 and not norm <= limit else 1.0  # of nan: nan
        for i, g in enumerate(grads):
            if g is None:
                continue
            counts[i] += 1
            params[i], *moments[i] = _step(params[i], g / clip, *moments[i], counts[i], **hyper)
    return params


def _step(p, g, m, v, t, lr, weight_decay, eps, **options):
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    decoupled = options.get("adam_w_mode", True)
    if options.get("maximize", False):
        g = -g
    if not decoupled:
        g = g + weight_decay * p
    m = beta1 * m + (1 - beta1 if options.get("grad_averaging", True) else 1) * g
    v = beta2 * v + (1 - beta2) * g * g
    c1, c2 = (1 - beta1**t, 1 - beta2**t) if options.get("bias_correction", True) else (1, 1)
    update = (m / c1) / ((v / c2).sqrt() + eps)
    if decoupled:
        update = update + weight_decay * p
    param_norm, update_norm = p.square().sum().sqrt(), update.square().sum().sqrt()
    adapts = options.get("use_nvlamb", False) or weight_decay != 0
    ratio = param_norm / update_norm if adapts and param_norm and update_norm else 1.0
    return p - lr * ratio * update, m, v
