"""Loads an optimizer's state under amp: for its masters, and only if it fits the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..casting.casts import HALVES
from .sharding import is_sharded

# Names of state that has its parameter's shape, in optimizers of these packages.
_ELEMENTWISE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "prev"),
    *("square_avg", "grad_avg", "acc_delta"),
}
# Options that tell optimizers apart. Without this check some would load another kind's state, and
# fill in whatever is missing.
_ALGORITHM = ("betas", "momentum", "alpha", "rho", "lambd", "etas")
_PACKAGES = ("torch.optim.", "apex.optimizers.")


def load_state_dict(self: Any, state_dict: dict[str, Any]) -> Any:
    """Load the state; where there are masters, in float32, without rounding to 16 bits on the way.

    Raises:
        ValueError: the state is that of another kind of optimizer, or of parameters of other shapes
            (which is checked for torch's and Apex's optimizers). After this or any other error the
            optimizer has the state that it had before.
    """
    if self._amp_stash.has_masters:
        self._amp_lazy_init()
    state, groups = self.state, self.param_groups
    params = [group["params"] for group in groups]
    _check_algorithm(self, state_dict.get("param_groups", ()))
    try:
        result = load_state(self, state_dict)
        _check_options(self, groups)
        _check_shapes(self)
    except BaseException as error:
        self.state, self.param_groups = state, groups
        for group, own in zip(groups, params, strict=True):
            group["params"] = own  # load_state() puts others there for a while
        if isinstance(error, LookupError):
            raise ValueError(
                f"amp: {type(self).__name__}.load_state_dict did not find {error}. It seems to be "
                "the state of another optimizer."
            ) from error
        raise
    return result


def _check_algorithm(self: Any, groups: Sequence[dict[str, Any]]) -> None:
    """The saved groups must have the options that tell optimizers apart, and no others."""
    # The optimizer itself refuses another number of groups.
    for g, (group, present) in enumerate(zip(groups, self.param_groups, strict=False)):
        found, expected = ([o for o in _ALGORITHM if o in d] for d in (group, present))
        if found != expected:
            _refuse(self, g, found, expected)


def _check_options(self: Any, before: Sequence[dict[str, Any]]) -> None:
    """All options must be there; the optimizer has filled in what older versions did not save."""
    defaults = getattr(self, "defaults", {})
    for g, (group, old) in enumerate(zip(self.param_groups, before, strict=True)):
        expected = [option for option in defaults if option in old]
        if any(option not in group for option in expected):
            _refuse(self, g, [option for option in group if option != "params"], expected)


def _refuse(self: Any, group: int, found: list[str], expected: list[str]) -> None:
    name = type(self).__name__
    raise ValueError(
        f"amp: {name}.load_state_dict: param_groups[{group}] has the options [{', '.join(found)}], "
        f"expected [{', '.join(expected)}]. It seems to be the state of another optimizer than "
        f"{name}."
    )


def _check_shapes(self: Any) -> None:
    name = type(self).__name__
    if not type(self).__module__.startswith(_PACKAGES):
        return  # in other packages these names may mean something else
    for g, group in enumerate(self.param_groups):
        for i, param in enumerate(group["params"]):
            for key, value in self.state.get(param, {}).items():
                if key not in _ELEMENTWISE or not isinstance(value, torch.Tensor):
                    continue
                if value.dim() and value.shape != param.shape:
                    raise ValueError(
                        f"amp: {name}.load_state_dict: {key} of param_groups[{g}]['params'][{i}] "
                        f"has shape {list(value.shape)}, but the parameter {list(param.shape)}. It "
                        "seems to be the state of another model's optimizer."
                    )


def load_state(self: Any, state_dict: dict[str, Any]) -> Any:
    """The original ``load_state_dict``, which keeps state of frozen 16-bit parameters in float32.

    The original casts state to its parameter's dtype. A frozen parameter has no master yet; it gets
    one when it is unfrozen, and its state moves to that master.
    """
    stash = self._amp_stash
    frozen = {id(p): p for _, p in stash.frozen if p.dtype in HALVES}
    stand_ins = {key: _float32_like(param) for key, param in frozen.items()}
    _replace_in_groups(self, stand_ins)
    try:
        return stash.originals["load_state_dict"](state_dict)
    finally:
        originals = {id(stand_in): frozen[key] for key, stand_in in stand_ins.items()}
        _replace_in_groups(self, originals)
        for key, stand_in in stand_ins.items():
            if stand_in in self.state:
                self.state[frozen[key]] = self.state.pop(stand_in)


def _float32_like(param: torch.Tensor) -> torch.Tensor:
    if is_sharded(param):
        return torch.empty_like(param, dtype=torch.float32)
    # load_state_dict reads its shape, dtype and device, not its values: they need no memory.
    return torch.empty((), dtype=torch.float32, device=param.device).expand(param.shape)


def _replace_in_groups(self: Any, replacements: dict[int, torch.Tensor]) -> None:
    for group in self.param_groups if replacements else ():
        group["params"] = [replacements.get(id(p), p) for p in group["params"]]
