"""States of another model or of an option that the optimizers here do not have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .checkpoints import check_saved_tensor
from .momentum_launches import BUFFER


def check_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Raise ValueError, before anything is loaded, if the state is of another model or optimizer.

    Returns:
        The optimizer's parameters with the saved buffer of each that has one.
    """
    where = f"{optimizer.name}.load_state_dict"
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    sizes, saved_sizes = ([len(g["params"]) for g in gs] for gs in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(
            f"{where}: the optimizer has groups of {sizes} parameters, but the "
            f"state has groups of {saved_sizes}."
        )
    pairs = []
    for group, saved in zip(groups, saved_groups, strict=True):
        if saved.get("differentiable"):
            raise ValueError(
                f"{where}: the state has differentiable=True; {optimizer.name}'s step is "
                "not differentiable. Use torch.optim.SGD."
            )
        for param, index in zip(group["params"], saved["params"], strict=True):
            buffer = state_dict["state"].get(index, {}).get(BUFFER)
            if buffer is None:
                continue
            check_saved_tensor(optimizer.name, param, BUFFER, buffer)
            pairs.append((param, buffer))
    return pairs
