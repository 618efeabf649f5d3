"""Sharded optimizers over the same parameters: the newest one has them, and older ones say so."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB

ADAM = {
    "adam": lambda params: DistributedFusedAdam(params, lr=0.1),
    "late adam": lambda params: DistributedFusedAdam(params, lr=0.1, overlap_grad_sync=False),
    "flat adam": lambda params: DistributedFusedAdam(
        params, lr=0.1, contiguous_grad_buffer=True, contiguous_param_buffer=True
    ),
}
LAMB = {
    "lamb": lambda params: DistributedFusedLAMB(params, lr=0.1),
    "late lamb": lambda params: DistributedFusedLAMB(params, lr=0.1, overlap_reductions=False),
}
KINDS = ADAM | LAMB


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_params():
    return [nn.Parameter(torch.ones(4)) for _ in range(3)]


def backward(params):
    sum(param.sum() for param in params).backward()


def norm_of(optimizer):
    if isinstance(optimizer, DistributedFusedAdam):
        return optimizer.grad_norm().item()
    optimizer.complete_reductions()
    return optimizer.L2_grad_norm.item()


def trained(kind, params):
    optimizer = KINDS[kind](params)
    backward(params)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_the_newest_one_works(first, second, is_kept, world):
    params = make_params()
    old = trained(first, params)
    alone = [nn.Parameter(param.detach().clone()) for param in params]
    if not is_kept:
        del old
    new, other = KINDS[second](params), KINDS[second](alone)
    for _ in range(2):
        for optimizer, own in ((new, params), (other, alone)):
            backward(own)
            assert norm_of(optimizer) == pytest.approx(12**0.5, rel=1e-6)
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, params, alone))
    assert not torch.equal(params[0], torch.ones(4))


CALLS = {
    "adam": {
        "step": lambda o: o.step(),
        "zero_grad": lambda o: o.zero_grad(),
        "grad_norm": lambda o: o.grad_norm(),
        "clip": lambda o: o.clip_grad_norm(1.0),
        "unscale": lambda o: o.unscale_grads(inv_scale=1.0),
        "grad_sync": lambda o: o.grad_sync(),
        "load": lambda o: o.load_state_dict(o.state_dict()),
        "load shards": lambda o: o.load_sharded_state_dict(o.sharded_state_dict()),
        "add": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    },
    "lamb": {
        "step": lambda o: o.step(),
        "zero_grad": lambda o: o.zero_grad(),
        "complete_reductions": lambda o: o.complete_reductions(),
        "gather_params": lambda o: o.gather_params(),
        "load": lambda o: o.load_state_dict(o.state_dict()),
    },
}


@pytest.mark.parametrize("second", ["adam", "lamb"])
@pytest.mark.parametrize(
    ("first", "call"), [(kind, call) for kind, calls in CALLS.items() for call in calls]
)
def test_an_older_one_says_so(first, call, second, world):
    params = make_params()
    old = trained(first, params)
    new = KINDS[second](params[:2])  # a part of them is enough
    before = copy.deepcopy(params)
    message = f"{type(old).__name__}.*belong to a newer {type(new).__name__}"
    with pytest.raises(RuntimeError, match=message):
        CALLS[first][call](old)
    backward(params)
    with pytest.raises(RuntimeError, match=message):
        CALLS[first][call](old)
    assert all(map(torch.equal, params, before))
    assert norm_of(new) == pytest.approx(8**0.5, rel=1e-6)


def test_the_state_of_an_older_one_can_be_taken_over(world):
    params = make_params()
    old = trained("adam", params)
    new = DistributedFusedAdam(params, lr=0.1)
    new.load_state_dict(old.state_dict())
    assert new.state_dict()["state"]["step"] == 1
    assert torch.equal(new.state_dict()["state"][0]["exp_avg"], torch.full((4,), 0.1))
    old = DistributedFusedAdam(
        [nn.Parameter(torch.ones(4).bfloat16())],
        param_sync_dtype=torch.bfloat16,
        store_params=False,
        store_param_remainders=True,
    )
    old.init_params()
    old.state_dict()
    new = DistributedFusedAdam(old.parameters())
    for save in (old.state_dict, old.sharded_state_dict):
        # Half of its values are in the parameters, which the other one steps.
        with pytest.raises(RuntimeError, match=r"state_dict: parameters.*they are half of this"):
            save()


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", ["adam", "flat adam"])
def test_gradients_that_no_step_has_used(first, second, world):
    """They are in the older one's buckets, where the newer one does not find them."""
    params = make_params()
    old = trained(first, params)
    backward(params)
    with pytest.raises(RuntimeError, match=r"holds gradients which no step has used.*zero_grad\("):
        KINDS[second](params)
    assert norm_of(old) == pytest.approx(12**0.5, rel=1e-6)  # nothing has changed for it
    old.step()
    new = KINDS[second](params)
    backward(params)
    new.step()


@pytest.mark.parametrize(
    "first", [kind for kind in KINDS if kind != "flat adam"]
)  # which has buckets at once
@pytest.mark.parametrize("second", KINDS)
def test_gradients_of_parameters_stay(first, second, world):
    """The first backward of Adam, and all of LAMB, leave them where the newer one takes them."""
    params = make_params()
    old = trained(first, params) if first == "late adam" else KINDS[first](params)
    backward(params)
    new = KINDS[second](params)
    assert norm_of(new) == pytest.approx(12**0.5, rel=1e-6)
    del old


def test_a_constructor_that_fails_takes_nothing(world):
    params = make_params()
    old = trained("adam", params)
    failed = DistributedFusedAdam.__new__(DistributedFusedAdam)  # a traceback may keep it alive
    options = {"contiguous_param_buffer": True, "param_sync_dtype": torch.bfloat16}
    with pytest.raises(RuntimeError, match="contiguous parameter buffer"):
        failed.__init__(params, **options)
    backward(params)
    assert norm_of(old) == pytest.approx(12**0.5, rel=1e-6)
    old.step()
    del failed


def test_a_group_that_is_refused_is_not_added(world):
    params = make_params()
    old = trained("adam", params)
    for group in (
        {"params": [nn.Parameter(torch.ones(2))], "lr": -1.0},
        {"params": [nn.Parameter(torch.ones(4, 4)[:, :2])]},
        {"params": [nn.Parameter(torch.ones(2, device="meta"))]},
    ):
        with pytest.raises((ValueError, RuntimeError), match="DistributedFusedAdam"):
            old.add_param_group(group)
    assert len(old.param_groups) == 1
    backward(params)
    old.step()
    assert len(old.state_dict()["param_groups"]) == 1


@pytest.mark.parametrize(("kind", "error"), [("adam", RuntimeError), ("lamb", ValueError)])
def test_parameters_on_two_devices(kind, error, world):
    params = [*make_params(), nn.Parameter(torch.ones(4, device="meta"))]
    with pytest.raises(error, match=r"params must be on one device, got \['cpu', 'meta'\]\.$"):
        KINDS[kind](params)


def test_a_group_of_another_ones_parameters(world):
    first, second = make_params(), make_params()
    old, new = trained("adam", first), trained("adam", second)
    new.add_param_group({"params": first[:1]})
    with pytest.raises(RuntimeError, match="belong to a newer DistributedFusedAdam"):
        old.step()
    backward([*first, *second])
    assert norm_of(new) == pytest.approx(16**0.5, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_do_not_keep_an_optimizer(kind, world):
    params = make_params()
    gone = weakref.ref(trained(kind, params))
    gc.collect()
    assert gone() is None


def check_ranks(rank, world):
    """A rank that refuses takes the others with it, and parameters under way still arrive."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    options = {"lr": 0.1, "overlap_param_sync": True, "module": model, "bucket_cap_mb": 0.0001}
    old = DistributedFusedAdam(model.parameters(), **options)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        old.step()
        old.zero_grad()
    if rank == 1:
        with old.no_sync(greedy_grad_copy=True):
            model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        DistributedFusedLAMB(model.parameters())
    assert ("ranks [1]" if rank == 0 else "no step has used") in str(caught.value)
    if rank == 1:
        old.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    old.step()  # parameters are under way now
    new = DistributedFusedAdam(model.parameters(), lr=0.1)
    values = [param.detach().clone() for param in model.parameters()]
    masters = old.state_dict()["state"]
    assert all(torch.equal(masters[i]["param"], value) for i, value in enumerate(values))
    model(torch.ones(2, 3)).sum().backward()
    new.step()
    assert not torch.equal(values[0], next(model.parameters()))


def test_on_two_ranks(two_ranks):
    two_ranks(check_ranks)


WRAPPED = {
    "plain": ({}, {}),
    "views": ({"gradient_as_bucket_view": True}, {}),
    "small buckets": ({}, {"bucket_cap_mb": 1e-5}),
    "flat views": ({"gradient_as_bucket_view": True}, {"contiguous_grad_buffer": True}),
}


def step_three_times(wrapper, optimizer):
    for _ in range(3):
        wrapper(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", WRAPPED)
def test_what_another_wrapper_reduces_is_refused(case, world):
    """It writes its averages where they would be reduced again, from the second backward on."""
    of_wrapper, of_optimizer = WRAPPED[case]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapper = nn.parallel.DistributedDataParallel(model, **of_wrapper)
    optimizer = DistributedFusedAdam(model.parameters(), **of_optimizer)
    with pytest.raises(RuntimeError, match=r"reduces the gradient.*overlap_grad_sync=False"):
        step_three_times(wrapper, optimizer)
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(RuntimeError, match="reduces the gradient"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_what_another_wrapper_accumulates_is_refused(world):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapper = nn.parallel.DistributedDataParallel(model)
    optimizer = DistributedFusedAdam(model.parameters())
    wrapper(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    wrapper(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="reduces the gradient"):
        wrapper(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("way", ["late", "no_sync"])
def test_another_wrapper_may_be_there(way, world):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapper = nn.parallel.DistributedDataParallel(model)
    optimizer = DistributedFusedAdam(model.parameters(), overlap_grad_sync=way != "late")
    for _ in range(3):
        x = torch.ones(2, 3)
        wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        wanted = torch.cat([grad.flatten() for grad in wanted]).norm()
        with wrapper.no_sync() if way == "no_sync" else contextlib.nullcontext():
            wrapper(x).sum().backward()
        torch.testing.assert_close(optimizer.grad_norm(), wanted)
        optimizer.step()
        optimizer.zero_grad()


def test_a_script_may_add_gradients(world):
    params = make_params()
    optimizer = trained("adam", params)
    for _ in range(2):
        backward(params)
        for param in params:
            param.grad = torch.full((4,), 2.0)
        assert norm_of(optimizer) == pytest.approx(3 * 12**0.5, rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_another_kind_of_optimizer_says_that_it_has_no_gradients(kind, world):
    params = make_params()
    old = trained("adam", params)
    plain = kind(params, lr=0.1)
    plain.step()  # nothing has come yet
    backward(params)
    before = copy.deepcopy(params)
    with pytest.raises(
        RuntimeError, match=r"\w+\.step: no parameter has .* a DistributedFusedAdam"
    ):
        plain.step()
    assert all(map(torch.equal, params, before))
    assert norm_of(old) == pytest.approx(12**0.5, rel=1e-6)
    old.step()
    plain.step()  # these gradients are used
    del old
    gc.collect()
    before = copy.deepcopy(params)
    backward(params)
    plain.step()
    assert not any(map(torch.equal, params, before))


@pytest.mark.parametrize("first", ["late adam", "lamb", "late lamb"])
def test_another_kind_of_optimizer_beside_one_that_takes_nothing(first, world):
    params = make_params()
    old = trained(first, params)
    before = copy.deepcopy(params)
    backward(params)
    torch.optim.SGD(params, lr=0.1).step()
    assert not any(map(torch.equal, params, before))
    del old
