"""How a flat buffer is reduced over all ranks, and what users may choose about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .lanes import Lane


@dataclass(frozen=True)
class ReductionOptions:
    """How a flat buffer is reduced.

    The buffer is multiplied by ``1 / predivide_factor`` before the sum over ranks and, with
    ``average``, by ``predivide_factor / divisor`` after it. ``always_fp32`` sums 16-bit
    buffers in float32; wider ones stay as they are.
    """

    divisor: int  # the number of ranks that have inputs
    average: bool = True
    predivide_factor: float = 1.0
    always_fp32: bool = False

    def exact_scale(self, dtype: torch.dtype, device: torch.device) -> float:
        """What gradients may be multiplied by on their way into a buffer, instead of the division.

        ``1 / divisor`` where that loses nothing; 1.0 otherwise, and on accelerators, whose backend
        divides as it sums. The same on all ranks.
        """
        n = self.divisor
        if device.type != "cpu" or dtype not in (torch.float32, torch.float64) or n & (n - 1):
            return 1.0
        return 1.0 / n if self.average and self.predivide_factor == 1.0 else 1.0


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

    def reduction(self, divisor: int | None = None) -> ReductionOptions:
        """Those that one flat buffer's reduction needs; the divisor is by default all ranks."""
        return ReductionOptions(
            divisor=dist.get_world_size() if divisor is None else divisor,
            average=self.gradient_average,
            predivide_factor=self.gradient_predivide_factor,
            always_fp32=self.allreduce_always_fp32,
        )


class FlatReduction:
    """The sum or average of one flat buffer over all ranks, in flight.

    Args:
        flat: 1-D buffer, consumed.
        scaled_count: how many leading elements the options' factors apply to. What follows is
            summed, or averaged by the backend: it keeps its sign.
        scale: what they have been multiplied by already.
    """

    def __init__(
        self,
        flat: Tensor,
        scaled_count: int,
        lane: Lane,
        options: ReductionOptions,
        scale: float = 1.0,
    ) -> None:
        if options.always_fp32 and flat.dtype.itemsize < 4:
            flat = flat.float()
        self._flat, self._scaled = flat, flat[:scaled_count]
        if options.predivide_factor != 1.0:
            self._scaled.mul_(1.0 / options.predivide_factor)
        # A division rounds once, a multiplication by a rounded 1/n twice.
        divisor = options.divisor / options.predivide_factor if options.average else 1.0
        self._divisor = divisor * scale
        operation = dist.ReduceOp.SUM
        if self._divisor != 1.0 and self._divisor == lane.ranks_averaged:
            operation, self._divisor = dist.ReduceOp.AVG, 1.0
        self._work = dist.all_reduce(flat, operation, group=lane.group, async_op=True)

    def wait(self) -> Tensor:
        """The reduced buffer; raises RuntimeError if another rank has failed."""
        self._work.wait()
        if self._divisor != 1.0:
            self._scaled.div_(self._divisor)
        return self._flat


def gradient_dtype(param: Tensor) -> torch.dtype:
    """The dtype of the gradients of ``param``, its own unless ``grad_dtype`` says otherwise."""
    return getattr(param, "grad_dtype", None) or param.dtype


def refuse_sparse(param: Tensor) -> None:
    """Raise NotImplementedError if the gradient of ``param`` is not dense."""
    if param.grad is not None and param.grad.layout != torch.strided:
        raise NotImplementedError(
            f"apex.parallel: a parameter of shape {list(param.shape)} has a gradient of layout "
            f"{param.grad.layout}; only dense gradients can be joined into buckets. Build "
            "embeddings with sparse=False."
        )
