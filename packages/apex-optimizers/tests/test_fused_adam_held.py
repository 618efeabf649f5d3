"""Lists held in C++ between steps: same results, every replaced tensor noticed, nothing leaked."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex.optimizers import FusedAdam
from apex.optimizers.fused_adam.buckets import ADAM
from apex.optimizers.stepping.held_lists import MIN_TENSORS
from apex_testkit.held_lists import PlainLists, holders

COUNT = MIN_TENSORS + 3


def make(device, dtype=torch.float32, count=COUNT, **options):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(3 + i % 5, generator=generator) for i in range(count)]
    params = [torch.nn.Parameter(v.to(device, dtype)) for v in values]
    return params, FusedAdam(params, lr=0.1, weight_decay=0.01, **options)


def advance(params, optimizer, steps=1, seed=2):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()


def assert_same(params, optimizer, other_params, other):
    for p, q in zip(params, other_params, strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, other.state[q][key])


def compare_with_plain(device, change, dtype=torch.float32, **options):
    """Three steps, ``change(params, optimizer)``, three steps: with held lists and without."""
    params, optimizer = make(device, dtype, **options)
    advance(params, optimizer, 3)
    assert len(holders(optimizer)) == 1
    change(params, optimizer)
    advance(params, optimizer, 3, seed=3)
    with PlainLists():
        plain_params, plain = make(device, dtype, **options)
        advance(plain_params, plain, 3)
        change(plain_params, plain)
        advance(plain_params, plain, 3, seed=3)
        assert not holders(plain)
    assert_same(params, optimizer, plain_params, plain)
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
def test_same_bits_as_with_plain_lists(dtype, master_weights, device):
    options = {"master_weights": master_weights}
    compare_with_plain(device, lambda *_: None, dtype, **options)


def replace_data(params, optimizer):
    params[1].data = torch.ones_like(params[1])
    params[2].data = params[2].detach().clone()


def replace_states(params, optimizer):
    state = optimizer.state[params[1]]
    state["exp_avg"] = state["exp_avg"] * 2
    optimizer.state[params[4]]["exp_avg_sq"] = torch.ones_like(params[4])


def replace_state_data(params, optimizer):
    state = optimizer.state[params[1]]
    state["exp_avg"].data = torch.ones_like(state["exp_avg"])


def resize(params, optimizer):
    tensors = [params[1], *(optimizer.state[params[1]][k] for k in ("exp_avg", "exp_avg_sq"))]
    with torch.no_grad():
        for tensor in tensors:
            tensor.set_(torch.full((11,), 0.5, device=tensor.device))


def replace_param(params, optimizer):
    params[3] = torch.nn.Parameter(torch.ones_like(params[3]))
    optimizer.param_groups[0]["params"][3] = params[3]


def add_group(params, optimizer):
    added = [torch.nn.Parameter(p.detach().clone()) for p in params]
    params += added
    optimizer.add_param_group({"params": added, "lr": 0.2})


def freeze_some(params, optimizer):
    for p in params[:2]:
        p.grad = None
    optimizer.step()


def load_own_state(params, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize(
    "change",
    [
        replace_data,
        replace_states,
        replace_state_data,
        resize,
        replace_param,
        add_group,
        freeze_some,
        load_own_state,
    ],
    ids=lambda change: change.__name__,
)
def test_what_is_replaced_is_noticed(change, device):
    optimizer = compare_with_plain(device, change)
    assert holders(optimizer)  # again


@pytest.mark.parametrize("lists", [nullcontext(), PlainLists()], ids=["held", "plain"])
def test_a_parameter_of_another_dtype_gets_states_of_it(lists, device):
    with lists:
        params, optimizer = make(device)
        advance(params, optimizer, 3)
        params[5].data = params[5].detach().double()
        params[5].grad = None
        params[5].grad = torch.ones_like(params[5])
        before = [p.detach().clone() for p in params]
        optimizer.step()
        assert not any(map(torch.equal, before, params))
        state = optimizer.state[params[5]]
        assert state["exp_avg"].dtype == torch.float64
        assert float(state["step"]) == 4


def test_gradients_of_another_layout_or_kind(device):
    """The layout is matched; a sparse gradient is an error; both as without held lists."""
    values = [torch.randn(4, 3, device=device) for _ in range(COUNT)]
    results = []
    for kept in (True, False):
        params = [torch.nn.Parameter(v.clone()) for v in values]
        optimizer = FusedAdam(params, lr=0.1)
        for step in range(4):
            for p in params:
                p.grad = torch.full((4, 3), 0.5 + step, device=device)
            params[2].grad = torch.arange(12.0, device=device).view(3, 4).t()
            optimizer.step()
            optimizer._buckets = optimizer._buckets if kept else type(optimizer._buckets)()
        results.append([p.detach().clone() for p in params])
        assert bool(holders(optimizer)) == kept
        params[2].grad = torch.ones_like(params[2]).to_sparse()
        with pytest.raises(RuntimeError, match="gradient of parameter 2 is sparse"):
            optimizer.step()
        assert all(map(torch.equal, results[-1], params))
    assert all(map(torch.equal, *results))


def test_copies_own_nothing_of_the_original(device):
    params, optimizer = make(device)
    advance(params, optimizer, 3)
    (holder,) = holders(optimizer)
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = clone.param_groups[0]["params"]
        values = [p.detach().clone() for p in params]
        advance(own, clone, 3, seed=5)
        assert all(map(torch.equal, values, params))
        assert holders(clone)[0].number != holder.number
        assert not torch.equal(own[0], params[0])


def test_holders_are_released(device):
    gc.collect()
    like = torch.empty(0, device=device)
    before = ADAM.held.count(like)
    params, optimizer = make(device)
    advance(params, optimizer, 3)
    assert ADAM.held.count(like) == before + 1
    for _ in range(5):
        replace_states(params, optimizer)
        advance(params, optimizer, 3)
        assert ADAM.held.count(like) == before + 1
    for _ in range(20):
        other_params, other = make(device)
        advance(other_params, other, 2)
    watched = weakref.ref(params[0])
    del params, optimizer, other_params, other
    gc.collect()
    assert ADAM.held.count(like) == before
    assert watched() is None


@pytest.mark.parametrize("link", ["attribute", "hook"])
def test_parameters_that_lead_back_to_the_optimizer_are_freed(link, device):
    """C++ is no place for them: the cycle collector cannot look into it."""
    params, optimizer = make(device)
    if link == "attribute":
        params[0].owner = optimizer
    else:
        params[0].register_hook(lambda grad, own=optimizer: None)
    advance(params, optimizer, 3)
    assert not holders(optimizer)
    watched = weakref.ref(optimizer)
    del params, optimizer
    gc.collect()
    assert watched() is None


def test_attributes_that_lead_nowhere_do_no_harm(device):
    params, optimizer = make(device)
    params[1].is_sequence_parallel = True
    advance(params, optimizer, 3)
    assert holders(optimizer)


def test_nothing_is_held_where_modules_swap_tensors(device):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        params, optimizer = make(device)
        advance(params, optimizer, 3)
        other = torch.nn.Parameter(torch.ones_like(params[3]))
        torch.utils.swap_tensors(params[3], other)
        advance(params, optimizer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not holders(optimizer)


def test_release_amid_someones_dispatch_mode(device):
    calls = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    like = torch.empty(0, device=device)
    before = ADAM.held.count(like)
    params, optimizer = make(device)
    advance(params, optimizer, 3)
    with Spy():
        advance(params, optimizer)  # a mode must see what changes
        del optimizer
        gc.collect()
    assert ADAM.held.count(like) == before
    assert "apex_optimizers.adam_step.default" in calls
    assert not [call for call in calls if "held" in call or "release" in call]


def test_threads_with_optimizers_of_their_own(device):
    gc.collect()
    like = torch.empty(0, device=device)
    before = ADAM.held.count(like)
    expected, reference = make(device)
    advance(expected, reference, 5)
    results = []

    def work():
        for _ in range(4):
            params, optimizer = make(device)
            advance(params, optimizer, 5)
            results.append([p.detach() for p in params])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16
    assert all(all(map(torch.equal, expected, result)) for result in results)
    gc.collect()
    assert ADAM.held.count(like) == before + 1
