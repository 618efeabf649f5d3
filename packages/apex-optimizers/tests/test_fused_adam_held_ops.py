"""What is held, and the operators on it: misuse is an error, and tracing is refused."""

import weakref

import pytest
import torch

from apex.optimizers import FusedAdam
from apex.optimizers.fused_adam.held import (
    MAX_MEAN_ELEMENTS,
    MIN_TENSORS,
    adam_held_count,
    adam_hold,
    adam_release,
    adam_step_held,
)

HYPER = (0.1, 0.9, 0.99, 1e-8, 0.01, 1, True, True)


@pytest.mark.parametrize("elements", [1, MAX_MEAN_ELEMENTS + 1])
def test_large_states_die_when_they_are_taken_out(elements):
    """As who moves them to other memory expects."""
    params = [torch.nn.Parameter(torch.ones(elements)) for _ in range(MIN_TENSORS)]
    for p in params:
        p.grad = torch.ones_like(p)
    before = adam_held_count(params[0])
    optimizer = FusedAdam(params)
    for _ in range(3):
        optimizer.step()
    is_held = adam_held_count(params[0]) > before
    assert is_held == (elements == 1)
    watched = weakref.ref(optimizer.state[params[0]].pop("exp_avg"))
    assert (watched() is not None) == is_held


def test_misused_numbers_and_lists_are_errors(device):
    lists = [[torch.ones(3, device=device) for _ in range(2)] for _ in range(3)]
    number = adam_hold(*lists, [])
    grads = [torch.ones(3, device=device) for _ in range(2)]
    adam_step_held(number, grads, *HYPER)
    with pytest.raises(RuntimeError, match="grads has 1 tensors, but params has 2"):
        adam_step_held(number, grads[:1], *HYPER)
    with pytest.raises(RuntimeError, match="params are float32, but grads are float64"):
        adam_step_held(number, [g.double() for g in grads], *HYPER)
    adam_release(grads[0], number)
    adam_release(grads[0], number)
    for wrong in (number, -1, 2**62):
        with pytest.raises(RuntimeError, match=f"no lists are held under the number {wrong};"):
            adam_step_held(wrong, grads, *HYPER)
    uneven = adam_hold(lists[0], lists[1][:1], lists[2], [])
    with pytest.raises(RuntimeError, match="exp_avgs has 1 tensors, but params has 2"):
        adam_step_held(uneven, grads, *HYPER)
    adam_release(grads[0], uneven)


def test_held_ops_refuse_to_be_traced(device):
    meta = [torch.ones(3, device="meta")]
    calls = [
        (adam_hold, (meta, meta, meta, [])),
        (adam_release, (meta[0], 1)),
        (adam_held_count, (meta[0],)),
        (adam_step_held, (1, meta, *HYPER)),
    ]
    for op, args in calls:
        with pytest.raises(NotImplementedError, match=r"cannot be traced.*Use adam_step"):
            op(*args)
    tensors = [torch.ones(3, device=device)]
    number = adam_hold(tensors, tensors, tensors, [])
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(adam_release, (tensors[0], -1), test_utils=checks)
    torch.library.opcheck(adam_held_count, (tensors[0],), test_utils=checks)
    torch.library.opcheck(adam_step_held, (number, tensors, *HYPER), test_utils=checks)
    adam_release(tensors[0], number)
