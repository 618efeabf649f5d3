"""The float32 copies that optimizers step on, and their way into and out of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..casting.casts import HALVES
from .sharding import local

# A 16-bit parameter's float32 value, as an attribute: the master, or what a checkpoint brought
# before there was one.
_EXACT = "_amp_exact"


def exact_value(param: torch.Tensor) -> torch.Tensor:
    """The float32 value that ``param`` is a rounding of, or a float32 copy if none is known.

    A known value counts only while it rounds to the parameter. If a script has changed the
    parameter in another way, the parameter's present value counts.
    """
    known = getattr(param, _EXACT, None)
    is_known = known is not None and known.shape == param.shape and known.device == param.device
    if is_known and torch.equal(local(known).detach().to(param.dtype), local(param).detach()):
        return known.detach()
    if known is not None and not known.requires_grad:  # a master gets its next value by a step
        delattr(param, _EXACT)
    return param.detach().float()


def make_master(param: torch.nn.Parameter) -> torch.Tensor:
    """A float32 leaf with the value and memory layout of a 16-bit parameter."""
    master = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
    master.copy_(exact_value(param)).requires_grad_()
    setattr(param, _EXACT, master)
    return master


class O2StateDictHook:
    """Makes ``state_dict()`` of a 16-bit module float32: masters' values where there are masters.

    Args:
        fn: makes a float32 tensor of a 16-bit one; default: :func:`exact_value`.
    """

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor] = exact_value) -> None:
        self.fn = fn

    def __call__(
        self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        for name, tensor in _own_tensors(module):
            entry = state_dict.get(prefix + name)
            if isinstance(entry, torch.Tensor) and entry.dtype in HALVES:
                # A clone: the checkpoint must not change with the next step.
                value = self.fn(tensor if entry.shape == tensor.shape else entry)
                state_dict[prefix + name] = value.detach().clone()


class ExactLoadHook:
    """Lets ``load_state_dict`` bring float32 values to the masters, not only their roundings.

    Args:
        masters: whether there are or may be masters. If not, nothing is kept beside the parameter,
            but assigned entries still get its dtype.
    """

    def __init__(self, masters: bool) -> None:
        self.masters = masters

    def __call__(
        self,
        module: torch.nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *unused: Any,
    ) -> None:
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            entry = state_dict.get(prefix + name)
            if param.dtype not in HALVES or not isinstance(entry, torch.Tensor):
                continue
            if entry.shape != param.shape or not entry.is_floating_point():
                continue  # load_state_dict is going to refuse it
            if is_assigned:  # the entry becomes the parameter: in the dtype of the level
                state_dict[prefix + name] = self._rounded(entry, param)
                continue
            if not self.masters:
                continue
            with torch.no_grad():
                master = getattr(param, _EXACT, None)
                if master is None:
                    exact = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
                    setattr(param, _EXACT, exact.copy_(entry))
                else:
                    master.copy_(entry)

    def _rounded(self, entry: torch.Tensor, like: torch.Tensor) -> torch.nn.Parameter:
        """A parameter in the dtype of ``like`` that knows the float32 value of ``entry``."""
        param = torch.nn.Parameter(entry.detach().to(like.dtype), like.requires_grad)
        if self.masters:
            setattr(param, _EXACT, entry.detach().float())
        return param


def add_checkpoint_hooks(model: torch.nn.Module, masters: bool) -> None:
    """Make checkpoints of a 16-bit model, and of each of its submodules, float32.

    Args:
        model: any module.
        masters: whether checkpoints hold the exact values of masters, too.
    """
    for module in model.modules():
        module.register_state_dict_post_hook(O2StateDictHook())
        module.register_load_state_dict_pre_hook(ExactLoadHook(masters))


def _own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    own.update(module.named_buffers(recurse=False, remove_duplicate=False))
    return list(own.items())
