"""scale, scale_ and axpby on a GPU: streams, CUDA graphs, several devices."""

import pytest
import torch

from apex.amp.multi_tensor import axpby, scale, scale_
from apex_testkit.gpu import (
    assert_captures,
    assert_repeatable,
    assert_runs_on_current_stream,
    assert_runs_on_other_device,
)


def zero_flag(x):
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def to_masters(x, y):
    flag, outputs = zero_flag(x), [x.new_empty(x.shape, dtype=torch.float32) for _ in range(2)]
    scale([x, y], outputs, flag, 0.3)
    return [*outputs, flag]


def in_place(x, y):
    flag, tensors = zero_flag(x), [x.clone(), y.clone()]
    scale_(tensors, flag, 0.3)
    return [*tensors, flag]


def accumulate(x, y):
    flag, outputs = zero_flag(x), [torch.empty_like(y)]
    axpby([x], [y], outputs, flag, 0.3, -2.0, 0)
    return [*outputs, flag]


all_cases = pytest.mark.parametrize("case", [to_masters, in_place, accumulate])


def values(device):
    return torch.randn(2, 100_003, device=device).half().unbind()


@all_cases
def test_is_repeatable(case, device):
    assert_repeatable(case, *values(device))


@pytest.mark.needs_gpus(1)
@all_cases
def test_uses_the_current_stream(case):
    assert_runs_on_current_stream(case, *values("cuda"))


@pytest.mark.needs_gpus(1)
@all_cases
def test_in_a_graph(case):
    assert_captures(case, *values("cuda"))


@pytest.mark.needs_gpus(2)
@all_cases
def test_uses_the_device_of_its_tensors(case):
    assert_runs_on_other_device(case, *values("cuda:0"))
