"""Outputs of another shape than ``tensor_shape`` with as many numbers: they arrive as that."""

import pytest
import torch
from torch import nn

from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel import get_forward_backward_func, p2p_communication, utils
from apex.transformer.pipeline_parallel.schedules.common import custom_backward, free_output_tensor
from apex_testkit.model_parallel import model_parallel

BATCH, SEQUENCE, HIDDEN, MICROBATCHES = 2, 3, 4, 4
SHAPE = SEQUENCE, BATCH, HIDDEN


class Stage(nn.Module):
    """Computes on [batch, sequence, hidden]; what it is handed has ``tensor_shape``."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.layer, self.input = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64), None

    def set_input_tensor(self, tensors):
        (self.input,) = tensors
        assert self.input is None or self.input.shape == SHAPE

    def forward(self, x):
        x = x if self.input is None else self.input.reshape(BATCH, SEQUENCE, HIDDEN)
        return self.layer(x).tanh()


def step(batch, model):
    return model(batch[0]), lambda y: (y.square().sum(), y.detach().sum())


def samples():
    generator = torch.Generator().manual_seed(0)
    shape = BATCH * MICROBATCHES, SEQUENCE, HIDDEN
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def setup_calculator():
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    utils.setup_microbatch_calculator(1, None, BATCH * MICROBATCHES, BATCH, 1)


def check_schedule(rank, world, chunks, options):
    """Losses and gradients are those of one process."""
    with model_parallel(1, world):
        if chunks > 1:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
            parallel_state.set_virtual_pipeline_model_parallel_rank(0)
        setup_calculator()
        whole = [Stage(i) for i in range(world * chunks)]
        expected = []
        for x in samples().split(BATCH):
            for stage in whole:
                x = stage(x)
            (x.square().sum() / MICROBATCHES).backward()
            expected.append(x.sum().item())
        mine = [Stage(c * world + rank) for c in range(chunks)]
        run = get_forward_backward_func(chunks if chunks > 1 else None, world)
        options = {"tensor_shape": SHAPE, "dtype": torch.float64} | options
        losses = run(step, [samples()], mine, **options)
        utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
        assert [x.item() for x in losses] == (expected if rank == world - 1 else [])
        for chunk, stage in enumerate(mine):
            other = whole[chunk * world + rank]
            for a, b in zip(stage.parameters(), other.parameters(), strict=True):
                assert (
                    torch.equal(a.grad, b.grad) if not options["forward_only"] else a.grad is None
                )


@pytest.mark.parametrize("deallocates", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_schedules(two_ranks, deallocates, forward_only):
    for is_async in (False, True):
        options = {
            "forward_only": forward_only,
            "deallocate_pipeline_outputs": deallocates,
            "async_comm": is_async,
        }
        two_ranks(check_schedule, chunks=1, options=options)


def test_interleaved(two_ranks):
    options = {"forward_only": False, "deallocate_pipeline_outputs": True}
    two_ranks(check_schedule, chunks=2, options=options)


def check_p2p(rank, world, is_async):
    """Every way of sending takes it; another number of elements is refused before it is sent."""
    p2p = p2p_communication
    options = {"async_comm": is_async, "dtype": torch.float32}
    values = torch.arange(24.0)
    flat, deep = values, values.view(2, 3, 4)
    get = lambda x: x.get() if isinstance(x, p2p.FutureTensor) else x

    def arrives(x, plus):
        assert get(x).shape == SHAPE
        assert torch.equal(get(x).detach().flatten(), values + plus)

    with model_parallel(1, world):
        if rank == 0:
            p2p.send_forward(deep, tensor_shape=SHAPE, **options)
            arrives(p2p.recv_backward(SHAPE, **options), 1)
            arrives(p2p.send_forward_recv_backward(flat + 2, SHAPE, **options), 3)
        else:
            arrives(p2p.recv_forward(SHAPE, **options), 0)
            p2p.send_backward(flat + 1, SHAPE, **options)
            arrives(p2p.send_backward_recv_forward(deep + 3, SHAPE, **options), 2)
        arrives(p2p.send_forward_recv_forward(deep + rank, True, SHAPE, **options), 1 - rank)
        arrives(p2p.send_backward_recv_backward(flat + rank, True, SHAPE, **options), 1 - rank)
        for wrong in (values[:23], torch.zeros(0), values.view(2, 12).repeat(2, 1)):
            with pytest.raises(ValueError, match=r"the other stage expects the 24 of \[3, 2, 4\]"):
                p2p._communicate(wrong, None, False, False, SHAPE)


@pytest.mark.parametrize("is_async", [False, True])
def test_transfers(two_ranks, is_async):
    two_ranks(check_p2p, is_async=is_async)


@pytest.mark.parametrize("frees", [False, True])
def test_backward_of_a_gradient_of_another_shape(frees):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    output, weights = x * 2, torch.randn(3, 2, 4, dtype=torch.float64)
    free_output_tensor(output, deallocate_pipeline_outputs=frees)
    assert output.numel() == (1 if frees else 24)
    custom_backward(output, weights)
    assert torch.equal(x.grad, 2 * weights.view(2, 3, 4))
    leaf = torch.zeros(6, requires_grad=True)
    custom_backward(leaf, torch.ones(2, 3))
    assert leaf.grad.tolist() == [1.0] * 6
    with pytest.raises(RuntimeError, match="got \\[5\\]"):
        custom_backward(x * 2, torch.zeros(5))
