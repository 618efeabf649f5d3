"""Turning a model's batch normalization into SyncBatchNorm, and groups to share statistics in."""

from __future__ import annotations

import copy

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from ..ddp.checks import require_process_group
from .module import SyncBatchNorm


def convert_syncbn_model(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    channel_last: bool = False,
    fuse_relu: bool = False,
) -> nn.Module:
    """Replace every batch normalization of a model by :class:`SyncBatchNorm`, in place.

    A converted module keeps hyper-parameters, mode and names; it shares the running statistics and
    the hooks of the original and has copies of weight and bias, so build optimizers afterwards.
    Weights that two batch norms share stay shared; weights that are shared with another kind of
    module must be tied again. InstanceNorm and Apex's own SyncBatchNorm stay as they are.

    Args:
        module: the model; may itself be a batch normalization.
        process_group: the ranks that share statistics; None is the world (for a
            ``torch.nn.SyncBatchNorm``, the group it has).
        channel_last: inputs are ``[*, C]``.
        fuse_relu: apply a ReLU after each.

    Returns:
        The model; another object only if ``module`` itself is converted.

    Raises:
        ValueError: a lazy module has no parameters yet, or a module is parametrized. Nothing is
            converted then.
    """
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and _is_lazy(child):
            raise ValueError(
                f"convert_syncbn_model: {name or 'module'} is a {type(child).__name__} without "
                "parameters yet. Run one forward first."
            )
        if isinstance(child, _BatchNorm) and is_parametrized(child):
            raise ValueError(
                f"convert_syncbn_model: {name or 'module'} is a {type(child).__name__}; expected "
                "batch norms with plain parameters. Convert first and register parametrizations "
                "on the result, or call torch.nn.utils.parametrize.remove_parametrizations."
            )
    return _convert(module, {}, {}, process_group, channel_last, fuse_relu)


# What a converted module has of its own, in the attributes of a module.
_CONTENTS = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


def _is_lazy(module: nn.Module) -> bool:
    return any(map(nn.parameter.is_lazy, [*module.parameters(), *module.buffers()]))


def _convert(
    module: nn.Module,
    converted: dict[int, nn.Module],
    clones: dict[int, nn.Parameter],
    process_group: dist.ProcessGroup | None,
    channel_last: bool,
    fuse_relu: bool,
) -> nn.Module:
    """Convert depth first; a module that appears twice is converted once."""
    if id(module) in converted:
        return converted[id(module)]
    result = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        group = process_group
        if group is None:
            group = getattr(module, "process_group", None)
        result = _as_sync_batch_norm(module, clones, group, channel_last, fuse_relu)
    converted[id(module)] = converted[id(result)] = result
    for name, child in module._modules.items():
        if child is not None:
            result._modules[name] = _convert(
                child, converted, clones, process_group, channel_last, fuse_relu
            )
    return result


def _as_sync_batch_norm(
    module: _BatchNorm,
    clones: dict[int, nn.Parameter],
    process_group: dist.ProcessGroup | None,
    channel_last: bool,
    fuse_relu: bool,
) -> SyncBatchNorm:
    result = SyncBatchNorm(module.num_features, affine=False, track_running_stats=False)
    # Everything else a module is: mode, hyper-parameters, a user's own attributes, and hooks, whose
    # dicts are shared: the handles that users hold remove from those.
    for name, value in vars(module).items():
        vars(result)[name] = copy.copy(value) if name in _CONTENTS else value
    for name, parameter in module._parameters.items():
        if parameter is not None:
            result._parameters[name] = clones.setdefault(id(parameter), _clone(parameter))
    result.process_group = process_group
    result.channel_last = channel_last
    result.fuse_relu = fuse_relu
    return result


def _clone(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """The group of ``group_size`` consecutive ranks that this rank is in; all ranks must call.

    Args:
        group_size: divides the world size; 0 stands for the world.

    Returns:
        The group, or None for the world.

    Raises:
        RuntimeError: no process group.
        ValueError: ``group_size`` is negative or does not divide the world size.
    """
    if group_size == 0:
        return None
    require_process_group("create_syncbn_process_group")
    world_size = dist.get_world_size()
    if group_size < 0 or world_size % group_size != 0:
        raise ValueError(
            f"create_syncbn_process_group: group_size must divide the world size {world_size} "
            f"(or be 0 for the world), got {group_size}."
        )
    own = None
    for first in range(0, world_size, group_size):
        ranks = list(range(first, first + group_size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own
