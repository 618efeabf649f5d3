"""Where the planner puts parameters, against rules that are checked element by element."""

import copy
import itertools
import os
import random
import time

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
from apex.contrib.optimizers.distributed.planner import bucket_shape, plan, round_to_multiple
from apex.contrib.optimizers.distributed_fused_adam import (
    DistributedFusedAdam,
    _bf16_rem_to_fp32,
    _devices_match,
    _round_to_multiple,
)

CASES = int(os.environ.get("PLANNER_CASES", "3000"))


def plain_plan(numels, opened, shape, is_all):
    """Rows of a plan, one parameter and one bucket after the other; and sizes of new buckets."""
    rows, sizes = [], []
    at, room = opened or (0, 0)
    aligned = [round_to_multiple(numel, shape.alignment) for numel in numels]
    for param, numel in enumerate(numels):
        start = 0
        at = round_to_multiple(at, shape.alignment)
        while start < numel:
            if at == room:
                left = numel - start + sum(aligned[param + 1 :])
                small = round_to_multiple(left, shape.alignment * shape.shards)
                at, room = 0, min(shape.bucket_size, small) if is_all else shape.bucket_size
                sizes.append(room)
            size = min(numel - start, room - at)
            rows.append((param, len(sizes), start, at, size))
            start, at = start + size, at + size
    return rows, sizes


def random_case(generator):
    shape = bucket_shape(
        generator.choice([0, 500, 3000, 9000]), generator.choice([2, 4]), generator.randint(1, 7)
    )
    opened = None
    if generator.random() < 0.5:
        steps = shape.bucket_size // shape.alignment
        room = generator.randint(1, steps) * shape.alignment
        opened = (generator.choice([0, room, generator.randint(0, room)]), room)
    largest = generator.choice([1, 100, 5000])
    numels = [generator.randint(0, largest) for _ in range(generator.randint(0, 12))]
    return numels, opened, shape, generator.random() < 0.5


def test_plans_are_those_of_a_plain_planner():
    """``PLANNER_CASES=100000`` takes a minute."""
    generator = random.Random(0)
    for case in range(CASES):
        arguments = random_case(generator)
        found = plan(*arguments)
        columns = (found.param, found.bucket, found.param_start, found.bucket_start, found.numel)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        expected = plain_plan(*arguments)
        assert (rows, found.new_sizes) == expected, (case, arguments)


def test_plans_are_made_on_the_cpu_whatever_the_default_device():
    shape = bucket_shape(4096, 4, 2)
    for numels in ([300, 7000, 0, 5], []):
        expected = plan(numels, None, shape, True)
        with torch.device("meta"):
            found = plan(numels, None, shape, True)
        for name in ("param", "bucket", "param_start", "bucket_start", "numel"):
            assert torch.equal(getattr(expected, name), getattr(found, name))


def test_a_million_fragments():
    """Quick enough that nobody waits for it: 0.1 s where nothing else runs."""
    shape = bucket_shape(1 << 20, 4, 8)
    begun = time.process_time()
    found = plan([64 + i % 1000 for i in range(1_000_000)], None, shape, is_all=True)
    assert len(found.param) > 1_000_000
    assert found.numel.sum() == sum(64 + i % 1000 for i in range(1_000_000))
    assert time.process_time() - begun < 2


def check_fragments(row, bucket_size, shards):
    """Of all ranks: together they hold the piece once, and their ranges agree."""
    (param, bucket, param_start, bucket_start, numel), fragments = row, []
    for rank in range(shards):
        size = bucket_size // shards
        shard = (size * rank, size * (rank + 1))
        param_range = (param_start, param_start + numel)
        fragment = make_fragment((0, param, bucket), param_range, bucket_start, shard)
        if not fragment.in_local_shard:
            assert fragment.shard_range is None
            continue
        fragments.append(fragment)
        begin, end = fragment.shard_range
        assert (begin + shard[0], end + shard[0]) == fragment.shard_bucket_range
        in_bucket = fragment.shard_bucket_range[0] - fragment.bucket_range[0]
        assert in_bucket == fragment.shard_param_range[0] - fragment.param_range[0]
    ranges = [fragment.shard_param_range for fragment in fragments]
    assert ranges[0][0] == param_start
    assert ranges[-1][1] == param_start + numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("seed", range(20))
def test_rules_of_plans(seed):
    """Each element has one place, pieces begin aligned, and only full buckets are left."""
    numels, opened, shape, is_all = random_case(random.Random(seed))
    assert shape.bucket_size == shape.shard_size * shape.shards
    assert shape.shard_size % shape.alignment == 0
    rows, sizes = plain_plan(numels, opened, shape, is_all)
    sizes = [opened[1] if opened else 0, *sizes]
    seen, covered = set(), [0] * len(numels)
    for param, bucket, param_start, bucket_start, numel in rows:
        assert (param_start, numel > 0) == (covered[param], True)
        assert bucket_start % shape.alignment == 0
        assert bucket_start + numel <= sizes[bucket] <= shape.bucket_size
        assert sizes[bucket] % (shape.alignment * (shape.shards if bucket else 1)) == 0
        elements = {(bucket, e) for e in range(bucket_start, bucket_start + numel)}
        assert seen.isdisjoint(elements)
        seen |= elements
        covered[param] += numel
        if covered[param] < numels[param]:  # goes on in the next bucket, so this one is full
            assert bucket_start + numel == sizes[bucket]
        if bucket:  # the bucket of a test that was open is not one of equal shards
            check_fragments(
                (param, bucket, param_start, bucket_start, numel), sizes[bucket], shape.shards
            )
    assert covered == numels
    if is_all and len(sizes) > 1:  # the last bucket has no more room than alignment asks for
        *_, last, numel = rows[-1]
        assert sizes[-1] - last - numel < shape.alignment * shape.shards


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
        (ValueError, "param_sync_dtype must be", {"param_sync_dtype": torch.float8_e5m2}),
        (ValueError, "param_sync_dtype must be", {"param_sync_dtype": torch.complex64}),
        (TypeError, "module must be a torch.nn.Module", {"module": "model"}),
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


def check_later_errors(rank, world):
    optimizer = DistributedFusedAdam([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="param_sync_dtype must be"):
        optimizer.init_params(param_sync_dtype=torch.complex64)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_later_errors(two_ranks):
    two_ranks(check_later_errors)


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        DistributedFusedAdam([nn.Parameter(torch.ones(3))])
