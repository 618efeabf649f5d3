"""Batches handed to the other ranks, and memory handed out in pieces."""

import pytest
import torch

from apex.transformer.tensor_parallel import broadcast_data, data, memory
from apex_testkit.model_parallel import model_parallel


def batch(source, dtype):
    """What the ranks whose source is ``source`` shall get."""
    generator = torch.Generator().manual_seed(source)
    shapes = {"text": (3, 5), "empty": (0, 4), "scalar": (), "deep": (1, 2, 1, 2, 1, 2)}
    return {
        key: torch.randint(2, shape, generator=generator).to(dtype) for key, shape in shapes.items()
    }


def check_broadcast(rank, world):
    with model_parallel(2):
        source = rank // 2 * 2
        for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int16):
            expected = batch(source, dtype)
            data = {**expected, "more": "ignored"} if rank == source else None
            actual = broadcast_data(expected, data, dtype)
            assert list(actual) == list(expected)
            for key, value in actual.items():
                assert value.dtype == dtype
                assert torch.equal(value, expected[key])
        strided = {"x": torch.arange(12).view(3, 4).t()}
        assert torch.equal(broadcast_data(["x"], strided, torch.int64)["x"], strided["x"])
        assert broadcast_data([], {}, torch.int64) == {}


def check_sizes(rank, world):
    """Told by the first rank of each tensor-parallel group; the others bring nothing."""
    with model_parallel(2):
        source = rank // 2 * 2
        given = {
            "ids": torch.zeros(7 + source, 11, dtype=torch.int64),
            "mask": torch.zeros(8, 2, 1, 2, 3, 5, dtype=torch.bool),
            "empty": torch.zeros(0, 4),
            "scalar": torch.tensor(1.0),
        }
        mine = given if rank == source else (None, {"ids": torch.zeros(1)})[rank // 2]
        sizes, numels, total = data._build_key_size_numel_dictionaries(list(given), mine)
        assert sizes == {key: list(tensor.shape) for key, tensor in given.items()}
        assert numels == {key: tensor.numel() for key, tensor in given.items()}
        assert total == sum(numels.values())
        assert list(sizes) == list(numels) == list(given)
        assert all(type(n) is int for n in numels.values())
        with pytest.raises(KeyError, match="data has no 'other'"):
            data._build_key_size_numel_dictionaries(["ids", "other"], mine)
        with pytest.raises(TypeError, match="expected a dict of tensors on the first"):
            data._build_key_size_numel_dictionaries(["ids"], None)
        assert data._build_key_size_numel_dictionaries([], mine) == ({}, {}, 0)


def check_errors(rank, world):
    """What is wrong on the first rank is an error on all, and nobody waits."""
    with model_parallel(2):
        is_source = rank % 2 == 0
        data = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64)} if is_source else None
        with pytest.raises(KeyError, match="data has no 'c'"):
            broadcast_data(["a", "c"], data, torch.float32)
        with pytest.raises(TypeError, match=r"data\['b'\] is torch.int64, expected torch.float32"):
            broadcast_data(["a", "b"], data, torch.float32)
        with pytest.raises(TypeError, match="expected a dict of tensors"):
            broadcast_data(["a"], None, torch.float32)
        assert broadcast_data(["a"], data, torch.float32)["a"].tolist() == [0, 0]


def test_broadcast(four_ranks):
    four_ranks(check_broadcast)
    four_ranks(check_sizes)
    four_ranks(check_errors)


def test_broadcast_alone(alone):
    data = {"a": torch.arange(6).view(2, 3)}
    assert torch.equal(broadcast_data(["a"], data, torch.int64)["a"].cpu(), data["a"])


def test_memory_buffer(capsys):
    buffer = memory.MemoryBuffer("some", 10, torch.float32, track_usage=True)
    assert not buffer.is_in_use()
    a, b = torch.randn(2, 3), torch.randn(3)
    taken = buffer.add(a), buffer.add(b)
    assert torch.equal(taken[0].cpu(), a)
    assert torch.equal(buffer.get_data().cpu(), torch.cat((a.flatten(), b)))
    assert (buffer.numel_in_use(), buffer.is_in_use()) == (9, True)
    with pytest.raises(RuntimeError, match="2 elements do not fit, 1 of 10 are free"):
        buffer.add(torch.zeros(2))
    with pytest.raises(TypeError, match=r"expected a torch.float32 tensor, got torch.int64"):
        buffer.add(torch.zeros(1, dtype=torch.int64))
    assert buffer.numel_in_use() == 9
    buffer.reset()
    assert buffer.add(torch.ones(2, requires_grad=True)).grad_fn is None
    assert not buffer.data.requires_grad  # or it would keep every graph alive
    buffer.reset()
    assert buffer.get_data().numel() == 0
    buffer.add(torch.ones(1))
    assert taken[0].view(-1)[0] == 1  # the same memory
    buffer.print_average_usage()
    assert "usage of some memory buffer: 45.00 %" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="track_usage=False"):
        memory.MemoryBuffer("other", 1, torch.float32, track_usage=False).print_average_usage()


def test_named_and_ring_buffers(monkeypatch):
    monkeypatch.setattr(memory, "_buffers", {})
    buffer = memory.allocate_mem_buff("a", 4, torch.int32, track_usage=False)
    assert memory.get_mem_buff("a") is buffer
    with pytest.raises(ValueError, match="there is a buffer 'a' already"):
        memory.allocate_mem_buff("a", 4, torch.int32, track_usage=False)
    with pytest.raises(KeyError):
        memory.get_mem_buff("b")
    ring = memory.RingMemBuffer("ring", 2, 4, torch.float32, track_usage=False)
    first, second = ring.get_next_buffer(), ring.get_next_buffer()
    assert first is not second
    first.add(torch.zeros(2))
    with pytest.raises(RuntimeError, match="ring 0 is in use"):
        ring.get_next_buffer()
    first.reset()
    assert ring.get_next_buffer() is first
