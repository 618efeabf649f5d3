"""Buckets planned from an order of arrival, and the slots that gradients fill."""

import pytest
import torch

from apex.parallel.ddp.plan import BucketPlanner, BucketSlots, decode, encode


def planned(order, numels, kinds=None, message_size=10, triggers=None):
    planner = BucketPlanner(numels, kinds or ["a"] * len(numels), message_size, triggers)
    for index in order:
        planner.add(index)
    return planner.plan()


def test_buckets_close_at_message_size():
    assert planned([3, 2, 1, 0], [5, 5, 9, 1]) == [[3, 2], [1, 0]]
    assert planned([3, 2, 1, 0], [5, 5, 9, 1], message_size=1) == [[3], [2], [1], [0]]
    assert planned([3, 2, 1, 0], [5, 5, 9, 1], message_size=11) == [[3, 2, 1], [0]]


def test_kinds_are_apart():
    assert planned([0, 1, 2, 3], [5] * 4, kinds=["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    assert planned([0, 1, 2], [5, 50, 1], kinds=["a", "b", "a"]) == [[1], [0, 2]]


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
    slots = BucketSlots([[3, 1], [0], [2]])
    shape = torch.Size([1])
    assert slots.fill(0, shape) == []
    assert slots.ready_buckets_not_reduced == {1}
    assert slots.fill(3, shape) == []
    assert slots.fill(1, shape) == [0, 1]
    assert slots.next_bucket == 2
    with pytest.raises(RuntimeError, match=r"parameter 1 \(shape \[1\]\) got its gradient twice"):
        slots.fill(1, shape)
    assert slots.take_remaining() == [2]
    assert slots.take_remaining() == []
    slots.clear()
    assert slots.take_remaining() == [0, 1, 2]
    assert slots.arrived == [[False, False], [False], [False]]
