"""The tracker's random states, and checkpoints that compute the same bits again."""

import contextlib
import weakref

import pytest
import torch
from torch import nn

from apex.transformer import tensor_parallel
from apex.transformer.tensor_parallel import memory, random
from apex_testkit.model_parallel import model_parallel


@pytest.fixture
def tracker(alone):
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    yield tracker
    tracker.reset()


def draw(seed=None, count=3):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator)


def test_tracker(tracker):
    torch.manual_seed(1)
    tracker.add("a", 5)
    tracker.add("b", 6)
    with pytest.raises(ValueError, match="seed 5 already exists"):
        tracker.add("c", 5)
    with pytest.raises(ValueError, match="state a already exists"):
        tracker.add("a", 7)
    with pytest.raises(ValueError, match="state c is not added"), tracker.fork("c"):
        pass
    with tracker.fork("a"):
        assert torch.equal(draw(), draw(5))
    with contextlib.suppress(KeyError), tracker.fork("b"):
        draw()
        raise KeyError
    with tracker.fork("a"), tracker.fork("b"):  # one within the other
        assert torch.equal(draw(), draw(6, 6)[3:])
    with tracker.fork("a"):
        assert torch.equal(draw(), draw(5, 6)[3:])
    assert torch.equal(draw(), draw(1)), "the device's own state was changed"
    states = tracker.get_states()
    with tracker.fork("a"):
        first = draw()
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(draw(), first)


def check_seeds(rank, world):
    with model_parallel(2):
        tensor_parallel.model_parallel_cuda_manual_seed(10)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            assert torch.equal(draw(), draw(10 + 2718 + rank % 2))
        assert torch.equal(draw(), draw(10))


class Block(nn.Module):
    """Draws from the device's state and from the tracker's; its output is the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, scale=1.0, other=None):
        y = nn.functional.dropout(self.linear(x).relu(), 0.3) * scale
        with tensor_parallel.get_cuda_rng_tracker().fork():
            y = nn.functional.dropout(y, 0.5)
        y = y if other is None else y + other
        y = tensor_parallel.reduce_from_tensor_model_parallel_region(y)
        return nn.functional.dropout(y.tanh(), 0.5), {"same": y}


def results(distribute, world=1, backwards=1):
    """Outputs, gradients and random states after two blocks, checkpointed or (None) not."""
    torch.manual_seed(0)
    blocks = [Block().double() for _ in range(2)]
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    x = torch.randn(4, 2 * world, 6, dtype=torch.float64).requires_grad_()
    other = torch.ones(6, dtype=torch.float64, requires_grad=True)
    y, total = x, 0
    for block in blocks:
        if distribute is None:
            y, rest = block(y, 2.0, other)
        else:
            y, rest = tensor_parallel.checkpoint(block, distribute, y, 2.0, other)
        total = total + rest["same"].square().sum()
    draw()
    inputs = [x, other, *(p for block in blocks for p in block.parameters())]
    for _ in range(backwards):
        grads = torch.autograd.grad(total + y.sum(), inputs, retain_graph=True)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        after = draw()
    return [y.detach(), *grads, draw(), after]


def test_recomputation_is_bitwise(tracker):
    expected = results(None)
    for distribute in (False, True):
        assert all(map(torch.equal, results(distribute), expected))
    assert all(map(torch.equal, results(False, backwards=2), expected))


def check_distributed_activations(rank, world):
    with model_parallel(world):
        for count in (1, 2):
            expected, actual = results(None, world), results(True, world, count)
            assert all(map(torch.equal, actual, expected))
        kept, own = [], random.split_tensor_into_1d_equal_chunks
        with pytest.MonkeyPatch.context() as patch:
            name = "split_tensor_into_1d_equal_chunks"
            patch.setattr(random, name, lambda x: (kept.append(x.shape), own(x))[1])
            results(False, world)
            assert kept == []
            results(True, world)
            assert kept == [torch.Size([4, 2 * world, 6])] * 2


def check_buffer(rank, world):
    """Kept parts come from the buffer, which must be reset."""
    with model_parallel(world), pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "_checkpointed_activations", None)
        patch.setattr(memory, "_buffers", {})
        random.init_checkpointed_activations_memory_buffer(2, 4, 6, 4, world, 2, fp16=False)
        with pytest.raises(RuntimeError, match="made before"):
            random.init_checkpointed_activations_memory_buffer(2, 4, 6, 4, world, 2, fp16=False)
        buffer = memory.get_mem_buff("checkpointed activations")
        assert (buffer.numel, buffer.dtype) == (2 * 4 * 6 // world * 2, torch.float32)
        x = torch.arange(48.0).view(4, 2, 6).requires_grad_()
        function = lambda x: x.square().sin()
        for _ in range(2):
            y = tensor_parallel.checkpoint(function, True, x)
            assert torch.equal(buffer.get_data(), x.flatten().chunk(world)[rank])
            (grad,) = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(grad, (x.square().cos() * 2 * x).detach())
            tensor_parallel.reset_checkpointed_activations_memory_buffer()
        tensor_parallel.checkpoint(function, True, x)
        tensor_parallel.checkpoint(function, True, x)
        with pytest.raises(RuntimeError, match=r"reset\(\) frees"):
            tensor_parallel.checkpoint(function, True, x)


def check_what_is_kept(rank, world):
    """The whole input goes when the caller lets it go; its part stays."""
    with model_parallel(world):
        x = torch.linspace(-2, 2, 48).view(4, 2, 6).requires_grad_()
        for distribute in (False, True):
            whole = x * 1.5
            seen = weakref.ref(whole)
            y = tensor_parallel.checkpoint(lambda h: (h * 2).sin(), distribute, whole)
            del whole
            assert (seen() is None) == distribute
            (grad,) = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(grad, (3 * (3 * x).cos()).detach())


def test_over_ranks(two_ranks, four_ranks):
    two_ranks(check_what_is_kept)
    four_ranks(check_seeds)
    two_ranks(check_distributed_activations)
    two_ranks(check_buffer)


def test_checkpoint_of_other_things(tracker):
    """No tensors, no arguments, no gradient."""
    assert tensor_parallel.checkpoint(lambda: 3, True) == 3
    assert tensor_parallel.checkpoint(lambda a, b: (b, a), True, "a", None) == (None, "a")
    with torch.no_grad():
        assert tensor_parallel.checkpoint(torch.sin, False, torch.ones(1)).grad_fn is None
    assert random.CheckpointFunction.apply(torch.sin, False, torch.zeros(1)).item() == 0


def test_generators():
    state = torch.get_rng_state()
    torch.rand(3)
    random._set_cuda_rng_state(state, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
