"""What is held, and the operators on it: misuse is an error, and tracing is refused."""

import weakref

import pytest
import torch

from apex.optimizers import FusedAdam
from apex.optimizers.fused_adam.buckets import ADAM
from apex.optimizers.stepping.held_lists import MAX_MEAN_ELEMENTS, MIN_TENSORS

HYPER = (0.1, 0.9, 0.99, 1e-8, 0.01, 1, True, True)


@pytest.mark.parametrize("elements", [1, MAX_MEAN_ELEMENTS + 1])
def test_large_states_die_when_they_are_taken_out(elements):
    """As who moves them to other memory expects."""
    params = [torch.nn.Parameter(torch.ones(elements)) for _ in range(MIN_TENSORS)]
    for p in params:
        p.grad = torch.ones_like(p)
    before = ADAM.held.count(params[0])
    optimizer = FusedAdam(params)
    for _ in range(3):
        optimizer.step()
    is_held = ADAM.held.count(params[0]) > before
    assert is_held == (elements == 1)
    watched = weakref.ref(optimizer.state[params[0]].pop("exp_avg"))
    assert (watched() is not None) == is_held


def test_misused_numbers_and_lists_are_errors(device):
    lists = [[torch.ones(3, device=device) for _ in range(2)] for _ in range(3)]
    number = ADAM.held.hold(lists[0], [], *lists[1:], [], [])
    grads = [torch.ones(3, device=device) for _ in range(2)]
    ADAM.held.step(number, 0, grads, *HYPER)
    with pytest.raises(RuntimeError, match="grads has 1 tensors, but params has 2"):
        ADAM.held.step(number, 0, grads[:1], *HYPER)
    with pytest.raises(RuntimeError, match="params are float32, but grads are float64"):
        ADAM.held.step(number, 0, [g.double() for g in grads], *HYPER)
    ADAM.held.release(grads[0], number)
    ADAM.held.release(grads[0], number)
    for wrong in (number, -1, 2**62):
        with pytest.raises(RuntimeError, match=f"no lists are held under the number {wrong};"):
            ADAM.held.step(wrong, 0, grads, *HYPER)
    uneven = ADAM.held.hold(lists[0], [], lists[1][:1], lists[2], [], [])
    with pytest.raises(RuntimeError, match="exp_avgs has 1 tensors, but params has 2"):
        ADAM.held.step(uneven, 0, grads, *HYPER)
    ADAM.held.release(grads[0], uneven)


def test_gradients_held_by_themselves(device):
    def ones():
        return [torch.ones(3, device=device) for _ in range(2)]

    params, grads = ones(), ones()
    number = ADAM.held.hold(params, [], ones(), ones(), [], [])
    own = ADAM.held.hold([], grads, [], [], [], [])
    expected = ones()
    torch.ops.apex_optimizers.adam_step(expected, ones(), ones(), ones(), [], [], *HYPER)
    ADAM.held.step(number, own, grads[:1], *HYPER)
    assert all(map(torch.equal, params, expected))
    before = [p.clone() for p in params]
    for wrong in (-1, number + 10**6):
        with pytest.raises(RuntimeError, match=f"no lists are held under the number {wrong};"):
            ADAM.held.step(number, wrong, grads, *HYPER)
    with pytest.raises(RuntimeError, match="grads has 0 tensors, but params has 2"):
        ADAM.held.step(number, number, grads, *HYPER)  # with it, no gradients are held
    assert all(map(torch.equal, params, before))
    for held in (number, own):
        ADAM.held.release(grads[0], held)


def test_held_ops_refuse_to_be_traced(device):
    meta = [torch.ones(3, device="meta")]
    calls = [
        (ADAM.held.hold, (meta, [], meta, meta, [], [])),
        (ADAM.held.release, (meta[0], 1)),
        (ADAM.held.count, (meta[0],)),
        (ADAM.held.step, (1, 0, meta, *HYPER)),
    ]
    for op, args in calls:
        with pytest.raises(NotImplementedError, match=r"cannot be traced.*Use adam_step"):
            op(*args)
    tensors = [torch.ones(3, device=device)]
    number = ADAM.held.hold(tensors, [], tensors, tensors, [], [])
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(ADAM.held.release, (tensors[0], -1), test_utils=checks)
    torch.library.opcheck(ADAM.held.count, (tensors[0],), test_utils=checks)
    torch.library.opcheck(ADAM.held.step, (number, 0, tensors, *HYPER), test_utils=checks)
    ADAM.held.release(tensors[0], number)
