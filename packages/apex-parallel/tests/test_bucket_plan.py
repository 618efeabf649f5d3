"""Buckets planned from an order of arrival, and the slots that gradients fill."""

import pytest
import torch

from apex.parallel.ddp.plan import BucketPlanner, BucketSlots, decode, encode, sizes_and_limits


def planned(order, sizes, kinds=None, limits=(10,), triggers=None):
    planner = BucketPlanner(sizes, kinds or ["a"] * len(sizes), limits, triggers)
    for index in order:
        planner.add(index)
    return planner.plan()


def test_buckets_close_at_their_limit():
    assert planned([3, 2, 1, 0], [5, 5, 9, 1]) == [[3, 2], [1, 0]]
    assert planned([3, 2, 1, 0], [5, 5, 9, 1], limits=(1,)) == [[3], [2], [1], [0]]
    assert planned([3, 2, 1, 0], [5, 5, 9, 1], limits=(11,)) == [[3, 2, 1], [0]]


def test_kinds_are_apart():
    assert planned([0, 1, 2, 3], [5] * 4, kinds=["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    assert planned([0, 1, 2], [5, 50, 1], kinds=["a", "b", "a"]) == [[1], [0, 2]]


def test_the_first_bucket_of_each_kind_is_small():
    kinds = ["a", "b", "a", "a", "b", "a"]
    plan = planned([0, 1, 2, 3, 4, 5], [4] * 6, kinds, limits=(4, 8))
    assert plan == [[0], [1], [2, 3], [4], [5]]


def test_the_default_stands_for_torchs_buckets_in_bytes():
    dtypes = [torch.float32, torch.bfloat16]
    assert sizes_and_limits([3, 5], dtypes, 10_000_000) == ([12, 10], [1 << 20, 25 << 20])
    assert sizes_and_limits([3, 5], dtypes, 9_999_999) == ([3, 5], [9_999_999])


def test_triggers_close_buckets_whatever_their_size():
    assert planned([3, 2, 1, 0], [99] * 4, triggers={2}) == [[3, 2], [1, 0]]
    assert planned([3, 2, 1, 0], [99] * 4, triggers=set()) == [[3, 2, 1, 0]]


def test_what_never_arrived_comes_last_and_apart():
    assert planned([2, 0, 2], [1, 1, 1, 1]) == [[2, 0], [1, 3]]
    assert planned([], [1, 1]) == [[0, 1]]
    assert planned([], []) == []


@pytest.mark.parametrize("plan", [[], [[0]], [[2, 0], [1]], [[1], [0], [2]]])
def test_encoding(plan):
    count = sum(len(bucket) for bucket in plan)
    numbers = encode(plan, count)
    assert len(numbers) == 1 + 2 * count
    assert decode(numbers, count) == plan


def test_foreign_structure_is_refused():
    with pytest.raises(RuntimeError, match="2 parameters, but 3 require gradients"):
        decode(encode([[0, 1]], 3), 3)


def test_slots_release_buckets_in_order():
    slots = BucketSlots()
    assert not slots.agreed
    slots.set_plan([[3, 1], [0], [2]], keys=[10, 11, 12, 13])
    waiting, missing = slots.waiting, slots.missing
    assert slots.agreed
    assert not slots.has_arrived(10)
    slots.open()
    shape = torch.Size([1])
    assert slots.fill(10, 0, shape) == []
    assert slots.has_arrived(10)
    assert slots.ready_buckets_not_reduced == {1}
    assert slots.fill(13, 3, shape) == []
    assert slots.fill(11, 1, shape) == [0, 1]
    assert slots.next_bucket == 2
    with pytest.raises(RuntimeError, match=r"parameter 1 \(shape \[1\]\) got its gradient twice"):
        slots.fill(11, 1, shape)
    assert slots.take_remaining() == [2]
    assert slots.take_remaining() == []
    slots.clear()
    assert not slots.has_arrived(10)
    slots.open()
    assert slots.take_remaining() == [0, 1, 2]
    assert waiting is slots.waiting == {10: 1, 11: 0, 12: 2, 13: 0}  # hooks hold these objects
    assert missing is slots.missing == [2, 1, 1]
    slots.forget()
    assert (slots.agreed, slots.num_buckets, waiting, missing) == (False, 0, {}, [])
