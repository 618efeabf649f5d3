"""Which parameters of a group one call of a step operator can update, decided once and kept."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._gradients import check_dense, check_gradients, match_layouts
from .._sharding import is_sharded, local_tensors, placement_of

BUFFER = "momentum_buffer"  # torch.optim.SGD's name for it

_grad_of = operator.attrgetter("grad")
_dtype_of = operator.attrgetter("dtype")
_device_of = operator.attrgetter("device")


@dataclasses.dataclass
class Launch:
    """The lists of one call of a step; all have one length, or are empty where not needed."""

    optimizer: str  # for messages
    group: dict[str, Any]
    params: list[Tensor]  # what is updated: the model's parameters, or their float32 masters
    sources: list[Tensor]  # whose .grad is used
    copies: list[Tensor]  # the model's 16-bit parameters, beside their masters
    grads: list[Tensor]
    buffers: list[Tensor]
    is_first_run: bool
    is_new: bool  # of a division made in this step
    whole: Tensor | None = None  # the first parameter, where the lists are shards of DTensors

    def check(self) -> None:
        """Raise if a parameter or gradient cannot be used, before anything is changed."""
        check_gradients(f"{self.optimizer}.step", self.sources, self.grads)
        check_dense(f"{self.optimizer}.step", self.params)

    def on_shards(self) -> Launch:
        """The same with the shards of DTensors, which is all that a kernel sees of them."""
        if not is_sharded(self.params[0]):
            return self
        lists = ("params", "copies", "grads", "buffers")
        local = {name: local_tensors(getattr(self, name)) for name in lists}
        return dataclasses.replace(self, whole=self.params[0], **local)

    def match_gradients(self) -> bool:
        """Copy gradients whose memory is laid out differently; return whether there were any."""
        matched = match_layouts(self.sources, self.grads)
        differed = not _is_same(matched, self.grads)
        self.grads = matched
        return differed

    def conform_buffers(self, dtype_of: Callable[[Tensor], torch.dtype]) -> None:
        """Make buffers that are missing, or whose dtype, device or layout a checkpoint changed."""
        self.buffers = [
            buffer_like(param, buffer, dtype_of(param))
            for param, buffer in zip(self.params, self.buffers, strict=bool(self.buffers))
        ]

    def keep_buffers(self, state: dict[Tensor, Any]) -> None:
        """Make the buffers part of the state."""
        for param, buffer in zip(self.params, self.buffers, strict=bool(self.buffers)):
            state[param][BUFFER] = buffer


class GroupLaunches:
    """Divides a parameter group by device, dtypes and presence of a momentum buffer.

    The division holds until parameters, their dtype or device, or the pattern of missing gradients
    and buffers change. Gradients and buffers themselves are read anew in every step.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._lists: tuple[Sequence[Tensor | None], ...] = ()  # params, sources, copies
        self._traits: tuple[Any, ...] = ()
        self._divisions: list[tuple[list[int], bool]] = []  # (indices, is_first_run)

    def collect(
        self,
        group: dict[str, Any],
        state: dict[Tensor, Any],
        twins: dict[int, Tensor],
        use_model_grads: bool,
    ) -> list[Launch]:
        """The launches of one step.

        Args:
            group: a parameter group.
            state: the optimizer's.
            twins: the model's 16-bit parameter, by ``id`` of its float32 master.
            use_model_grads: take the gradients of those, not of the masters.
        """
        params = group["params"]
        copies = [twins.get(id(p)) for p in params] if twins else [None] * len(params)
        sources = params
        if use_model_grads and twins:
            sources = [p if c is None else c for p, c in zip(params, copies, strict=True)]
        grads = list(map(_grad_of, sources))
        has_momentum = group["momentum"] != 0
        buffers = _buffers(params, state) if has_momentum else [None] * len(params)
        traits = (
            has_momentum,
            list(map(_dtype_of, params)),
            list(map(_device_of, params)),
            [grad is None for grad in grads],
            [buffer is None for buffer in buffers],
        )
        lists = (params, sources, copies)
        is_new = traits != self._traits or not all(map(_is_same, lists, self._lists))
        if is_new:
            self._divide(lists, traits)
        lists = (*lists, grads, buffers)
        return [
            _launch(self._optimizer, group, lists, *division, is_new)
            for division in self._divisions
        ]

    def _divide(self, lists: tuple[Sequence[Tensor], ...], traits: tuple[Any, ...]) -> None:
        has_momentum, dtypes, devices, without_grad, without_buffer = traits
        chosen: dict[tuple, list[int]] = {}
        for i, (_, source, copy) in enumerate(zip(*lists, strict=True)):
            if without_grad[i]:
                continue
            copy_dtype = None if copy is None else copy.dtype
            is_first_run = has_momentum and without_buffer[i]
            kind = (devices[i], dtypes[i], placement_of(source), source.dtype, copy_dtype)
            key = (*kind, is_first_run)
            chosen.setdefault(key, []).append(i)
        self._divisions = [(indices, key[-1]) for key, indices in chosen.items()]
        self._lists = tuple(map(list, lists))
        self._traits = traits


def _is_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _buffers(params: list[Tensor], state: dict[Tensor, Any]) -> list[Tensor | None]:
    return [state[p].get(BUFFER) if p in state else None for p in params]


def buffer_like(param: Tensor, buffer: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The buffer in this dtype and its parameter's device and layout; a new one is not written."""
    if buffer is None:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    if (buffer.dtype, buffer.device, buffer.stride()) == (dtype, param.device, param.stride()):
        return buffer
    return torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(buffer)


def _launch(
    optimizer: str,
    group: dict[str, Any],
    lists: tuple[list, ...],
    indices: list[int],
    is_first_run: bool,
    is_new: bool,
) -> Launch:
    if len(indices) < len(lists[0]):
        lists = tuple([one[i] for i in indices] for one in lists)
    params, sources, copies, grads, buffers = lists
    if copies[0] is None:
        copies = []
    if group["momentum"] == 0:
        buffers = []
    return Launch(optimizer, group, params, sources, copies, grads, buffers, is_first_run, is_new)
