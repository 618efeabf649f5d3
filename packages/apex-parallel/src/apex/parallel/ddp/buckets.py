"""One bucket: the memory that gradients travel in, and their reduction over ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .lanes import Lane, current_stream
from .reduction import FlatReduction, ReductionOptions, gradient_dtype, refuse_sparse

LARGE_BYTES = 1 << 16  # of a gradient that is worth a copy of its own
MOST_KEPT_BYTES = 31 << 20  # glibc never learns to keep freed memory beyond 32 MiB
_LAYOUT, _HISTORY = attrgetter("layout"), attrgetter("_version", "requires_grad")


class Bucket:
    """The gradients of some parameters in one flat tensor, which is reduced as a whole.

    Each parameter has a slot in it. A gradient that autograd has just made is copied into its slot,
    and after the reduction the slot itself becomes ``param.grad``. A gradient that lies in its slot
    already is reduced where it is: that is so where users keep gradients and set them to zero. Any
    other gradient, such as a view of a buffer of the user's, is copied in and back.

    Behind the slots stands one more element per parameter: how many ranks have a new gradient for
    it. Therefore ranks may use different parameters. A rank without a gradient adds zeros, and
    leaves its parameter alone if that element says that no rank has a gradient. Only a rank without
    a new gradient reads the element, so the others do not wait for the device.

    Args:
        params: whose gradients have one dtype and device.
        strided: slots have the strides of their parameters, if those are dense. Otherwise, and by
            default, slots are contiguous. All ranks must choose alike.
        hand_over: slots may become gradients. If not, results are always copied back.
    """

    def __init__(
        self, params: Sequence[Tensor], strided: bool = False, hand_over: bool = False
    ) -> None:
        self.params, self.hand_over = params, hand_over
        self._dtype, self._device = gradient_dtype(params[0]), params[0].device
        self._numels = [param.numel() for param in params]
        self._numel = sum(self._numels)
        self._is_shared = [numel > 0 for numel in self._numels]  # its slot lies in the flat tensor
        # An empty tensor like a dense one has its strides.
        likes = [torch.empty_like(param, device="meta") for param in params]
        self._strides = [(like if strided else like.contiguous()).stride() for like in likes]
        sizes = [numel * self._dtype.itemsize for numel in self._numels]
        on_cpu = self._device.type == "cpu"
        self._large = [i for i, size in enumerate(sizes) if on_cpu and size >= LARGE_BYTES]
        self._all, self._none = [True] * len(params), [False] * len(params)
        self._flat: Tensor | None = None
        self._reduction: FlatReduction | None = None  # in flight
        self._moved: dict[int, Tensor] = {}  # by index, gradients that `early` moved and scaled
        self._moved_scale = 1.0

    def early(self, options: ReductionOptions) -> dict[int, Callable[[], None]]:
        """By ``id(param)``, what scales a large gradient as it arrives, and moves it to its slot.

        Both are cheapest while the gradient is in the cache, and the memory that it leaves serves
        the next one: 8 x Linear(1024) took 1.3 times as long with all copies at the launch.
        Nothing may be moved where somebody holds a former gradient.
        """
        self._moved = {}
        if self._flat is None or not self.hand_over:
            return {}
        self._moved_scale = options.exact_scale(self._dtype, self._device)
        act, indices = self._move, self._large
        if self._uses() != self._own_uses:
            act, indices = self._scale_in_place, [i for i in self._large if self._is_here(i)]
        return {id(self.params[i]): partial(act, i) for i in indices}

    def _is_here(self, index: int) -> bool:
        grad = self.params[index].grad
        return (
            grad is not None
            and grad.data_ptr() == self._places[index]
            and grad.stride() == self._strides[index]
        )

    def _scale_in_place(self, index: int) -> None:
        if self._is_here(index):
            self._slots[index].mul_(self._moved_scale)
            self._moved[index] = self.params[index].grad

    def _move(self, index: int) -> None:
        grad = self.params[index].grad
        if grad is not None and (grad.layout, *_HISTORY(grad)) == (torch.strided, 0, False):
            torch.mul(grad, self._moved_scale, out=self._slots[index])
            self._moved[index] = self.params[index].grad = self._slots[index].data

    def launch(
        self,
        is_new: Sequence[bool] | None,
        lane: Lane,
        options: ReductionOptions,
        after: Iterable[Any] = (),
    ) -> None:
        """Start the reduction.

        Args:
            is_new: by parameter, whether this rank added to its gradient, if it has one, since the
                last reduction. None stands for all.
            after: accelerator streams that may still write the gradients.

        Raises:
            NotImplementedError: a gradient is sparse. Nothing has started then.
        """
        grads = [param.grad for param in self.params]
        present = [grad for grad in grads if grad is not None]
        if set(map(_LAYOUT, present)) - {torch.strided}:
            for param in self.params:
                refuse_sparse(param)
        self._is_new = self._all
        if is_new is not None or len(present) < len(grads):
            pairs = zip(is_new or self._all, grads, strict=True)
            self._is_new = [new and grad is not None for new, grad in pairs]
        self._lane, self._home_stream = lane, current_stream(self._device)
        with torch.no_grad(), lane.entered(after):
            in_place = self._find_memory(grads, present)
            lane.keep_until_done(present)
            self._copy_in(grads, in_place)
            scale = options.exact_scale(self._dtype, self._device)
            self._scale(grads, scale)
            self._reduction = FlatReduction(self._flat, self._numel, lane, options, scale)
            # Found and made while others work. Slots' data are no views, which detach_() refuses.
            self._is_in_place = in_place is self._all and self._is_new is self._all
            self._fresh = self._which_are_fresh(grads, in_place)
            self._next = [slot.data for slot in self._slots] if self._fresh is self._all else []

    def _find_memory(
        self, grads: Sequence[Tensor | None], present: Sequence[Tensor]
    ) -> Sequence[bool]:
        """Have a flat tensor that may be written; returns which gradients lie in their slots."""
        in_place: Sequence[bool] = self._none
        if self._flat is not None and not self.hand_over:
            if self._uses() == self._own_uses:
                return in_place
        elif self._flat is not None:
            at = list(map(Tensor.data_ptr, present))
            if at == self._places and list(map(Tensor.stride, present)) == self._strides:
                in_place = self._all
            elif not self._ours.isdisjoint(at):
                rows = zip(grads, self._places, self._strides, strict=True)
                in_place = [
                    grad is not None and grad.data_ptr() == place and grad.stride() == stride
                    for grad, place, stride in rows
                ]
            if self._uses() == self._own_uses + sum(map(operator.and_, in_place, self._is_shared)):
                return in_place
        # Somebody holds a former gradient, which lies in the slots, and must not see it change.
        self._allocate()
        return self._none

    def _uses(self) -> int:
        """How many tensors share the memory."""
        return torch._C._storage_Use_Count(self._storage._cdata)

    def _allocate(self) -> None:
        length = self._numel + len(self.params)
        if self._device.type == "cpu":
            # Freed untouched, and costs nothing. After it glibc keeps the memory of freed gradients
            # (mallopt(3), M_MMAP_THRESHOLD); before, 8 x Linear(1024) had 7,000 page faults a step.
            size = min(length * self._dtype.itemsize, MOST_KEPT_BYTES)
            torch.empty(size, dtype=torch.uint8)
        self._flat = torch.empty(length, dtype=self._dtype, device=self._device)
        self._slots, start = [], 0
        for param, numel, stride in zip(self.params, self._numels, self._strides, strict=True):
            # An empty slot has memory of its own: it could not be known again by its address.
            share = self._flat.as_strided(param.shape, stride, start) if numel else None
            self._slots.append(self._flat.new_empty(param.shape) if share is None else share)
            start += numel
        self._counts = self._flat[self._numel :]
        self._places = list(map(Tensor.data_ptr, self._slots))
        self._ours = set(self._places) - {0}
        self._storage = self._flat.untyped_storage()
        self._own_uses = self._uses()

    def _which_are_fresh(
        self, grads: Sequence[Tensor | None], in_place: Sequence[bool]
    ) -> Sequence[bool]:
        """Which gradients autograd has just made, so that no buffer of a user's holds them."""
        if in_place is self._all or not self.hand_over:
            return self._none
        is_simple = self._is_new is self._all and in_place is self._none
        if is_simple and set(map(_HISTORY, grads)) == {(0, False)}:
            return self._all
        rows = zip(self._is_new, in_place, grads, strict=True)
        return [new and not here and _HISTORY(grad) == (0, False) for new, here, grad in rows]

    def _copy_in(self, grads: Sequence[Tensor | None], in_place: Sequence[bool]) -> None:
        self._kept: dict[int, Tensor] = {}
        if self._is_new is self._all:
            self._counts.fill_(1)  # no copy from the host
            if in_place is self._none:
                torch._foreach_copy_(self._slots, grads)
            if in_place is self._none or in_place is self._all:
                return
        else:
            counts = torch.tensor(self._is_new, dtype=self._dtype, device=self._device)
            self._counts.copy_(counts)
        rows = list(zip(self._slots, grads, in_place, self._is_new, strict=True))
        # If no rank has news of these after all, the sum of old values is not wanted.
        self._kept = {
            i: grad.clone() for i, (_, grad, here, new) in enumerate(rows) if here and not new
        }
        absent = [slot for slot, grad, *_ in rows if grad is None]
        if absent:
            torch._foreach_zero_(absent)
        pairs = [(slot, grad) for slot, grad, here, _ in rows if grad is not None and not here]
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))

    def _scale(self, grads: Sequence[Tensor | None], scale: float) -> None:
        """Multiply what was not multiplied when it was moved."""
        moved, self._moved = self._moved, {}
        if not moved:
            if scale != 1.0:
                self._flat[: self._numel].mul_(scale)
            return
        is_moved = [grad is not None and grad is moved.get(i) for i, grad in enumerate(grads)]
        for group, factor in ((False, scale), (True, scale / self._moved_scale)):
            rows = zip(self._slots, is_moved, strict=True)
            slots = [slot for slot, of_group in rows if of_group is group]
            if slots and factor != 1.0:  # for those moved: options have changed meanwhile
                torch._foreach_mul_(slots, factor)

    def launch_zeros(self, lane: Lane, options: ReductionOptions) -> FlatReduction:
        """Take part in the others' reduction with zeros, and change no gradient here."""
        length = self._numel + len(self.params)
        flat = torch.zeros(length, dtype=self._dtype, device=self._device)
        scale = options.exact_scale(self._dtype, self._device)
        return FlatReduction(flat, self._numel, lane, options, scale)

    def finish(self, retain: bool = False) -> Tensor | None:
        """Wait, and make the result the parameters' gradients.

        Args:
            retain: make all gradients slots, even where users hold what was there.

        Returns:
            With ``retain``, the flat result ``[sum of numel]`` in the dtype of the reduction.

        Raises:
            RuntimeError: another rank has failed.
        """
        with torch.no_grad(), self._lane.entered():
            result = self._reduction.wait()
            self._reduction = None
            if result is not self._flat:
                self._flat.copy_(result)
            self._write(retain)
            if self._lane.stream is not None:  # from now on used where backward runs
                self._flat.record_stream(self._home_stream)
                result.record_stream(self._home_stream)
            self._lane.mark_done()
        self._kept, self._next = {}, []
        return result[: self._numel] if retain else None

    def _write(self, retain: bool) -> None:
        if self._next:
            for param, alias in zip(self.params, self._next, strict=True):
                param.grad = alias
            return
        if self._is_in_place and not retain:
            grads = [param.grad for param in self.params]
            present = [grad for grad in grads if grad is not None]
            if list(map(Tensor.data_ptr, present)) == self._places:
                return  # the results are there already
        used = self._is_new if self._is_new is self._all else self._counts.tolist()
        targets, sources = [], []
        rows = zip(self.params, self._slots, self._fresh, used, strict=True)
        for i, (param, slot, fresh, count) in enumerate(rows):
            grad = param.grad
            if not count:
                if i in self._kept and grad is not None:
                    targets.append(grad)
                    sources.append(self._kept[i])
            elif retain or fresh or grad is None:
                param.grad = slot.data
            elif grad.data_ptr() != slot.data_ptr():
                targets.append(grad)
                sources.append(slot)
        if targets:
            torch._foreach_copy_(targets, sources)

    def abandon(self) -> None:
        """Give up a reduction that may still be in flight, and the memory that it may write."""
        if self._reduction is None:
            return
        self._reduction = None
        for param, place in zip(self.params, self._places, strict=True):
            if param.grad is not None and param.grad.data_ptr() == place:
                param.grad = param.grad.detach().clone()
        self._flat = None
