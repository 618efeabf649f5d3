"""Reducer: averages gradients over all ranks when asked, with no hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .broadcast import broadcast_parameters
from .buckets import Bucket
from .checks import parameters_device, require_process_group
from .flat_tensors import extract_tensors, flat_dist_call, split_by_type
from .lanes import Lane
from .reduction import ReductionOptions


class Reducer:
    """Averages gradients over all ranks at each call of :meth:`reduce`.

    For training loops that decide themselves when to communicate; unlike
    :class:`DistributedDataParallel` it overlaps nothing with backward.

    Args:
        module_or_grads_list: a module, whose parameters are at once broadcast from rank 0; or
            a (nested) iterable of tensors, which :meth:`reduce` averages in place.

    Raises:
        RuntimeError: no process group, or ranks with different parameters.
        TypeError: neither a module nor an iterable of tensors.

    Example:
        >>> reducer = Reducer(model)
        >>> loss_function(model(images), labels).backward()
        >>> reducer.reduce()
        >>> optimizer.step()
    """

    __module__ = "apex.parallel.distributed"  # Apex's path

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        require_process_group("Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            broadcast_parameters(self.module, "Reducer")
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Replace every gradient (or tensor) by its average over ranks.

        If only some ranks have a gradient for a parameter, the others contribute zeros to the
        average. If no rank has one, the parameter keeps none.
        """
        if self.module is None:
            flat_dist_call([grad.detach() for grad in self.grads], dist.all_reduce)
            return
        params = self._params_to_reduce(list(self.module.parameters()))
        options = ReductionOptions(divisor=dist.get_world_size())
        for params_of_type in split_by_type(params).values():
            lane = Lane(dist.group.WORLD, None, params_of_type[0].device)
            bucket = Bucket(params_of_type)
            bucket.launch([param.grad is not None for param in params_of_type], lane, options)
            bucket.finish()

    def _params_to_reduce(self, params: list[Tensor]) -> list[Tensor]:
        """Those that require gradients, and frozen ones that have one left on some rank."""
        frozen = [param for param in params if not param.requires_grad]
        if not frozen:
            return params
        device = parameters_device(self.module, "Reducer")
        has_grad = [param.grad is not None for param in frozen]
        ranks_with = torch.tensor(has_grad, dtype=torch.int64, device=device)
        dist.all_reduce(ranks_with)
        pairs = zip(frozen, ranks_with.tolist(), strict=True)
        with_grad = {id(param) for param, count in pairs if count}
        return [param for param in params if param.requires_grad or id(param) in with_grad]
