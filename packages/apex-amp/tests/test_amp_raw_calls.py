"""Random calls of the raw operators: right, or refused with nothing changed."""

import pytest
import torch

from apex.amp import multi_tensor
from apex_testkit.raw_calls import Call, run_random_calls

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((3,), (2, 4), (), (65,), (0,), (5, 3))


def lists_of(rng, count):
    """Lists with tensors of one shape at an index, of any dtypes that go together."""
    shapes = [rng.choice(SHAPES) for _ in range(rng.randrange(1, 5))]
    wide = rng.random() < 0.3
    last = torch.float64 if wide else rng.choice(FLOATS)
    dtypes = [torch.float64 if wide else rng.choice(FLOATS), *[last] * (count - 1)]
    return [[torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes] for dtype in dtypes]


def flagged(flag, *lists):
    bad = any(not t.isfinite().all() for tensors in lists for t in tensors)
    return torch.ones_like(flag) if bad else flag


def scale(rng):
    inputs, outputs = lists_of(rng, 2)
    flag = torch.zeros(1, dtype=torch.int32)
    args = {"inputs": inputs, "outputs": outputs, "found_inf": flag, "scale": 0.25}

    def expected(a):
        outputs = [x * a["scale"] for x in a["inputs"]]
        return {"outputs": outputs, "found_inf": flagged(a["found_inf"], a["inputs"])}

    return Call(multi_tensor.scale, args, expected, ("outputs", "found_inf"))


def scale_in_place(rng):
    (tensors,) = lists_of(rng, 1)
    args = {"tensors": tensors, "found_inf": torch.zeros(1, dtype=torch.int32), "scale": 0.25}

    def expected(a):
        outputs = [x * a["scale"] for x in a["tensors"]]
        return {"tensors": outputs, "found_inf": flagged(a["found_inf"], a["tensors"])}

    return Call(multi_tensor.scale_, args, expected, ("tensors", "found_inf"))


def axpby(rng):
    xs, ys, outputs = lists_of(rng, 3)
    args = {"xs": xs, "ys": ys, "outputs": outputs, "found_inf": torch.zeros(1, dtype=torch.int32)}
    args |= {"a": 0.5, "b": -2.0, "arg_to_check": rng.choice((-1, 0, 1))}

    def expected(a):
        outputs = [a["a"] * x + a["b"] * y for x, y in zip(a["xs"], a["ys"], strict=True)]
        tested = {0: ("xs",), 1: ("ys",), -1: ("xs", "ys")}[a["arg_to_check"]]
        return {"outputs": outputs, "found_inf": flagged(a["found_inf"], *(a[n] for n in tested))}

    return Call(multi_tensor.axpby, args, expected, ("outputs", "found_inf"))


@pytest.mark.parametrize("seed", [0, 1])
def test_random_calls(seed):
    counts = run_random_calls([scale, scale_in_place, axpby], seed)
    assert counts["done"] > 0.2 * counts.total()
    assert counts["refused"] > 0.1 * counts.total()
