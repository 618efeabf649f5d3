"""Optimizers with the master weights of amp, without amp: what FusedSGD and FusedLARS update."""

import types

import torch

from .accuracy import assert_as_accurate_as


def with_masters(cls, models, wide, **options):
    """An optimizer as amp leaves it, and its masters: they and float32 parameters in one group."""
    masters = [torch.nn.Parameter(m.detach().float()) for m in models]
    optimizer = cls([*masters, *wide], **options)
    optimizer._amp_stash = types.SimpleNamespace(
        fp16_groups=[models], fp32_from_fp16_groups=[masters], fp32_from_fp32_groups=[wide]
    )
    return optimizer, masters


def check_masters_and_copies(cls, reference, hyper, dtype, materialize, device):
    """Masters follow ``reference(p, *grads, **hyper)``, and the model has them rounded.

    Args:
        dtype: of the model's 16-bit parameters; None: both kinds in one model.
        materialize: masters have unscaled gradients; else the model has scaled ones.
    """
    dtypes = [dtype or torch.float16, dtype or torch.bfloat16]
    models = [
        torch.nn.Parameter(torch.randn(n, device=device, dtype=d))
        for n, d in zip((5, 257), dtypes, strict=True)
    ]
    wide = [torch.nn.Parameter(torch.randn(33, device=device))]
    optimizer, masters = with_masters(
        cls, models, wide, materialize_master_grads=materialize, **hyper
    )
    starts = [p.detach().clone() for p in (*masters, *wide)]
    scale = 1.0 if materialize else 64.0
    history = []
    for _ in range(3):
        # What reaches the optimizer: gradients of 16-bit values, scaled unless materialized.
        seen = [torch.randn_like(p) for p in (*models, *wide)]
        history.append([(g.float() / scale) for g in seen])
        for model, master, grad in zip(models, masters, seen, strict=False):
            model.grad, master.grad = (None, grad.float()) if materialize else (grad, None)
        wide[0].grad = seen[-1].clone()
        optimizer.most_recent_scale = scale
        optimizer.scale_set_by_backward = not materialize
        optimizer.step()
        assert optimizer.most_recent_scale == 1.0
        assert not optimizer.scale_set_by_backward
    for i, (p, start) in enumerate(zip((*masters, *wide), starts, strict=True)):
        own = [grads[i] for grads in history]
        # The parameter is rounded once in each of three steps.
        assert_as_accurate_as(
            lambda p, *g: reference(p, *g, **hyper), p.detach(), start, *own, ulps=3
        )
        assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
    for model, master in zip(models, masters, strict=True):
        assert torch.equal(model.detach(), master.detach().to(model.dtype))
