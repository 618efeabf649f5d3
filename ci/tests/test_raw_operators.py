"""Every raw operator, called with what its schema allows: it does it, or refuses and has changed
nothing. ``nox -s sanitize`` runs the same under sanitizers, and for longer."""

import os
import random

import pytest
import torch

from apex_testkit.raw_calls import check_call, run_random_calls
from apex_testkit.raw_mutations import _freed, _short
from apex_testkit.raw_operators import Maker, check_names, operators

CALLS = int(os.environ.get("APEX_RAW_CALLS", "2000"))
OPERATORS = operators()


@pytest.mark.parametrize("threads", [1, 2])
def test_random_calls(threads):
    torch.set_num_threads(threads)
    makers = [Maker(op) for op in OPERATORS.values()]
    counts = run_random_calls(makers, seed=threads, calls=CALLS, wild=True)
    print(
        f"{CALLS} calls with {threads} threads:", counts["done"], "done,", counts["refused"], "not"
    )
    assert counts["refused"] > 0.2 * CALLS


@pytest.mark.parametrize("name", OPERATORS)
def test_valid_calls_and_tensors_without_memory(name):
    """Calls are valid, or those of the other tests would say nothing; every tensor is checked."""
    maker = Maker(OPERATORS[name], is_full=True)
    for seed in range(20):
        torch.manual_seed(seed)
        call = maker(random.Random(seed))
        if check_call(call) == "done":
            break
    else:
        pytest.fail(f"no valid call: complete raw_operators.SHAPES. {maker.refusal}")
    for argument in call.args:
        for how in (_freed, _short):
            check_without_memory(maker, seed, argument, how)


def check_without_memory(maker, seed, argument, how):
    torch.manual_seed(seed)
    call = maker(random.Random(seed))
    value = call.args[argument]
    tensor = value[-1] if isinstance(value, list) and value else value
    keeps_only = maker.name.endswith(("_hold", "_release", "_held_count"))  # reads no memory
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0 or keeps_only:
        return
    spoiled = how(random.Random(0), tensor, [])
    call.args[argument] = [*value[:-1], spoiled] if isinstance(value, list) else spoiled
    with torch.no_grad(), pytest.raises(RuntimeError, match=rf"{argument}\b.* not allocated"):
        call.run(**call.args)


@pytest.mark.parametrize(
    "text",
    [
        "scale: no must be x",
        "scale: tensors is one",
        "scale: moments must be float32",
        "scale: sizes do not match.",
        "other: outputs",
    ],
)
def test_names_that_are_not_there_are_found(text):
    with pytest.raises(AssertionError, match=r"no arguments? of scale|operator's name"):
        check_names(OPERATORS["apex_amp::scale"], text.replace("tensors", "x"))
