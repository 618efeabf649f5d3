"""Flat buffers: round trips, grouping, and collectives on the joined tensors."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist

from apex.parallel import distributed
from apex.parallel.distributed import (
    apply_flat_dist_call,
    extract_tensors,
    flat_dist_call,
    flatten,
    split_by_type,
    split_half_float_double_bfloat16,
    unflatten,
)


def tensors():
    image = torch.arange(24.0).view(1, 2, 3, 4)
    return [torch.tensor(7.0), image.to(memory_format=torch.channels_last), torch.empty(0, 3)]


def test_round_trip():
    flat = flatten(tensors())
    assert flat.tolist() == [7.0, *range(24)]  # logical order, whatever the strides
    for view, tensor in zip(unflatten(flat, tensors()), tensors(), strict=True):
        assert torch.equal(view, tensor)
        assert view.numel() == 0 or view.untyped_storage().data_ptr() == flat.data_ptr()
    assert distributed.import_flatten_impl() == (flatten, unflatten)
    assert distributed.imported_flatten_impl


def test_bad_buckets():
    with pytest.raises(ValueError, match="bucket is empty"):
        flatten([])
    with pytest.raises(TypeError, match=r"bucket\[1\] is torch.float64"):
        flatten([torch.zeros(1), torch.zeros(1).double()])
    with pytest.raises(ValueError, match=r"shape \[2\], but bucket holds 3 elements"):
        unflatten(torch.zeros(2), [torch.zeros(3)])


def test_grouping():
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32]
    mixed = [torch.full((1,), float(i), dtype=dtype) for i, dtype in enumerate(dtypes)]
    groups = split_half_float_double_bfloat16(mixed)
    assert [[int(t) for t in group] for group in groups] == [[2], [1, 4], [3], [0]]
    by_type = split_by_type(mixed)
    assert isinstance(by_type, OrderedDict)
    assert list(by_type) == [
        "torch.BFloat16Tensor",
        "torch.FloatTensor",
        "torch.HalfTensor",
        "torch.DoubleTensor",
    ]
    assert [int(t) for t in by_type["torch.FloatTensor"]] == [1, 4]
    with pytest.raises(TypeError, match=r"tensors\[0\] is torch.int64"):
        split_half_float_double_bfloat16([torch.tensor([1])])


def test_extraction():
    found = []
    a, b, c = torch.zeros(3, 1).unbind()
    extract_tensors([a, (b, {"key": c})], found)
    assert [id(t) for t in found] == [id(a), id(b), id(c)]
    for bad in ("text", [1]):
        with pytest.raises(TypeError, match="expected a tensor or a"):
            extract_tensors(bad, [])


def check_calls(rank, world):
    bucket = [torch.full((2,), float(rank)), torch.full((1, 3), 2.0 * rank)]
    apply_flat_dist_call(bucket, dist.all_reduce)
    assert [t.flatten()[0].item() for t in bucket] == [(world - 1) / 2, world - 1.0]
    pair = dist.new_group([0, 1])
    if rank < 2:
        bucket = [torch.full((2,), float(rank))]
        apply_flat_dist_call(bucket, dist.all_reduce, (dist.ReduceOp.SUM, pair))
        assert bucket[0].tolist() == [0.5, 0.5]  # the average over the group, not the world
    bucket = [torch.full((2,), float(rank))]
    apply_flat_dist_call(bucket, dist.all_reduce, (dist.ReduceOp.MAX,))
    assert bucket[0].tolist() == [world - 1.0] * 2  # a maximum has no average
    apply_flat_dist_call(bucket, dist.all_reduce, (dist.ReduceOp.SUM, None, True))
    assert bucket[0].tolist() == [world - 1.0] * 2
    params = [
        torch.nn.Parameter(torch.full((2,), rank, dtype=d)) for d in (torch.half, torch.double)
    ]
    flat_dist_call(params, dist.broadcast, (1,))
    assert [param.tolist() for param in params] == [[1.0, 1.0]] * 2


def test_collectives(two_ranks, four_ranks):
    two_ranks(check_calls)
    four_ranks(check_calls)
