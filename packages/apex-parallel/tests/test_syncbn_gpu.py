"""Batch norm of one process on a GPU: streams, CUDA graphs, several devices."""

import pytest
import torch

from apex.parallel.optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from apex_testkit.gpu import (
    assert_captures,
    assert_repeatable,
    assert_runs_on_current_stream,
    assert_runs_on_other_device,
)


def batch_norm(x, weight, bias):
    channel_last = x.is_contiguous(memory_format=torch.channels_last)
    options = (True, 0.1, None, channel_last, False)
    if channel_last:
        x = x.permute(0, 2, 3, 1)
    y = SyncBatchnormFunction.apply(x, None, weight, bias, None, None, 1e-5, *options)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight, bias))]


all_formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)


def values(device, layout):
    x = torch.randn(8, 33, 14, 14, device=device).to(memory_format=layout)
    weight, bias = torch.randn(2, 33, device=device)
    return [
        t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight, bias)
    ]


@all_formats
def test_is_repeatable(layout, device):
    assert_repeatable(batch_norm, *values(device, layout))


@pytest.mark.needs_gpus(1)
@all_formats
def test_uses_the_current_stream(layout):
    assert_runs_on_current_stream(batch_norm, *values("cuda", layout))


@pytest.mark.needs_gpus(1)
@all_formats
def test_in_a_graph(layout):
    assert_captures(batch_norm, *values("cuda", layout))


@pytest.mark.needs_gpus(2)
@all_formats
def test_uses_the_device_of_its_tensors(layout):
    assert_runs_on_other_device(batch_norm, *values("cuda:0", layout))
