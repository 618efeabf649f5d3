"""The loop that carries out a schedule's actions on one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ... import parallel_state
from ..p2p_communication import FutureTensor, Message, Transfers, device, lost_peer, outgoing
from ..utils import get_kth_microbatch, get_model_type
from . import common
from .actions import Action, Kind

__all__ = ["Loop", "Wire"]

Key = tuple[Kind, int, int]  # direction, micro-batch, chunk
NAMES = {Kind.FORWARD: "the output", Kind.BACKWARD: "the gradient"}
HEADER_BYTES = 512


@dataclasses.dataclass(frozen=True)
class Wire:
    """What travels between this stage and its neighbours."""

    recv_shapes: list[tuple[int, ...]]  # of the inputs, and of their gradients
    send_shapes: list[tuple[int, ...]]  # of the outputs, and of their gradients
    is_async: bool = False  # wait for a transfer where its value is needed, not at once


class Loop:
    """One training step of this rank.

    Args:
        forward_step_func: see :func:`common.forward_step`; ``dtype`` and ``disable_autocast``, too.
            ``dtype``, or float32, is also that of what travels.
        batch: all micro-batches, one after the other.
        models: this rank's parts of the model.
        wire: None where there is one stage, whose DDP looks after itself.
        forward_only: keep nothing for a backward.
        grad_scaler: see :func:`common.backward_step`.
        deallocate_pipeline_outputs: free outputs that have been sent.
    """

    def __init__(
        self,
        forward_step_func: common.FwdStepFunc,
        batch: common.Batch,
        models: Sequence[nn.Module],
        wire: Wire | None = None,
        *,
        forward_only: bool,
        dtype: torch.dtype | None = None,
        grad_scaler: Any = None,
        disable_autocast: bool = False,
        deallocate_pipeline_outputs: bool = False,
    ) -> None:
        self.step_func, self.batch, self.models = forward_step_func, batch, models
        self.is_pipelined, self.wire = wire is not None, wire or Wire([], [])
        self.forward_only, self.grad_scaler = forward_only, grad_scaler
        self.autocast, self.wire_dtype = (dtype, disable_autocast), dtype or torch.float32
        self.deallocates = deallocate_pipeline_outputs
        self.losses: list[Any] = []
        # By direction, micro-batch and chunk:
        self._inputs: dict[Key, list[Tensor | None]] = {}
        self._values: dict[Key, list[Tensor | None]] = {}  # outputs, and gradients of inputs
        self._received: dict[Key, list[FutureTensor]] = {}
        self._under_way: tuple[Transfers, list[Tensor | None]] | None = None

    def run(self, actions: Iterable[Action], microbatches: int) -> list[Any]:
        """Carry out the actions; returns what the losses' functions have reduced so far."""
        if self.is_pipelined:
            self._agree(microbatches)
        has_loss = self.forward_only or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        if self.grad_scaler is not None and not has_loss:
            # torch's scalers refuse to unscale gradients before they have scaled anything.
            self.grad_scaler.scale(torch.zeros((), device=device()))
        try:
            for is_transfer, group in itertools.groupby(actions, lambda a: a.peer is not None):
                if is_transfer:
                    self._transfer(list(group))
                    continue
                for action in group:
                    with _named(action):
                        if action.kind is Kind.FORWARD:
                            self._forward(action)
                        else:
                            self._backward(action, is_last=action.microbatch == microbatches - 1)
            self._settle()
        finally:
            if len(self.models) > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(0)
        return self.losses

    def _forward(self, action: Action) -> None:
        key, model = action[1:4], self._model(action)
        inputs = [future.get() for future in self._received.pop(key, [])] or [None]
        batch = get_kth_microbatch(self.batch, action.microbatch)
        # Several forwards may come before a backward, which DDP cannot tell apart: it is to reduce
        # nothing until it is told so in the last backward.
        waits = self.is_pipelined and isinstance(model, DistributedDataParallel)
        held_back: Any = model.no_sync if waits else contextlib.nullcontext
        with held_back():
            outputs = common.forward_step(
                self.step_func, batch, model, inputs, self.losses, *self.autocast
            )
        if not self.forward_only:
            self._inputs[key] = inputs
        if not (self.forward_only and parallel_state.is_pipeline_last_stage()):
            self._values[key] = outputs

    def _backward(self, action: Action, is_last: bool) -> None:
        model, key = self._model(action), (Kind.FORWARD, action.microbatch, action.chunk)
        inputs, outputs = self._inputs.pop(key), self._values.pop(key)
        grads = [future.get() for future in self._received.pop(action[1:4], [])] or [None]
        if is_last and self.is_pipelined and isinstance(model, DistributedDataParallel):
            roots = list(_find_tensors(outputs)) if model.find_unused_parameters else []
            model.reducer.prepare_for_backward(roots)  # as torch's own pipelines do
        result = common.backward_step(
            inputs,
            outputs,
            grads,
            get_model_type(common.inner_model(model)),
            grad_scaler=self.grad_scaler,
            deallocate_pipeline_outputs=self.deallocates,
        )
        if inputs[0] is not None:
            self._values[action[1:4]] = result

    def _model(self, action: Action) -> nn.Module:
        if len(self.models) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(action.chunk)
        return self.models[action.chunk]

    def _transfer(self, actions: Sequence[Action]) -> None:
        """Begin transfers, all at once; those before have ended then."""
        self._settle()
        messages: list[Message] = []
        sent: list[Tensor | None] = []
        begun: list[tuple[Key, list[Tensor]]] = []
        for action in actions:
            if action.kind is Kind.SEND:
                messages += self._outgoing(action, sent)
            else:
                buffers = self._buffers(action)
                messages += self._messages(action, [buffer.detach() for buffer in buffers])
                begun.append((action[1:4], buffers))
        transfers = Transfers(messages)
        self._under_way = transfers, sent
        for key, buffers in begun:
            self._received[key] = [FutureTensor(buffer, transfers.wait) for buffer in buffers]
        if not self.wire.is_async:
            self._settle()

    def _settle(self) -> None:
        """Wait for the transfers that are under way, and free the outputs that were sent."""
        if self._under_way is not None:
            transfers, sent = self._under_way
            self._under_way = None
            transfers.wait()
            common.free_output_tensor(sent, self.deallocates)

    def _shapes(self, action: Action) -> list[tuple[int, ...]]:
        """Of what an action transfers: this stage's inputs, or its outputs, or their gradients."""
        is_input = (action.kind is Kind.RECV) == (action.what is Kind.FORWARD)
        return self.wire.recv_shapes if is_input else self.wire.send_shapes

    def _outgoing(self, action: Action, sent: list[Tensor | None]) -> list[Message]:
        """The messages of a send; ``sent`` gets the output, which can be freed afterwards."""
        keeps = action.what is Kind.FORWARD and not self.forward_only
        values = self._values[action[1:4]] if keeps else self._values.pop(action[1:4])
        sent += values[:1] if keeps else []
        tensors = []
        for value, shape in zip(values, self._shapes(action), strict=True):
            if value is None:  # nothing depends on this input
                value = torch.zeros(shape, dtype=self.wire_dtype, device=device())
            tensors.append(outgoing(value, shape, self.wire_dtype, self._what(action)))
        return self._messages(action, tensors)

    def _buffers(self, action: Action) -> list[Tensor]:
        needs_grad = action.what is Kind.FORWARD and not self.forward_only
        options: dict[str, Any] = {"dtype": self.wire_dtype, "device": device()}
        return [
            torch.empty(shape, requires_grad=needs_grad, **options)
            for shape in self._shapes(action)
        ]

    def _messages(self, action: Action, tensors: Sequence[Tensor]) -> list[Message]:
        assert action.peer is not None  # it is a transfer
        group = parallel_state.get_pipeline_model_parallel_group()
        peer, what = dist.get_global_rank(group, action.peer), self._what(action)
        return [Message(action.kind is Kind.SEND, tensor, peer, what) for tensor in tensors]

    def _what(self, action: Action) -> str:
        chunk = f" of chunk {action.chunk}" if len(self.models) > 1 else ""
        return f"{NAMES[action.what]} of micro-batch {action.microbatch}{chunk}"

    def _agree(self, microbatches: int) -> None:
        """Raise ``RuntimeError`` on all stages if their arguments do not fit together."""
        facts = {
            "micro-batches": microbatches,
            "chunks": len(self.models),
            "forward_only": self.forward_only,
            "dtype": str(self.wire_dtype),
        }
        mine = json.dumps([facts, self.wire.recv_shapes, self.wire.send_shapes])
        text = bytearray(mine.ljust(HEADER_BYTES).encode())
        header = torch.frombuffer(text, dtype=torch.uint8).to(device())
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        gathered = [torch.empty_like(header) for _ in range(stages)]
        with lost_peer("comparing its arguments with those of the other stages"):
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.all_gather(gathered, header, group=group)
        every = [json.loads(bytes(other.tolist())) for other in gathered]
        for stage, (before, after) in enumerate(itertools.pairwise(every), 1):
            if before[0] != after[0] or before[2] != after[1]:
                raise RuntimeError(
                    f"pipeline stage {stage - 1} has {before[0]} and sends tensors of shapes "
                    f"{before[2]}, but stage {stage} has {after[0]} and expects shapes {after[1]}"
                )


@contextlib.contextmanager
def _named(action: Action) -> Iterator[None]:
    """Have the traceback of a user's error say which stage and micro-batch it is of."""
    try:
        yield
    except Exception as error:
        if sys.version_info >= (3, 11):
            stage = parallel_state.get_pipeline_model_parallel_rank()
            error.add_note(
                f"in the {action.kind.value} of micro-batch {action.microbatch}, "
                f"chunk {action.chunk}, on pipeline stage {stage}"
            )
        raise
