"""Casts of whole networks."""

import torch
from torch import nn

from apex.fp16_utils import BN_convert_float, convert_module, convert_network

half = torch.float16


def network():
    return nn.Sequential(
        nn.Conv1d(2, 2, 1),
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2, affine=False),
        nn.Sequential(nn.SyncBatchNorm(2), nn.LayerNorm(2)),
    )


def dtypes(module):
    return {t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}


def test_convert_network_skips_affine_batch_norms():
    net = network()
    assert convert_network(net, half) is net
    assert dtypes(net[0]) == dtypes(net[2]) == dtypes(net[3][1]) == {half}
    assert dtypes(net[1]) == dtypes(net[3][0]) == {torch.float32}
    assert net[1].num_batches_tracked.dtype is torch.int64


def test_bn_convert_float():
    net = network().half()
    assert BN_convert_float(net) is net
    assert dtypes(net[0]) == dtypes(net[2]) == {half}
    assert dtypes(net[1]) == dtypes(net[3][0]) == {torch.float32}


def test_convert_module_is_not_recursive_and_casts_gradients():
    outer = nn.Linear(2, 2)
    outer.inner = nn.Linear(2, 2)
    outer.register_buffer("count", torch.zeros(1, dtype=torch.int32))
    weight = outer.weight
    weight.grad = torch.ones_like(weight)
    convert_module(outer, half)
    assert outer.weight is weight
    assert (weight.dtype, weight.grad.dtype) == (half, half)
    assert outer.count.dtype is torch.int32
    assert dtypes(outer.inner) == {torch.float32}


def test_tied_and_recurrent_weights():
    lstm = nn.LSTM(3, 3)
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    convert_network(nn.ModuleList([lstm, tied]), torch.bfloat16)
    assert tied[1].weight is tied[0].weight
    assert lstm(torch.randn(2, 1, 3).bfloat16())[0].dtype is torch.bfloat16
