"""Layer and RMS norm on a GPU: streams, CUDA graphs, several devices."""

import pytest
import torch

from apex.normalization import fused_add_layer_norm
from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
from apex_testkit import FLOATS
from apex_testkit.gpu import (
    assert_captures,
    assert_repeatable,
    assert_runs_on_current_stream,
    assert_runs_on_other_device,
)


def layer_norm(x, weight, bias, memory_efficient=False):
    y = fused_layer_norm_affine(x, weight, bias, x.shape[-1:], 1e-5, memory_efficient)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight, bias))]


def layer_norm_memory_efficient(x, weight, bias):
    return layer_norm(x, weight, bias, True)


def rms_norm(x, weight, bias):
    y = fused_rms_norm_affine(x, weight, x.shape[-1:], 1e-5)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight))]


def add_layer_norm(x, weight, bias):
    y, total = fused_add_layer_norm(x, x.detach(), weight, bias, prenorm=True)
    loss = y.square().sum() + total.square().sum()
    return [y.detach(), total.detach(), *torch.autograd.grad(loss, (x, weight, bias))]


CASES = [layer_norm, layer_norm_memory_efficient, rms_norm, add_layer_norm]
all_cases = pytest.mark.parametrize("case", CASES)
# One group of lanes per row, and a block per row; rows enough for a reduction in two kernels.
all_columns = pytest.mark.parametrize("columns", [768, 4096])


def values(device, columns, dtype=torch.float32):
    x = torch.randn(513, columns, device=device).to(dtype)
    weight, bias = torch.randn(2, columns, device=device).to(dtype)
    return [t.clone().requires_grad_() for t in (x, weight, bias)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@all_columns
@all_cases
def test_is_repeatable(case, columns, dtype, device):
    assert_repeatable(case, *values(device, columns, dtype))


@pytest.mark.needs_gpus(1)
@all_columns
@all_cases
def test_uses_the_current_stream(case, columns):
    assert_runs_on_current_stream(case, *values("cuda", columns))


@pytest.mark.needs_gpus(1)
@all_columns
@all_cases
def test_in_a_graph(case, columns):
    assert_captures(case, *values("cuda", columns))


@pytest.mark.needs_gpus(2)
@all_cases
def test_uses_the_device_of_its_tensors(case):
    assert_runs_on_other_device(case, *values("cuda:0", 768))
