"""Where the planner puts parameters, against rules that are checked element by element."""

import itertools
import random

import pytest
import torch
from torch import nn

from apex.contrib.optimizers.distributed.layout import (
    flat_like,
    flat_view,
    make_fragment,
    memory_order,
    shaped_view,
)
from apex.contrib.optimizers.distributed.planner import bucket_shape, pieces, round_to_multiple
from apex.contrib.optimizers.distributed_fused_adam import (
    DistributedFusedAdam,
    _bf16_rem_to_fp32,
    _devices_match,
    _round_to_multiple,
)


def check_fragments(piece, where, shape, shards):
    """Of all ranks: together they hold the piece once, and their ranges agree."""
    fragments = []
    for rank in range(shards):
        size = piece.bucket_size // shards
        shard = (size * rank, size * (rank + 1))
        param_range = (piece.param_start, piece.param_end)
        fragment = make_fragment(where, param_range, piece.bucket_start, shard)
        if not fragment.in_local_shard:
            assert fragment.shard_range is None
            continue
        fragments.append(fragment)
        begin, end = fragment.shard_range
        assert (begin + shard[0], end + shard[0]) == fragment.shard_bucket_range
        in_bucket = fragment.shard_bucket_range[0] - fragment.bucket_range[0]
        assert in_bucket == fragment.shard_param_range[0] - fragment.param_range[0]
    ranges = [fragment.shard_param_range for fragment in fragments]
    assert ranges[0][0] == piece.param_start
    assert ranges[-1][1] == piece.param_end
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("seed", range(20))
def test_random_plans(seed):
    random.seed(seed)
    itemsize, shards = random.choice([2, 4]), random.randint(1, 7)
    shape = bucket_shape(random.randint(0, 9000), itemsize, shards)
    assert shape.bucket_size == shape.shard_size * shards
    assert shape.shard_size % shape.alignment == 0
    assert shape.alignment * itemsize == 128
    bucket, opened, seen, after = -1, None, set(), None
    count, is_known = random.randint(1, 30), random.random() < 0.5
    numels = [
        random.choice([0, 1, random.randint(1, 100), random.randint(1, 5000)]) for _ in range(count)
    ]
    for index, numel in enumerate(numels):
        covered, last = 0, None
        if is_known:
            after = sum(round_to_multiple(n, shape.alignment) for n in numels[index + 1 :])
        for piece in pieces(numel, opened, shape, after):
            size = piece.param_end - piece.param_start
            assert (piece.param_start, size > 0) == (covered, True)
            assert piece.bucket_start % shape.alignment == 0
            last = (bucket + piece.bucket, piece.bucket_start + size)
            assert last[1] <= piece.bucket_size <= shape.bucket_size
            assert piece.bucket_size % (shape.alignment * shards) == 0
            if piece.param_end < numel:  # goes on in the next bucket, so this one is full
                assert last[1] == piece.bucket_size
            elements = {(last[0], e) for e in range(piece.bucket_start, last[1])}
            assert seen.isdisjoint(elements)
            seen |= elements
            check_fragments(piece, (0, index, last[0]), shape, shards)
            covered = piece.param_end
        assert covered == numel
        if numel:
            bucket, opened = last[0], (last[1], piece.bucket_size)
    if is_known and opened:  # the last bucket has no more room than alignment asks for
        assert opened[1] - opened[0] < shape.alignment * shards


def test_rounding():
    assert [round_to_multiple(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [_round_to_multiple(n, 8, round_up=False) for n in (0, 7, 8, 15)] == [0, 0, 8, 8]


def test_orders_of_memory():
    tensors = {
        "contiguous": torch.randn(2, 3, 4),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).t(),
        "of one": torch.randn(1, 5, 1).transpose(0, 1),
        "scalar": torch.randn(()),
    }
    for name, tensor in tensors.items():
        flat = flat_view(tensor)
        assert flat.data_ptr() == tensor.data_ptr(), name
        assert torch.equal(shaped_view(tensor, flat.clone()), tensor), name
        assert shaped_view(tensor, flat).shape == tensor.shape
        assert torch.equal(flat_like(tensor, tensor.contiguous()), flat), name
        assert sorted(memory_order(tensor)) == list(range(tensor.dim()))
    with pytest.raises(ValueError, match="has gaps in its memory"):
        memory_order(torch.randn(4, 6)[:, ::2])


def test_private_names():
    high, rest = torch.tensor([1.0]).bfloat16(), torch.tensor([-1], dtype=torch.int16)
    whole = torch.empty(1)
    _bf16_rem_to_fp32(high, rest, whole)
    assert whole.view(torch.int32).item() == 0x3F80FFFF - 0x10000
    assert _devices_match("cpu", torch.device("cpu", 0))
    assert not _devices_match("cpu", "cuda")


def check_errors(rank, world):
    def make(**options):
        return DistributedFusedAdam([nn.Parameter(torch.ones(3))], **options)

    half = {"dtype": torch.float16, "param_sync_dtype": torch.float16}
    rest = {"store_params": False, "store_param_remainders": True}
    errors = [
        (RuntimeError, "amsgrad", {"amsgrad": True}),
        (ValueError, "dtype must be", {"dtype": torch.float64}),
        (ValueError, "grad_sync_dtype must be", {"grad_sync_dtype": torch.int8}),
        (RuntimeError, "device is cpu:1|the parameters are on", {"device": "meta"}),
        (RuntimeError, "pass store_params=False", {"store_param_remainders": True}),
        (RuntimeError, "param_sync_dtype=torch.bfloat16", rest),
        (RuntimeError, "bfloat16 parameters", {**rest, "param_sync_dtype": torch.bfloat16}),
        (RuntimeError, "with_scaled_states=True needs", {"with_scaled_states": True}),
        (RuntimeError, "capturable=True", {**half, "with_scaled_states": True, "capturable": True}),
        (RuntimeError, "needs contiguous_grad_buffer", {"nccl_ub": True}),
        (RuntimeError, "on a GPU", {"nccl_ub": True, "contiguous_grad_buffer": True}),
        (RuntimeError, "cannot hold", {"contiguous_param_buffer": True, **half}),
        (ValueError, "lr must be >= 0", {"lr": -1.0}),
        (ValueError, "betas must be", {"betas": (1.0, 0.9)}),
        (ValueError, "eps must be >= 0", {"eps": -1.0}),
        (ValueError, "pipeline_size must be >= 1", {"pipeline_size": 0}),
    ]
    for kind, text, options in errors:
        with pytest.raises(kind, match=text):
            make(**options).init_params()
    with pytest.raises(TypeError, match="must be floating point"):
        DistributedFusedAdam([torch.zeros(2, dtype=torch.int64)])
    sparse = nn.Embedding(5, 3, sparse=True)
    optimizer = DistributedFusedAdam(sparse.parameters())
    sparse(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(NotImplementedError, match="Build embeddings with sparse=False"):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (2.0, 0.5)
    with pytest.raises(ValueError, match="betas must be"):
        optimizer.step()


def test_errors(two_ranks):
    two_ranks(check_errors)


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        DistributedFusedAdam([nn.Parameter(torch.ones(3))])
