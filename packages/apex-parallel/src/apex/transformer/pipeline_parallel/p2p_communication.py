"""Tensors from stage to stage of a pipeline, over any backend of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from ..._lost_ranks import explained
from .. import parallel_state
from ..placement import current_device

if TYPE_CHECKING:  # of typing, since Python 3.11
    from typing_extensions import Unpack

__all__ = [
    "FutureTensor",
    "recv_backward",
    "recv_forward",
    "send_backward",
    "send_backward_recv_backward",
    "send_backward_recv_forward",
    "send_forward",
    "send_forward_backward_recv_forward_backward",
    "send_forward_recv_backward",
    "send_forward_recv_forward",
]

Shape = Sequence[int]


class Message(NamedTuple):
    """One tensor that goes to, or comes from, the global rank ``peer``."""

    sends: bool
    tensor: Tensor
    peer: int
    what: str  # for errors: "the output of micro-batch 3"


class Transfers:
    """Sends and receives that begin together; holds their works and tensors until all have ended.

    Over gloo, a message whose work is dropped is lost.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages: Sequence[Message] = messages
        self._works: list[Any] = []
        self.group = parallel_state.get_pipeline_model_parallel_group()
        if not messages:
            return
        operations = [
            dist.P2POp(dist.isend if m.sends else dist.irecv, m.tensor, m.peer, self.group)
            for m in messages
        ]
        with self._explained(messages):
            self._works = dist.batch_isend_irecv(operations)
        # NCCL has one work for all of them.
        each = len(self._works) == len(messages)
        self._parts = [[m] for m in messages] if each else [messages]

    @staticmethod
    def _explained(messages: Sequence[Message]) -> contextlib.AbstractContextManager[None]:
        verbs = [("sending", "to") if m.sends else ("receiving", "from") for m in messages]
        what = ", ".join(
            f"{verb} {m.what} {where} rank {m.peer}"
            for m, (verb, where) in zip(messages, verbs, strict=True)
        )
        return lost_peer(what, [m.peer for m in messages])

    def wait(self) -> None:
        """Return when all have ended; ``RuntimeError`` says which one failed."""
        while self._works:
            with self._explained(self._parts[0]):
                self._works[0].wait()
            del self._works[0], self._parts[0]  # one that failed fails again
        self.messages = ()  # futures refer to this object, and the tensors may be large


def lost_peer(
    what: str, peers: Sequence[int] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Have errors of the backend say which stage was at what, and what may have happened."""
    group = parallel_state.get_pipeline_model_parallel_group()
    who = f"pipeline stage {parallel_state.get_pipeline_model_parallel_rank()}"
    return explained(what, group, who=who, others=peers)


class FutureTensor:
    """A tensor that is under way; :meth:`get` waits for it.

    Args:
        tensor: what is being received; None for a send.
        waitfunc: waits; where it returns something, that takes the tensor's place. None if there
            is nothing to wait for.
    """

    def __init__(self, tensor: Tensor | None, waitfunc: Callable[[], Any] | None) -> None:
        self.tensor, self.waitfunc = tensor, waitfunc

    def get(self) -> Tensor | None:
        """The tensor, as soon as it is there."""
        if self.waitfunc is not None:
            result = self.waitfunc()
            self.tensor = self.tensor if result is None else result
            self.waitfunc = None
        return self.tensor


def device() -> torch.device:
    """Where tensors are received: the current GPU, or the CPU if the pipeline's backend is gloo."""
    return current_device(parallel_state.get_pipeline_model_parallel_group())


def outgoing(tensor: Tensor, shape: Shape | None, dtype: torch.dtype, what: str) -> Tensor:
    """``tensor`` as it is sent: checked, of the dtype of the wire, contiguous.

    A tensor of another shape than the other stage expects is sent if it has as many numbers; there
    it has the expected shape. Raises ``ValueError`` if it has not.
    """
    if shape is not None and tensor.numel() != math.prod(shape):
        stage = parallel_state.get_pipeline_model_parallel_rank()
        raise ValueError(
            f"tensor_shape: {what} has shape {list(tensor.shape)} on pipeline stage {stage}, "
            f"{tensor.numel()} numbers, but the other stage expects the {math.prod(shape)} of "
            f"{list(shape)}. Give as tensor_shape the shape of what stages hand on."
        )
    return tensor.detach().to(dtype).contiguous()


# Sends that nobody waits for. A rank is never further ahead of its peers than two rounds.
# No lock: one thread of a rank runs its schedule.
_unwaited: deque[Transfers] = deque()


def _run_p2pops(
    tensor_send_prev: Tensor | None,
    tensor_send_next: Tensor | None,
    tensor_recv_prev: Tensor | None,
    tensor_recv_next: Tensor | None,
    async_comm: bool = False,
) -> Transfers:
    """Begin up to four transfers at once, and wait for them unless ``async_comm``.

    Two stages are each other's next and previous ones: forward comes before backward in what is
    sent and in what is received, so that each message meets its own.
    """
    following = parallel_state.get_pipeline_model_parallel_next_rank()
    previous = parallel_state.get_pipeline_model_parallel_prev_rank()
    wanted = (
        (True, tensor_send_next, following, "an output"),
        (True, tensor_send_prev, previous, "a gradient"),
        (False, tensor_recv_prev, previous, "an input"),
        (False, tensor_recv_next, following, "a gradient"),
    )
    transfers = Transfers([Message(s, t, p, w) for s, t, p, w in wanted if t is not None])
    if not async_comm:
        transfers.wait()
    elif tensor_recv_prev is None and tensor_recv_next is None:
        while _unwaited and _unwaited[0].group is not transfers.group:
            _unwaited.popleft()  # of a pipeline that was destroyed
        _unwaited.append(transfers)
        while len(_unwaited) > 2 * parallel_state.get_pipeline_model_parallel_world_size():
            _unwaited.popleft().wait()
    return transfers


Received = Tensor | FutureTensor | None


class Options(TypedDict, total=False):
    """Keywords of all functions below.

    ``dtype``: on the wire, by default float32. ``async_comm``: return at once, with futures.
    ``timers``: ``timers(name)`` measures the call. ``scatter_gather_tensors_in_pipeline``: see
    :func:`_communicate`; ``sequence_parallel_enabled`` switches that off.
    """

    dtype: torch.dtype | None
    async_comm: bool
    sequence_parallel_enabled: bool
    timers: Any
    scatter_gather_tensors_in_pipeline: bool


def _communicate(
    tensor_send_next: Tensor | None,
    tensor_send_prev: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape | None = None,
    override_scatter_gather_tensors_in_pipeline: bool = False,
    dtype_: torch.dtype | None = None,
    *,
    scatter_gather_tensors_in_pipeline: bool = False,
    params_dtype: torch.dtype | None = None,
    fp32_residual_connection: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
) -> tuple[Received, Received]:
    """Send to, and receive from, the neighbours in the pipeline, all at once.

    Args:
        tensor_send_next: an output, or None.
        tensor_send_prev: a gradient, or None.
        recv_prev: whether to receive an input.
        recv_next: whether to receive a gradient.
        tensor_shape: of what is received; with sequence parallelism already this rank's part. What
            is sent has as many numbers.
        override_scatter_gather_tensors_in_pipeline: send whole tensors, whatever else is said.
        dtype_: dtype on the wire; by default ``params_dtype``, or float32 if that is None or
            ``fp32_residual_connection``. Tensors that are sent are cast to it.
        scatter_gather_tensors_in_pipeline: each tensor-parallel rank sends its share of a tensor
            that all of them have, and they put the tensor together on the next stage. Both stages
            must say so. It is off by default: Apex declares True, and ignores it. A tensor that
            cannot be divided is sent whole, and so is one with ``sequence_parallel_enabled``, whose
            ranks have different parts.
        async_comm: return at once, with futures.

    Returns:
        What came from the previous stage, and from the next one; each a tensor that requires its
        gradient, a :class:`FutureTensor`, or None.

    Raises:
        RuntimeError: a tensor is to be received and ``tensor_shape`` is None; or a transfer failed.
        ValueError: a tensor that is sent has another number of elements.
    """
    if tensor_shape is None and (recv_prev or recv_next):
        raise RuntimeError("tensor_shape: must be given, to receive a tensor")
    dtype = dtype_ or (None if fp32_residual_connection else params_dtype) or torch.float32
    keeps_whole = override_scatter_gather_tensors_in_pipeline or sequence_parallel_enabled
    ranks = 1
    if scatter_gather_tensors_in_pipeline and not keeps_whole:
        ranks = parallel_state.get_tensor_model_parallel_world_size()

    def send(tensor: Tensor | None, what: str) -> Tensor | None:
        if tensor is None:
            return None
        whole = outgoing(tensor, tensor_shape, dtype, what)
        if ranks == 1 or whole.numel() % ranks:
            return whole
        from ..utils import split_tensor_into_1d_equal_chunks  # few need it

        return split_tensor_into_1d_equal_chunks(whole)

    def buffer(is_wanted: bool) -> Tensor | None:
        if not is_wanted or tensor_shape is None:
            return None
        numel = math.prod(tensor_shape)
        shape = tuple(tensor_shape) if ranks == 1 or numel % ranks else (numel // ranks,)
        return torch.empty(shape, dtype=dtype, device=device())

    received = buffer(recv_prev), buffer(recv_next)
    transfers = _run_p2pops(
        send(tensor_send_prev, "the gradient"),
        send(tensor_send_next, "the output"),
        *received,
        async_comm=async_comm,
    )
    before, after = (
        t if t is None else FutureTensor(t, functools.partial(_whole, t, tensor_shape, transfers))
        for t in received
    )
    if async_comm:
        return before, after
    return before and before.get(), after and after.get()


def _whole(received: Tensor, shape: Shape, transfers: Transfers) -> Tensor:
    """What was received, as soon as it is there; all ranks' shares of it, if it is one."""
    transfers.wait()
    if received.numel() != math.prod(shape):
        from ..utils import gather_split_1d_tensor

        received = gather_split_1d_tensor(received).view(tuple(shape))
    return received.detach().requires_grad_()


def _exchange(
    name: str, *wanted: Any, dtype: torch.dtype | None = None, timers: Any = None, **options: Any
) -> tuple[Received, Received]:
    """Communicate under a timer, if there are any; the functions below are this."""
    if timers is not None:
        timers(name).start()
    received = _communicate(*wanted, dtype_=dtype, **options)
    if timers is not None:
        timers(name).stop()
    return received


def recv_forward(
    tensor_shape: Shape,
    override_scatter_gather_tensors_in_pipeline: bool = False,
    **options: Unpack[Options],
) -> Received:
    """Receive an input from the previous stage; the first stage gets None."""
    if parallel_state.is_pipeline_first_stage():
        return None
    wire = tensor_shape, override_scatter_gather_tensors_in_pipeline
    return _exchange("forward-recv", None, None, True, False, *wire, **options)[0]


def recv_backward(tensor_shape: Shape | None = None, **options: Unpack[Options]) -> Received:
    """Receive the gradient of an output from the next stage; the last stage gets None."""
    if parallel_state.is_pipeline_last_stage():
        return None
    return _exchange("backward-recv", None, None, False, True, tensor_shape, **options)[1]


def send_forward(
    output_tensor: Tensor,
    override_scatter_gather_tensors_in_pipeline: bool = False,
    tensor_shape: Shape | None = None,
    **options: Unpack[Options],
) -> None:
    """Send an output to the next stage; the last stage does nothing."""
    if not parallel_state.is_pipeline_last_stage():
        wire = tensor_shape, override_scatter_gather_tensors_in_pipeline
        _exchange("forward-send", output_tensor, None, False, False, *wire, **options)


def send_backward(
    input_tensor_grad: Tensor, tensor_shape: Shape, **options: Unpack[Options]
) -> None:
    """Send the gradient of an input to the previous stage; the first stage does nothing."""
    if not parallel_state.is_pipeline_first_stage():
        wanted = None, input_tensor_grad, False, False, tensor_shape
        _exchange("backward-send", *wanted, **options)


def send_forward_recv_backward(
    output_tensor: Tensor, tensor_shape: Shape, **options: Unpack[Options]
) -> Received:
    """Send an output to the next stage, receive a gradient from it; the last stage gets None."""
    if parallel_state.is_pipeline_last_stage():
        return None
    wanted = output_tensor, None, False, True, tensor_shape
    return _exchange("forward-send-backward-recv", *wanted, **options)[1]


def send_backward_recv_forward(
    input_tensor_grad: Tensor, tensor_shape: Shape, **options: Unpack[Options]
) -> Received:
    """Send a gradient to the previous stage, receive an input; the first stage gets None."""
    if parallel_state.is_pipeline_first_stage():
        return None
    wanted = None, input_tensor_grad, True, False, tensor_shape
    return _exchange("backward-send-forward-recv", *wanted, **options)[0]


def send_forward_recv_forward(
    output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Shape, **options: Unpack[Options]
) -> Received:
    """Send an output to the next stage and receive an input from the previous one."""
    wanted = output_tensor, None, recv_prev, False, tensor_shape
    return _exchange("forward-send-forward-recv", *wanted, **options)[0]


def send_backward_recv_backward(
    input_tensor_grad: Tensor | None,
    recv_next: bool,
    tensor_shape: Shape,
    **options: Unpack[Options],
) -> Received:
    """Send a gradient to the previous stage and receive one from the next stage."""
    wanted = None, input_tensor_grad, False, recv_next, tensor_shape
    return _exchange("backward-send-backward-recv", *wanted, **options)[1]


def send_forward_backward_recv_forward_backward(
    output_tensor: Tensor | None,
    input_tensor_grad: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape,
    **options: Unpack[Options],
) -> tuple[Received, Received]:
    """Send to both neighbours, receive an input and a gradient from them."""
    wanted = output_tensor, input_tensor_grad, recv_prev, recv_next, tensor_shape
    return _exchange("forward-backward-send-forward-backward-recv", *wanted, **options)
