"""Batch samplers: every sample once, on the rank and in the step where it belongs."""

import itertools

import pytest
from torch.utils.data import DataLoader

from apex.transformer._data import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

BOTH = [MegatronPretrainingSampler, MegatronPretrainingRandomSampler]


def batches(kind, *args, ranks=2, **kwargs):
    """Per step, the ranks' batches."""
    samplers = [kind(*args, rank, ranks, **kwargs) for rank in range(ranks)]
    return list(zip(*samplers, strict=True))


@pytest.mark.parametrize(("total", "consumed", "local"), [(24, 0, 3), (25, 6, 3), (29, 12, 1)])
def test_in_order(total, consumed, local):
    found = batches(MegatronPretrainingSampler, total, consumed, local)
    seen = [i for step in found for batch in step for i in batch]
    assert seen == list(range(consumed, consumed + (total - consumed) // (2 * local) * 2 * local))
    assert all(len(batch) == local for step in found for batch in step)


def test_the_last_batch():
    """Of 10 samples after three batches of 3 and 3: rank 0 gets 3 of 4, rank 1 gets 1."""
    ranks = [list(MegatronPretrainingSampler(10, 0, 3, r, 2, drop_last=False)) for r in range(2)]
    assert ranks == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]]
    ranks = [list(MegatronPretrainingSampler(8, 0, 3, r, 2, drop_last=False)) for r in range(2)]
    assert ranks == [[[0, 1, 2], [6, 7]], [[3, 4, 5]]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_random_order(ranks):
    total, local = 26, 2
    full = total // (ranks * local) * ranks * local
    epochs = []
    for epoch in range(3):
        steps = batches(MegatronPretrainingRandomSampler, total, epoch * full, local, ranks=ranks)
        seen = [[i for step in steps for i in step[rank]] for rank in range(ranks)]
        assert sorted(itertools.chain(*seen)) == list(range(full))
        bucket = full // ranks
        for rank, mine in enumerate(seen):
            assert sorted(mine) == list(range(rank * bucket, (rank + 1) * bucket))
        epochs.append(seen)
    assert epochs[0] != epochs[1] != epochs[2]


def test_random_order_goes_on():
    """A run that stopped after some steps continues as if it had not."""
    whole = MegatronPretrainingRandomSampler(24, 0, 2, 1, 2)
    expected = [*whole, *whole]  # two epochs
    assert whole.consumed_samples == 48
    for consumed in (0, 4, 20, 24, 40):
        sampler = MegatronPretrainingRandomSampler(24, consumed, 2, 1, 2)
        found = list(sampler)
        assert found == expected[consumed // 4 : len(found) + consumed // 4]
        assert sampler.consumed_samples % 24 == 0


@pytest.mark.parametrize("kind", BOTH)
def test_another_size_on_the_way(kind):
    """As a ramp-up of batches does; the random one always reaches the next epoch."""
    sampler = kind(32, 0, 2, 0, 2)
    iterator = iter(sampler)
    sizes = [len(next(iterator))]
    sampler.local_minibatch_size = 3
    sizes += [len(batch) for batch in iterator]
    assert sizes == [2, *[3] * ((32 - 4) // 6)]
    if kind is MegatronPretrainingRandomSampler:
        assert [len(batch) for batch in sampler] == [3] * 5
        assert (sampler.epoch, sampler.consumed_samples) == (1, 60)


@pytest.mark.parametrize(("total", "before", "after"), [(100, 8, 10), (100, 10, 8), (97, 5, 7)])
def test_another_size_between_epochs(total, before, after):
    """No epoch is empty, though what the last one left out may be more than a batch by now."""
    sampler = MegatronPretrainingRandomSampler(total, 0, before, 0, 1)
    assert len(list(sampler)) == total // before
    sampler.local_minibatch_size = after
    first = list(sampler)
    assert sampler.epoch == 1
    assert total // after - 1 <= len(first) <= total // after
    assert len(list(sampler)) == total // after
    assert sampler.epoch == 2


@pytest.mark.parametrize("kind", BOTH)
def test_a_size_that_never_ends(kind):
    """A batch of no samples would be yielded, or looked for, for ever."""
    sampler = kind(32, 0, 2, 0, 2)
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises((RuntimeError, ValueError), match="minibatch_size: expected at least 1"):
        sampler.local_minibatch_size = 0
    assert sampler.local_minibatch_size == 2
    assert len(list(iterator)) == 7
    sampler.local_minibatch_size = 40
    if kind is MegatronPretrainingRandomSampler:
        with pytest.raises(ValueError, match="32 samples are less than a batch of all ranks, 80"):
            list(sampler)


@pytest.mark.parametrize("kind", BOTH)
def test_in_a_loader(kind):
    sampler = kind(8, 0, 2, 1, 2)
    assert len(sampler) == 8
    loaded = [batch.tolist() for batch in DataLoader(range(8), batch_sampler=sampler)]
    assert loaded == list(kind(8, 0, 2, 1, 2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 0, 2, 0, 2), "total_samples: expected at least 1, got 0"),
        ((8, 0, 0, 0, 2), "local_minibatch_size: expected at least 1, got 0"),
        ((8, 0, 2, 2, 2), "data_parallel_rank: expected 0 to 1, got 2"),
        ((8, 0, 2, 0, 0), "data_parallel_rank"),
        ((8, -1, 2, 0, 2), "consumed_samples"),
    ],
)
def test_errors(arguments, text):
    for kind, error in zip(BOTH, (RuntimeError, ValueError), strict=True):
        with pytest.raises(error, match=f"{kind.__name__}: {text}"):
            kind(*arguments)
    with pytest.raises(RuntimeError, match="consumed_samples: expected 0 to 7, got 8"):
        MegatronPretrainingSampler(8, 8, 2, 0, 2)
    with pytest.raises(ValueError, match="3 samples are less than a batch of all ranks, 4"):
        MegatronPretrainingRandomSampler(3, 0, 2, 0, 2)
