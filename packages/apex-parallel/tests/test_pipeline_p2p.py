"""Transfers between stages of a pipeline: to which rank, of what shape, and when they end."""

import weakref

import pytest
import torch
import torch.distributed as dist

from apex.transformer.pipeline_parallel import _timers, p2p_communication
from apex.transformer.pipeline_parallel.schedules import (
    fwd_bwd_pipelining_without_interleaving as without_interleaving,
)
from apex_testkit.model_parallel import model_parallel

SHAPE = 2, 1, 3


def tensor_of(rank, tag=0.0):
    return torch.full(SHAPE, rank + tag, dtype=torch.float64)


def got(result):
    return result.get() if isinstance(result, p2p_communication.FutureTensor) else result


def holds(result, rank, tag, dtype):
    tensor = got(result)
    assert tensor.dtype == dtype
    assert torch.equal(tensor.detach(), tensor_of(rank, tag).to(dtype))


def check_p2p(rank, world, asynchronous, dtype):
    timers = _timers._Timers()
    options = {"dtype": dtype, "async_comm": asynchronous, "timers": timers}
    p2p = p2p_communication
    first, last = rank == 0, rank == world - 1
    before, after = (rank - 1) % world, (rank + 1) % world
    with model_parallel(1, world):
        received = p2p.recv_forward(SHAPE, **options)  # a line, stage after stage
        assert (received is None) == first
        first or holds(received, before, 0.25, dtype)
        assert first or got(received).requires_grad
        assert p2p.send_forward(tensor_of(rank, 0.25), tensor_shape=SHAPE, **options) is None
        received = p2p.recv_backward(SHAPE, **options)
        assert (received is None) == last
        last or holds(received, after, 0.5, dtype)
        assert p2p.send_backward(tensor_of(rank, 0.5), SHAPE, **options) is None
        # Rings, in which the first and the last stage are neighbours.
        received = p2p.send_forward_recv_forward(tensor_of(rank, 1), True, SHAPE, **options)
        holds(received, before, 1, dtype)
        received = p2p.send_backward_recv_backward(tensor_of(rank, 2), True, SHAPE, **options)
        holds(received, after, 2, dtype)
        both = p2p.send_forward_backward_recv_forward_backward(
            tensor_of(rank, 3), tensor_of(rank, 4), True, True, SHAPE, **options
        )
        holds(both[0], before, 3, dtype)
        holds(both[1], after, 4, dtype)
        # Pairs: an output goes one way, a gradient the other.
        if rank % 2 == 0:
            received = p2p.send_forward_recv_backward(tensor_of(rank, 5), SHAPE, **options)
            holds(received, after, 6, dtype)
        else:
            received = p2p.send_backward_recv_forward(tensor_of(rank, 6), SHAPE, **options)
            holds(received, before, 5, dtype)
        assert timers("forward-send-forward-recv").elapsed() > 0
        check_lists(rank, world, options)
        with pytest.raises(RuntimeError, match="tensor_shape: must be given"):
            p2p._communicate(None, None, True, False)
        with pytest.raises(ValueError, match=r"tensor_shape: the output has shape \[2, 1, 3\]"):
            p2p._communicate(tensor_of(0), None, False, False, (1, 1, 3))
        dist.barrier()


def check_lists(rank, world, options):
    """Arguments by their names in Apex, too."""
    shapes, lists = [SHAPE, SHAPE], without_interleaving
    if rank == 0:
        pair = [tensor_of(7), tensor_of(8)]
        results = lists.send_forward_recv_backward(
            output_tensors=pair, tensor_shapes=shapes, **options
        )
        holds(results[0], 9, 0, options["dtype"])
        holds(results[1], 10, 0, options["dtype"])
        lists.send_forward(output_tensors=[None, tensor_of(11)], tensor_shapes=shapes, **options)
        (gradient,) = lists.recv_backward(tensor_shapes=[SHAPE], **options)
        holds(gradient, 12, 0, options["dtype"])
        lists.send_forward(tensor_of(13), [SHAPE], **options)
    elif rank == 1:
        inputs = [None, None]
        for i, gradient in enumerate([tensor_of(9), tensor_of(10)]):
            inputs[i] = got(lists.recv_forward(tensor_shapes=[SHAPE], **options)[0])
            lists.send_backward(input_tensor_grads=[gradient], tensor_shapes=[SHAPE], **options)
        assert [x.flatten()[0].item() for x in inputs] == [7, 8]
        holds(lists.recv_forward([SHAPE], **options)[0], 11, 0, options["dtype"])
        (received,) = lists.send_backward_recv_forward(
            input_tensor_grads=[tensor_of(12)], tensor_shapes=[SHAPE], **options
        )
        holds(received, 13, 0, options["dtype"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_p2p_of_two(two_ranks, asynchronous):
    two_ranks(check_p2p, asynchronous=asynchronous, dtype=torch.bfloat16)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_p2p_of_four(four_ranks, asynchronous):
    four_ranks(check_p2p, asynchronous=asynchronous, dtype=torch.float32)


def check_sends_of_a_pipeline_that_is_gone(rank, world):
    """What nobody received before the groups were destroyed holds nobody up afterwards."""
    p2p = p2p_communication
    options = {"tensor_shape": SHAPE, "async_comm": True}
    with model_parallel(1, world):
        if rank == 0:
            p2p.send_forward(tensor_of(1), **options)
        dist.barrier()
    with model_parallel(1, world):
        for i in range(3 * world):  # more than are kept
            if rank == 0:
                p2p.send_forward(tensor_of(i), **options)
            else:
                holds(p2p.recv_forward(SHAPE), i, 0, torch.float32)
        assert len(p2p._unwaited) <= 2 * world


def test_sends_of_a_pipeline_that_is_gone(two_ranks):
    two_ranks(check_sends_of_a_pipeline_that_is_gone)


class Work:
    """One that fails, or not."""

    def __init__(self, fails=False):
        self.fails = fails

    def wait(self):
        if self.fails:
            raise RuntimeError("Connection closed by peer")


@pytest.mark.usefixtures("alone")
def test_transfers_end(monkeypatch):
    """They let go of tensors when they end; one that failed fails whenever it is waited for."""
    for fails in (False, True):
        works = [Work(), Work(fails)]
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda _, works=works: list(works))
        tensors = [torch.zeros(2), torch.zeros(3)]
        transfers = p2p_communication.Transfers(
            [p2p_communication.Message(True, tensor, 0, "the output") for tensor in tensors]
        )
        seen = [weakref.ref(tensor) for tensor in tensors]
        del tensors
        future = p2p_communication.FutureTensor(torch.zeros(1), transfers.wait)
        for _ in range(2):
            assert None not in [ref() for ref in seen]
            if not fails:
                future.get()
                break
            with pytest.raises(RuntimeError, match="sending the output to rank 0 failed"):
                future.get()
        else:
            continue
        assert [ref() for ref in seen] == [None, None]


def test_future_tensor():
    calls = []
    future = p2p_communication.FutureTensor(torch.ones(1), lambda: calls.append(1))
    assert future.get() is future.get()
    assert calls == [1]
    gathered = torch.zeros(2)
    assert p2p_communication.FutureTensor(torch.ones(1), lambda: gathered).get() is gathered
