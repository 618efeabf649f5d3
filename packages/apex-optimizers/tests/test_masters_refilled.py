"""What is written into a parameter wins over its float32 master; nothing else touches masters."""

from functools import partial

import pytest
import torch

from apex.optimizers import FusedAdam, FusedMixedPrecisionLamb
from apex_testkit.optimizer_models import everything

MAKERS = {
    "adam": partial(FusedAdam, lr=0.01, master_weights=True),
    "adam_capturable": partial(FusedAdam, lr=0.01, master_weights=True, capturable=True),
    "adam_float16": partial(FusedAdam, lr=0.01, master_weights=True, exp_avg_dtype=torch.float16),
    "adam_float16_masters": partial(
        FusedAdam, lr=0.01, master_weights=True, master_weight_dtype=torch.float16
    ),
    "remainders": partial(FusedAdam, lr=0.01, master_weights=True, store_param_remainders=True),
    "mp_lamb": partial(
        FusedMixedPrecisionLamb, lr=1e-4, weight_decay=0.0, reduced_precision_dtype=torch.bfloat16
    ),
}
all_optimizers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def started(make, device, count=2):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(33, generator=generator).to(device, torch.bfloat16) for _ in range(count)]
    params = [torch.nn.Parameter(v) for v in values]
    optimizer = make(params)
    for _ in range(3):
        step(optimizer, params, 1.0)
    return params, optimizer


def step(optimizer, params, gradient):
    for p in params:
        p.grad = torch.full_like(p, gradient)
    optimizer.step()


def masters_of(optimizer, params):
    if isinstance(optimizer, FusedAdam):
        return [optimizer.get_unscaled_state(p, "master_param").clone() for p in params]
    return [optimizer.state[p]["master_param"].clone() for p in params]


def change_all(params):
    """As ``load_state_dict`` of a model does."""
    with torch.no_grad():
        for p in params:
            p.copy_(torch.full_like(p, 100.0))


def change_memory(params):
    """As ``Module.to`` does."""
    for p in params:
        p.data = torch.full_like(p.data, 100.0)


@pytest.mark.parametrize("change", [change_all, change_memory])
@all_optimizers
def test_changed_parameters_win(make, change, device):
    params, optimizer = started(make, device)
    change(params)
    step(optimizer, params, 0.0)
    for p, master in zip(params, masters_of(optimizer, params), strict=True):
        torch.testing.assert_close(p.float(), torch.full_like(master, 100.0), atol=1, rtol=0)
        torch.testing.assert_close(master, torch.full_like(master, 100.0), atol=1, rtol=0)


@all_optimizers
def test_weights_loaded_after_the_state_win(make, device):
    """Where both come from one checkpoint, masters keep their precision."""
    params, optimizer = started(make, device)
    saved, weights = optimizer.state_dict(), [p.detach().clone() for p in params]
    for is_same in (True, False):
        others = [torch.nn.Parameter(torch.zeros_like(p)) for p in params]
        resumed = make(others)
        resumed.load_state_dict(saved)
        with torch.no_grad():
            for p, value in zip(others, weights, strict=True):
                p.copy_(value if is_same else torch.full_like(value, 100.0))
        step(resumed, others, 1.0)
        if not is_same:
            assert all(p.sub(100).abs().max() < 1 for p in others)
            continue
        step(optimizer, params, 1.0)
        pairs = zip(masters_of(optimizer, params), masters_of(resumed, others), strict=True)
        if "store_param_remainders" not in make.keywords:  # which are loaded beside a parameter
            assert all(torch.equal(a, b) for a, b in pairs)


@all_optimizers
def test_masters_keep_what_rounding_took(make, device):
    """Of parameters that nobody changed, and of those that were given their own values again."""
    results = []
    for again in (False, True):
        params, optimizer = started(make, device)
        if again:
            with torch.no_grad():
                params[0].copy_(params[0].clone())
                params[1].clamp_(-1e4, 1e4)
        step(optimizer, params, 1.0)
        results.append(masters_of(optimizer, params))
    for own, other in zip(*results, strict=True):
        assert torch.equal(own, other)
        assert not torch.equal(own, own.bfloat16().float())


def test_a_change_is_seen_across_a_step_with_other_gradients(device):
    params, optimizer = started(MAKERS["adam"], device)
    with torch.no_grad():
        params[1].clamp_(-0.25, 0.25)
    params[0].grad = None
    params[1].grad = torch.zeros_like(params[1])
    optimizer.step()
    assert params[1].abs().max() < 0.3


def test_a_master_that_somebody_sets_wins_over_an_unchanged_parameter(device):
    params, optimizer = started(MAKERS["adam"], device)
    optimizer.set_scaled_state(params[0], "master_param", torch.full((33,), 7.0, device=device))
    step(optimizer, params, 0.0)
    assert (params[0] - 7.0).abs().max() < 0.1


def test_a_master_that_is_put_into_a_state_is_used(device):
    params, optimizer = started(partial(FusedAdam, lr=1e-4), device, count=1)
    master = optimizer.state[params[0]]["master_param"] = params[0].detach().float()
    before = params[0].detach().clone(), master.clone()
    step(optimizer, params, 1.0)
    assert not torch.equal(master, before[1])
    assert torch.equal(params[0], master.bfloat16())


@all_optimizers
def test_a_refused_step_leaves_masters_as_they_were(make, device):
    """And the next one has not forgotten what was written into the parameter."""
    params, optimizer = started(make, device, count=1)
    others, reference = started(make, device, count=1)
    for own in (params, others):
        change_all(own)
    before = everything(optimizer, params)
    params[0].grad = torch.zeros_like(params[0]).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    after = everything(optimizer, params)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    for own, own_params in ((optimizer, params), (reference, others)):
        step(own, own_params, 1.0)
    assert torch.equal(params[0], others[0])
