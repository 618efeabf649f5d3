"""The checks of streams, graphs and devices: what of them runs without a GPU."""

import itertools

import pytest
import torch

from apex_testkit import gpu


def test_repeatable():
    x = torch.randn(5)
    gpu.assert_repeatable(lambda x: [x * 2, x / 0], x)
    calls = itertools.count()
    with pytest.raises(AssertionError, match="the second call, result 1"):
        gpu.assert_repeatable(lambda x: [x, x + next(calls)], x)
    lengths = itertools.count(1)
    with pytest.raises(AssertionError, match="expected 1 results, got 2"):
        gpu.assert_repeatable(lambda x: [x] * next(lengths), x)


def test_late_values_are_recognisable():
    """What an op reads that does not wait for its stream is NaN, or 0 where there is no NaN."""
    x = torch.randn(3, requires_grad=True)
    spoiled = gpu._spoiled(x)
    assert spoiled.isnan().all()
    assert spoiled.requires_grad
    assert not gpu._spoiled(torch.arange(1, 4)).any()
    gpu._copy_values([spoiled, "other"], [x, "other"])
    assert torch.equal(spoiled, x)
    assert gpu._scaled(x, -0.5).requires_grad
    assert torch.equal(gpu._scaled(x, -0.5), x * -0.5)
