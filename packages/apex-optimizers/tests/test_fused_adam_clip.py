"""FusedAdam.step that clips gradients, or skips itself, by their norm."""

import pytest
import torch

from apex.multi_tensor_apply.multi_tensor_l2norm import multi_tensor_l2norm
from apex.optimizers import FusedAdam
from apex_testkit import FLOATS
from apex_testkit.grids import HALVES

SIZES = [(1,), (0,), (33, 65), (7, 3, 5, 2), (10_007,), ()]
BF16 = torch.bfloat16
OPTIONS = {
    "adamw": {},
    "adam": {"adam_w_mode": False},
    "maximize": {"maximize": True},
    "masters": {"master_weights": True},
    "capturable": {"capturable": True},
    "capturable masters": {"capturable": True, "master_weights": True, "adam_w_mode": False},
    "amsgrad": {"amsgrad": True, "betas": (0.9, 0.6)},
    "capturable amsgrad masters": {"capturable": True, "amsgrad": True, "master_weights": True},
    "half masters": {"master_weights": True, "master_weight_dtype": torch.float16},
    "small moments": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": BF16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
}


def make(device, dtype=torch.float32, seed=0, sizes=SIZES, **options):
    """An optimizer of two groups, and its parameters."""
    generator = torch.Generator().manual_seed(seed)
    params = [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(device, dtype))
        for size in sizes
    ]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    return FusedAdam(groups, lr=0.05, weight_decay=0.1, **options), params


def set_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(100 + seed)
    for param in params:
        values = torch.randn(param.shape, generator=generator) * scale
        param.grad = values.to(param.device, param.dtype)


def clip_in_memory(params, max_norm):
    norm, _ = multi_tensor_l2norm([p.grad for p in params], wide=True)
    # A number of Python: torch rounds a tensor without dimensions to 16 bits first, on a GPU alone.
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for param in params:
        param.grad.mul_(factor)


def everything(optimizer, params):
    state = [optimizer.state[p].get(key) for p in params for key in ("exp_avg", "exp_avg_sq")]
    return [p.detach().clone() for p in params] + [s.clone() for s in state if s is not None]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e9])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_is_bitwise_what_clipping_first_gives(options, dtype, max_norm, device):
    ours, params = make(device, dtype, **options)
    theirs, twins = make(device, dtype, **options)
    for seed in range(3):
        set_gradients(params, seed)
        set_gradients(twins, seed)
        given = [p.grad.clone() for p in params]
        ours.step(max_norm=max_norm)
        assert_same([p.grad for p in params], given)
        clip_in_memory(twins, max_norm)
        theirs.step()
    assert_same(everything(ours, params), everything(theirs, twins))


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_follows_torchs_clipping_and_adamw(max_norm, device):
    ours, params = make(device, torch.float64)
    _, twins = make(device, torch.float64)
    groups = [{"params": twins[:2]}, {"params": twins[2:], "lr": 0.02}]
    theirs = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
    for seed in range(10):
        set_gradients(params, seed)
        set_gradients(twins, seed)
        ours.step(max_norm=max_norm)
        norm = torch.nn.utils.clip_grad_norm_(twins, max_norm)
        theirs.step()
        torch.testing.assert_close(ours.grad_norm[0], norm, rtol=1e-12, atol=0)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-12, atol=1e-13)


def test_the_norm_is_of_all_dtypes_together(device):
    dtypes = [torch.float64, torch.float32, *HALVES]
    params = [torch.nn.Parameter(torch.ones(50, device=device, dtype=d)) for d in dtypes]
    optimizer = FusedAdam(params)
    set_gradients(params, 1)
    whole = torch.cat([p.grad.double() for p in params]).norm()
    optimizer.step(max_norm=1.0)
    torch.testing.assert_close(optimizer.grad_norm[0], whole, rtol=1e-7, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e5])
@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["plain", "capturable"])
def test_a_skipped_step_is_as_if_it_had_not_been(options, bad, device):
    if device.type == "cuda" and not options:
        pytest.skip("on a GPU only capturable steps can be skipped")
    limits = {"max_norm": 0.5, "skip_nonfinite": True, "skip_above": 1e4}
    ours, params = make(device, **options)
    theirs, twins = make(device, **options)
    for seed in range(4):
        set_gradients(params, seed)
        if seed in (0, 2):
            params[2].grad[5, 6] = bad
            before = everything(ours, params) if seed else [p.detach().clone() for p in params]
            ours.step(**limits)
            after = everything(ours, params) if seed else [p.detach() for p in params]
            assert_same(after, before)
            assert not abs(float(ours.grad_norm)) <= 1e4
            continue
        set_gradients(twins, seed)
        ours.step(**limits)
        theirs.step(**limits)
    assert_same(everything(ours, params), everything(theirs, twins))
    assert [int(group["step"]) for group in ours.param_groups] == [2, 2]
    assert {int(ours.state[p]["step"]) for p in params} == {2}


def test_without_skipping_infinite_gradients_reach_the_parameters(device):
    """As with torch's clipping: an infinite norm makes finite gradients 0 and infinite ones nan."""
    optimizer, params = make(device)
    set_gradients(params, 0)
    params[0].grad[0] = torch.inf
    before = params[2].detach().clone()
    optimizer.step(max_norm=1.0, skip_above=None)
    assert params[0].isnan().all()
    assert params[2].isfinite().all()
    assert not torch.equal(before, params[2])  # the decay


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_clips_what_a_grad_scaler_has_scaled(found_inf, device):
    ours, params = make(device, capturable=True)
    theirs, twins = make(device, capturable=True)
    set_gradients(params, 3, scale=1024.0)
    set_gradients(twins, 3)
    ours.grad_scale = torch.tensor(1024.0, device=device)
    ours.found_inf = torch.tensor(found_inf, device=device)
    before = [p.detach().clone() for p in params]
    ours.step(max_norm=0.5, skip_nonfinite=True)
    if found_inf:
        assert_same([p.detach() for p in params], before)
        return
    theirs.step(max_norm=0.5)
    assert_same(everything(ours, params), everything(theirs, twins))
    assert_same([p.grad for p in params], [p.grad for p in twins])  # unscaled, not clipped
    torch.testing.assert_close(ours.grad_norm, theirs.grad_norm)


def test_the_next_step_does_not_clip(device):
    ours, params = make(device)
    theirs, twins = make(device)
    for seed, limits in enumerate([{"max_norm": 0.5}, {}]):
        set_gradients(params, seed)
        set_gradients(twins, seed)
        ours.step(**limits)
        if limits:
            clip_in_memory(twins, 0.5)
        theirs.step()
    assert_same(everything(ours, params), everything(theirs, twins))


def test_gradients_of_another_layout_are_clipped(device):
    ours, params = make(device, sizes=[(3, 4), (5, 6)])
    theirs, twins = make(device, sizes=[(3, 4), (5, 6)])
    for own in (params, twins):
        set_gradients(own, 0)
        own[0].grad = own[0].grad[:1].expand(3, 4)
        own[1].grad = own[1].grad.t().contiguous().t()
    ours.step(max_norm=0.1)
    for twin in twins:
        twin.grad = twin.grad.contiguous()
    clip_in_memory(twins, 0.1)
    theirs.step()
    assert_same(everything(ours, params), everything(theirs, twins))


@pytest.mark.parametrize("name", ["max_norm", "skip_above"])
@pytest.mark.parametrize("value", [-1.0, torch.nan, True, "1"])
def test_bad_limits_change_nothing(name, value, device):
    optimizer, params = make(device, capturable=True)
    set_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=f"FusedAdam.step: {name} must be a number >= 0"):
        optimizer.step(**{name: value})
    assert_same([p.detach() for p in params], before)
    assert not optimizer.state


def test_a_sparse_gradient_is_refused_before_anything_changes(device):
    optimizer, params = make(device, sizes=[(3,), (3, 4)])
    set_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    params[1].grad = torch.zeros(3, 4, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="is sparse"):
        optimizer.step(max_norm=1.0)
    assert_same([p.detach() for p in params], before)


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["plain", "capturable"])
def test_without_gradients_there_is_nothing_to_do(options, device):
    optimizer, _ = make(device, **options)
    may_skip = device.type != "cuda" or bool(options)  # a GPU skips capturable steps alone
    optimizer.step(max_norm=1.0, skip_nonfinite=may_skip)
    assert not optimizer.state
