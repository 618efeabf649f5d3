"""FusedAdamSWA on every pair of dtypes of a parameter and its copy, against steps in float64."""

import copy

import pytest
import torch

from apex.contrib.openfold_triton.fused_adam_swa import AdamMathType, FusedAdamSWA
from apex_testkit import FLOATS
from apex_testkit.optimizer_models import ModelParam, adam, exact

NUMBERS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
HYPER = {**NUMBERS, "adam_w_mode": True, "bias_correction": True}
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_lists(device, copied, state, shapes=((3, 5), (70,), (), (0,))):
    params = [torch.randn(shape, device=device).to(state) for shape in shapes]
    computes = [p.to(copied, copy=True).requires_grad_() for p in params]
    return params, computes, [torch.full_like(p, torch.nan) for p in params]


def make_grads(steps, lists):
    return [[torch.randn_like(c).detach() for c in lists[1]] for _ in range(steps)]


def train(optimizer, computes, all_grads, **options):
    for grads in all_grads:
        for compute, grad in zip(computes, grads, strict=True):
            compute.grad = None if grad is None else grad.clone()
        optimizer.step(**options)


def near(dtype, computed):
    """The rounding to a dtype, and some of those in a computation."""
    unit = 8 * torch.finfo(computed).eps
    return {"rtol": 0.51 * torch.finfo(dtype).eps + unit, "atol": unit}


@pytest.mark.parametrize("copied", FLOATS, ids=str)
@pytest.mark.parametrize("state", FLOATS, ids=str)
def test_any_pair_of_dtypes(state, copied, device):
    """Each step is that of float64, rounded once; copies are those of the rounded parameters."""
    lists = make_lists(device, copied, state)
    optimizer = FusedAdamSWA(*lists, 0.9, adam_math_mode=AdamMathType.ApexAdamW, **NUMBERS)
    of_moments = torch.float64 if state == torch.float64 else torch.float32
    computed = torch.float64 if torch.float64 in (state, copied) else torch.float32
    for step, grads in enumerate(make_grads(4, lists), start=1):
        weight = 0.1 if step > 1 else 1.0
        models, olds = [], [exact(a if step > 1 else p) for p, a in zip(*lists[::2], strict=True)]
        for p in lists[0]:
            kept = optimizer.state.get(p, {})
            moments = {key: exact(kept[key]) for key in MOMENTS if kept}
            models.append(ModelParam(exact(p), moments, step))
        train(optimizer, lists[1], [grads], grad_clip_scale=0.5)
        for model, grad, old, p, c, average in zip(models, grads, olds, *lists, strict=True):
            adam(model, 0.5 * exact(grad), HYPER, 0.0)
            limits = near(state, computed)
            torch.testing.assert_close(exact(p), model.value, **limits)
            torch.testing.assert_close(exact(average), old + weight * (model.value - old), **limits)
            for key in MOMENTS:
                moment = optimizer.state[p][key]
                limits = near(of_moments, computed)
                torch.testing.assert_close(exact(moment), model.state[key], **limits)
                assert moment.dtype == of_moments
            assert [t.dtype for t in (p, c, average)] == [state, copied, state]
            assert torch.equal(c, p.to(copied))
            assert step > 1 or torch.equal(average, p)


def every_pair(device):
    """Lists in which each pair of dtypes has a tensor."""
    pairs = [(state, copied) for state in FLOATS for copied in FLOATS]
    rows = [make_lists(device, copied, state, [(3,)]) for state, copied in pairs]
    return [[own[0] for own in lists] for lists in zip(*rows, strict=True)]


def test_all_pairs_of_dtypes_in_one_step(device):
    lists = every_pair(device)
    grads = make_grads(3, lists)
    grads[1][5] = grads[1][0] = None
    optimizer = FusedAdamSWA(*lists, 0.9, **NUMBERS)
    alone = [[[copy.deepcopy(t)] for t in own] for own in lists]
    train(optimizer, lists[1], grads)
    for index, own in enumerate(zip(*alone, strict=True)):
        train(FusedAdamSWA(*own, 0.9, **NUMBERS), own[1], [[each[index]] for each in grads])
        for together, (single,) in zip(lists, own, strict=True):
            assert torch.equal(together[index], single)
    # In-place writes are known to autograd, also where they go by a temporary.
    versions = [t._version for own in lists for t in own]
    optimizer.step()
    now = [t._version for own in lists for t in own]
    assert all(new > old for new, old in zip(now, versions, strict=True))


def test_a_wide_gradient_of_a_narrow_parameter_is_not_rounded_first(device):
    """Float64 gradients beyond float32's range step float32 parameters."""
    lists = make_lists(device, torch.float64, torch.float32, [(2,)])
    lists[0][0].fill_(1)
    optimizer = FusedAdamSWA(*lists, 0.5, lr=0.25, eps=0.0)
    grad = torch.tensor([1e-100, -1e100], dtype=torch.float64, device=device)
    train(optimizer, lists[1], [[grad]])
    assert lists[0][0].tolist() == [0.75, 1.25]


def test_a_refused_step_of_several_dtypes_changes_nothing(device):
    lists = every_pair(device)
    optimizer = FusedAdamSWA(*lists, 0.9)
    train(optimizer, lists[1], make_grads(2, lists))
    kept = lists[2][15].data
    before = copy.deepcopy((lists, optimizer.state_dict()["state"]))
    for lay, error, text in (
        (lambda t: t.int(), TypeError, r"swa_params\[15\] must be float64, .* got torch.int32"),
        (lambda t: t.double(), RuntimeError, "tensors of index 15 .* must have one dtype"),
    ):
        lists[2][15].data = lay(kept)
        with pytest.raises(error, match=f"FusedAdamSWA.step: .*{text}"):
            train(optimizer, lists[1], make_grads(1, lists))
        lists[2][15].data = kept
        for old, new in zip(before[0], lists, strict=True):
            assert all(map(torch.equal, old, new))
        for index, state in optimizer.state_dict()["state"].items():
            assert state["step"] == 2
            assert torch.equal(state["exp_avg"], before[1][index]["exp_avg"])


def test_a_copy_may_become_wider_between_steps(device):
    """Lists that were launched as they are go by temporaries then, and back."""
    lists = make_lists(device, torch.bfloat16, torch.float32)
    twins = copy.deepcopy(lists)
    optimizers = FusedAdamSWA(*lists, 0.9), FusedAdamSWA(*twins, 0.9)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float64, torch.float64, torch.bfloat16):
        for compute in lists[1]:
            compute.grad = None
            compute.data = compute.data.to(dtype)
        grads = [[grad.to(torch.bfloat16) for grad in own] for own in make_grads(1, twins)]
        train(optimizers[1], twins[1], grads)
        train(optimizers[0], lists[1], [[grad.to(dtype) for grad in own] for own in grads])
        torch.testing.assert_close(lists[0], twins[0])
        assert all(torch.equal(c, p.to(dtype)) for p, c in zip(*lists[:2], strict=True))


@pytest.mark.parametrize("name", ["params", "compute_params", "swa_params"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.cfloat, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(dtype, name):
    lists = {each: [torch.ones(3)] for each in ("params", "compute_params", "swa_params")}
    lists[name] = [torch.ones(3).to(dtype)]
    text = rf"FusedAdamSWA: {name}\[0\] must be float64, float32, float16 or bfloat16, got {dtype}"
    with pytest.raises(TypeError, match=text):
        FusedAdamSWA(**lists, swa_decay_rate=0.9)
