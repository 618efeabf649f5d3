"""Fake kernels, which meta tensors and ``torch.compile`` reach: they answer as the CPU's kernels,
or refuse with an error that begins with the operator's name."""

import random

import pytest
import torch

from apex_testkit.raw_operators import Maker, operators

# Steps on lists that C++ keeps refuse all meta tensors.
OPERATORS = {name: op for name, op in operators().items() if not name.endswith("_held")}
SEEDS = range(8)  # of packed and padded batches
NUMBERS = (-(2**63), -2, -1, 0, 7, 2**31, 2**61 + 1, 2**62, 2**63 - 1)
# Kernels compare these with numbers that a tensor holds, and meta tensors hold none.
BESIDE_VALUES = ("packed_batch",)
SHAPES = {
    "a number": lambda tensor: tensor.new_zeros(()),
    "flat": lambda tensor: tensor.reshape(-1).clone(),
    "no elements": lambda tensor: tensor.new_zeros(0),
    "columns of 0": lambda tensor: tensor.new_zeros(*tensor.shape[:-1], 0),
    "None": lambda tensor: None,
}


def made(name, seed):
    torch.manual_seed(seed)
    return Maker(OPERATORS[name], is_full=True)(random.Random(seed))


def outcome(call):
    """Shapes of the results, or the error's text."""
    try:
        with torch.no_grad():
            results = call.run(**call.args)
    except RuntimeError as error:
        return str(error)
    results = results if isinstance(results, (tuple, list)) else [results]
    return [result.shape for result in results if isinstance(result, torch.Tensor)]


def on_meta(call):
    """The outcome with every tensor on the meta device; errors must be in the operator's words."""
    call.args = {name: moved(value) for name, value in call.args.items()}
    return outcome(call)


def moved(value):
    if isinstance(value, list):
        return [moved(each) for each in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers(name):
    """What is refused on a CPU is refused in the same words, or decides no shape."""
    schema = OPERATORS[name]._schema.arguments
    integers = [a.name for a in schema if str(a.type) in ("int", "Optional[int]")]
    valid_of = {seed: outcome(made(name, seed)) for seed in SEEDS}
    valid_of = {seed: shapes for seed, shapes in valid_of.items() if isinstance(shapes, list)}
    assert valid_of or not integers, "no valid call"
    for seed, valid in valid_of.items():
        for argument, number in ((a, n) for a in integers for n in NUMBERS if a != "held"):
            calls = made(name, seed), made(name, seed)
            for call in calls:
                call.args[argument] = number
            expected, actual = outcome(calls[0]), on_meta(calls[1])
            case = f"{argument}={number}: {expected} on a CPU, {actual} on meta"
            if isinstance(expected, list):
                assert actual == expected, case
            elif argument not in BESIDE_VALUES or number < 0:
                assert actual in (expected, valid), case


@pytest.mark.parametrize("how", SHAPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes(name, how):
    """A shape, of which no result's shape follows, is refused with the operator's name."""
    for seed in SEEDS:
        for argument, value in made(name, seed).args.items():
            if isinstance(value, torch.Tensor):
                call = made(name, seed)
                call.args[argument] = SHAPES[how](value)
                on_meta(call)
