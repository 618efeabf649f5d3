"""One bucket's all-reduce: pack gradients into a flat buffer, reduce, and hand them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .flat_tensors import flatten, unflatten
from .lanes import Lane, current_stream


@dataclass(frozen=True)
class ReductionOptions:
    """How a flat buffer is reduced.

    The buffer is multiplied by ``1 / predivide_factor`` before the sum over ranks and, with
    ``average``, by ``predivide_factor / world_size`` after it. ``always_fp32`` sums 16-bit
    buffers in float32; wider ones stay as they are.
    """

    world_size: int
    average: bool = True
    predivide_factor: float = 1.0
    always_fp32: bool = False


@dataclass
class Options:
    """What users may change at any time, and what pickles hold beside the module.

    The arguments of DistributedDataParallel, which says what they mean.
    """

    message_size: int
    delay_allreduce: bool
    prof: bool
    allreduce_trigger_params: list[Tensor] | None
    retain_allreduce_buffers: bool
    allreduce_always_fp32: bool
    num_allreduce_streams: int
    gradient_average: bool
    gradient_predivide_factor: float
    _disable_allreduce: bool = False  # gradients accumulate locally

    def reduction(self) -> ReductionOptions:
        """Those that one flat buffer's reduction needs."""
        return ReductionOptions(
            world_size=dist.get_world_size(),
            average=self.gradient_average,
            predivide_factor=self.gradient_predivide_factor,
            always_fp32=self.allreduce_always_fp32,
        )


class FlatReduction:
    """The sum or average of one flat buffer over all ranks, in flight.

    Args:
        flat: 1-D buffer, consumed.
        scaled_count: how many leading elements the options' factors apply to; what follows is
            summed as it is.
    """

    def __init__(
        self, flat: Tensor, scaled_count: int, lane: Lane, options: ReductionOptions
    ) -> None:
        if options.always_fp32 and flat.dtype.itemsize < 4:
            flat = flat.float()
        self._flat, self._scaled, self._options = flat, flat[:scaled_count], options
        if options.predivide_factor != 1.0:
            self._scaled.mul_(1.0 / options.predivide_factor)
        self._work = dist.all_reduce(flat, group=lane.group, async_op=True)

    def wait(self) -> Tensor:
        """The reduced buffer; raises RuntimeError if another rank has failed."""
        self._work.wait()
        if self._options.average:
            # A division rounds once, a multiplication by a rounded 1/n twice.
            self._scaled.div_(self._options.world_size / self._options.predivide_factor)
        return self._flat


class BucketReduction:
    """The reduction of one bucket of parameters' gradients, in flight.

    The buffer carries one more element per parameter: how many ranks have a new gradient for it.
    Therefore ranks may use different parameters. A rank without a gradient adds zeros, and leaves
    its parameter alone if that element says that no rank has a gradient. Only a rank without a
    gradient reads the element, so the others do not wait for the device.

    Args:
        params: the parameters of the bucket, whose gradients have one dtype and device.
        is_new: for each, whether this rank added to its gradient since the last reduction.
        after: accelerator streams that may still write the gradients.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        is_new: Sequence[bool],
        lane: Lane,
        options: ReductionOptions,
        after: Iterable[Any] = (),
    ) -> None:
        self._params, self._is_new, self._lane = params, is_new, lane
        self._numel = sum(param.numel() for param in params)
        self._home_stream = current_stream(params[0].device)
        with torch.no_grad(), lane.entered(after):
            pieces = [
                param.grad
                if has_grad(param)
                else torch.zeros_like(param, dtype=gradient_dtype(param))
                for param in params
            ]
            self._grad_dtype = pieces[0].dtype
            lane.keep_until_done(pieces)
            flat = flatten([*pieces, self._news_counts(pieces[0])])
            self._reduction = FlatReduction(flat, self._numel, lane, options)

    def _news_counts(self, like: Tensor) -> Tensor:
        if all(self._is_new):
            return like.new_ones(len(self._is_new))  # no copy from the host
        return torch.tensor(self._is_new, dtype=like.dtype, device=like.device)

    def finish(self, retain: bool) -> Tensor | None:
        """Wait, and write the result into the gradients.

        Args:
            retain: make the gradients views of the flat result instead of copying into them.

        Returns:
            With ``retain``, the flat result ``[sum of numel]`` in the dtype of the reduction.
            Where that is wider than the gradients', they are views of a cast copy.
        """
        with torch.no_grad(), self._lane.entered():
            flat = self._reduction.wait()
            values, counts = flat[: self._numel], flat[self._numel :]
            used = self._is_new if all(self._is_new) else [n != 0 for n in counts.tolist()]
            chosen = [i for i in range(len(used)) if used[i]]
            source = values.to(self._grad_dtype) if retain else values
            views = unflatten(source, self._params)
            self._write([self._params[i] for i in chosen], [views[i] for i in chosen], retain)
            if retain:
                self._hand_over(source, values)
            self._lane.mark_done()
        return values if retain else None

    def _write(self, params: list[Tensor], views: list[Tensor], retain: bool) -> None:
        if retain:
            for param, view in zip(params, views, strict=True):
                param.grad = view
            return
        for param in params:
            if param.grad is None:
                param.grad = torch.empty_like(param, dtype=self._grad_dtype)
                self._hand_over(param.grad)
        if params:
            torch._foreach_copy_([param.grad for param in params], views)

    def _hand_over(self, *tensors: Tensor) -> None:
        """Allocated on the lane's stream, from now on used where backward runs."""
        if self._lane.stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._home_stream)


def gradient_dtype(param: Tensor) -> torch.dtype:
    """The dtype of the gradients of ``param``, its own unless ``grad_dtype`` says otherwise."""
    return getattr(param, "grad_dtype", None) or param.dtype


def has_grad(param: Tensor) -> bool:
    """Whether ``param`` has a gradient; a sparse one is refused.

    Raises:
        NotImplementedError: the gradient is sparse.
    """
    if param.grad is None:
        return False
    if param.grad.layout != torch.strided:
        raise NotImplementedError(
            f"apex.parallel: a parameter of shape {list(param.shape)} has a gradient of layout "
            f"{param.grad.layout}; only dense gradients can be joined into buckets. Build "
            "embeddings with sparse=False."
        )
    return True
