"""The three lists of FusedAdamSWA and its saved states: checks before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._shared.native.errors import check_is_no_text
from .._shared.native.operands import FLOATS
from .swa_casts import wide

NAME = "FusedAdamSWA"
MOMENTS = ("exp_avg", "exp_avg_sq")
LISTS = ("params", "compute_params", "swa_params")


class Row(NamedTuple):
    """A parameter, the copy that the model computes with, and the average."""

    param: Tensor
    compute: Tensor
    average: Tensor

    def is_alike(self) -> bool:
        """Whether all three have one shape."""
        return self.param.shape == self.compute.shape == self.average.shape


def check_numbers(group: dict[str, Any]) -> None:
    """Raise ValueError for the first number of a group that is out of range, TypeError for text."""
    for name in ("lr", "eps", "weight_decay"):
        check_is_no_text(NAME, name, group[name])
        if not group[name] >= 0:
            raise ValueError(f"{NAME}: {name} must be >= 0, got {group[name]}.")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"{NAME}: betas must be in [0, 1), got {group['betas']}.")


def check_lists(lists: Sequence[Sequence[Tensor]]) -> None:
    """Raise ValueError or TypeError unless tensors of one index belong together, and are apart."""
    counts = [len(tensors) for tensors in lists]
    if len(set(counts)) > 1:
        raise ValueError(
            f"{NAME}: params, compute_params and swa_params must have as many tensors each, got "
            f"{counts[0]}, {counts[1]} and {counts[2]}."
        )
    seen: dict[int, str] = {}
    for index, row in enumerate(map(Row, *lists)):
        check_row(NAME, index, row, ())
        for name, tensor in zip(LISTS, row, strict=True):
            place = f"{name}[{index}]"
            if seen.setdefault(id(tensor), place) != place:
                raise ValueError(
                    f"{NAME}: {place} is {seen[id(tensor)]}; each needs memory of its own."
                )


def check_row(
    where: str,
    index: int,
    row: Row,
    others: Sequence[Tensor],
    error: type[Exception] = ValueError,
) -> None:
    """Raise unless a kernel can walk the tensors of a parameter together.

    Args:
        where: who asks; the message begins with it.
        others: nothing, or the gradient of the copy, and the moments.
        error: what is raised; for dtypes that no kernel takes, TypeError.
    """
    _check_dtypes(where, index, row)
    param, grads, moments = row.param, others[:1], others[1:]
    shape, device = param.shape, param.device
    if (
        all(t.shape == shape and t.device == device for t in (*row, *others))
        and all(t.is_contiguous() for t in (*row, *moments))
        and row.average.dtype == param.dtype
        and all(t.dtype == row.compute.dtype for t in grads)
        and all(t.dtype == wide(param.dtype) for t in moments)
    ):
        return
    names = (*LISTS, "gradient", *MOMENTS)
    found = "; ".join(f"{n}: {_describe(t)}" for n, t in zip(names, (*row, *others), strict=False))
    raise error(
        f"{where}: the tensors of index {index} must have one shape and device, and be contiguous; "
        "params and swa_params must have one dtype, the gradient that of its copy, and moments are "
        f"{wide(param.dtype)}. Got {found}."
    )


def _check_dtypes(where: str, index: int, row: Row) -> None:
    for name, tensor in zip(LISTS, row, strict=True):
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{where}: {name}[{index}] must be float64, float32, float16 or bfloat16, got "
                f"{tensor.dtype}."
            )


def _describe(tensor: Tensor) -> str:
    gaps = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}{gaps}"


def steps_of(params: Sequence[Tensor], decoupled: bool, saved: dict[str, Any]) -> list[int]:
    """The steps that each parameter has taken, by a saved state of ours, Apex's or torch's.

    Args:
        decoupled: whether the optimizer that it is for decouples the decay.

    Raises:
        ValueError: the state does not fit these parameters, or is one of another formula.
    """
    where, groups = f"{NAME}.load_state_dict", saved["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(params)]:
        raise ValueError(
            f"{where}: the optimizer has one group of {len(params)} parameters, but the state has "
            f"groups of {sizes}."
        )
    (group,) = groups
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise ValueError(f"{where}: the state is one of {name}=True, which is not supported.")
    of_torch = group.get("decoupled_weight_decay")  # Apex's do not say it
    if group.get("weight_decay") and of_torch not in (None, decoupled):
        raise ValueError(
            f"{where}: the state is one of torch's {'AdamW' if of_torch else 'Adam'} with weight "
            f"decay, but this optimizer {'decouples' if decoupled else 'does not decouple'} the "
            "decay: choose the other adam_math_mode."
        )
    counts = []
    for param, index in zip(params, group["params"], strict=True):
        state = saved["state"].get(index, {})
        for key in MOMENTS if state else ():
            shape = getattr(state.get(key), "shape", None)
            if shape != param.shape:
                raise ValueError(
                    f"{where}: state {key!r} must have the shape of its parameter, "
                    f"{list(param.shape)}, got {shape if shape is None else list(shape)}."
                )
        # States of Apex's optimizer have no step of their own.
        counts.append(int(state.get("step", group.get("step", 0)) if state else 0))
    return counts
