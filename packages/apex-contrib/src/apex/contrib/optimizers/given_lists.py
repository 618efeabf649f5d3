"""What callers give to the deprecated optimizers: numbers, closures, lists; and their batches."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared.native.errors import check_is_no_module, check_is_no_text
from .._shared.native.writes import keep_from_tracing

Group = dict[str, Any]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class DeprecatedOptimizer(torch.optim.Optimizer):
    """The constructor and the state of a parameter.

    Attributes:
        _name: the class's, in errors.
        _not_negative: the hyper-parameters that must be ``>= 0``.

    Raises:
        TypeError: ``params`` is a module, or a hyper-parameter is text.
        ValueError: a hyper-parameter is out of range.
    """

    _name: str
    _not_negative: tuple[str, ...]

    def __init__(self, params: Any, **defaults: Any) -> None:
        check_is_no_module(self._name, params)
        keep_from_tracing(type(self))
        super().__init__(params, defaults)
        for group in self.param_groups:
            for name in self._not_negative:
                check_is_no_text(self._name, name, group[name])
                if group[name] is None or not group[name] >= 0:
                    raise ValueError(f"{self._name}: {name} must be >= 0, got {group[name]}.")
            if not all(0 <= beta < 1 for beta in group.get("betas", ())):
                raise ValueError(f"{self._name}: betas must be in [0, 1), got {group['betas']}.")

    def _state_of(self, param: Tensor, **counts: int) -> dict[str, Any]:
        """The state of a parameter: at first ``counts``, and moments of zeros."""
        state = self.state[param]
        if not state:
            moments = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
            state.update(**counts, **moments)
        return state


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a closure returns, which runs with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def by_group(owner: str, name: str, given: Any, groups: Sequence[Group]) -> list[list[Any]]:
    """``given`` as one list per group, each as long as the group's parameters.

    Args:
        given: None, a generator or flat list for the only group, or a list of them, one per group.

    Raises:
        RuntimeError: the lengths are others.
    """
    if given is None:
        return [[None] * len(group["params"]) for group in groups]
    if isinstance(given, types.GeneratorType) or not _is_nested(given):
        given = [given]
    lists = [list(tensors) for tensors in given]
    lengths = [len(tensors) for tensors in lists]
    expected = [len(group["params"]) for group in groups]
    if lengths != expected:
        raise RuntimeError(
            f"{owner}.step: {name} must have one list per group, of lengths {expected}, got lists "
            f"of lengths {lengths}."
        )
    return lists


def _is_nested(given: Iterable[Any]) -> bool:
    given = list(given)
    return bool(given) and all(not isinstance(item, Tensor) and item is not None for item in given)


def check_grad(owner: str, param: Tensor, grad: Tensor) -> None:
    """Raise RuntimeError unless ``grad`` is a dense gradient of ``param`` in a dtype of kernels."""
    if grad.is_sparse:
        raise RuntimeError(
            f"{owner}.step: a gradient is sparse, which is not supported; use "
            "torch.optim.SparseAdam, or sparse=False in the embedding."
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise RuntimeError(
            f"{owner}.step: a gradient is {list(grad.shape)} on {grad.device}, but its parameter "
            f"is {list(param.shape)} on {param.device}."
        )


def check_output(owner: str, param: Tensor, output: Tensor) -> None:
    """Raise RuntimeError unless the new ``param`` can be written to ``output``, rounded."""
    is_alike = output.stride() == param.stride() or (
        output.is_contiguous() and param.is_contiguous()
    )
    if (output.shape, output.device) != (param.shape, param.device) or not is_alike:
        raise RuntimeError(
            f"{owner}.step: an output parameter is {list(output.shape)} on {output.device} with "
            f"strides {output.stride()}, but its parameter is {list(param.shape)} on "
            f"{param.device} with strides {param.stride()}."
        )
    if output.dtype not in (*FLOATS, torch.uint8):
        raise RuntimeError(
            f"{owner}.step: output parameters must be float32, float16, bfloat16 or uint8, got "
            f"{output.dtype}."
        )


def checked_rows(
    owner: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
) -> list[tuple[Tensor, ...]]:
    """Parameters with their gradients, in one layout, and outputs where there are some.

    Raises:
        RuntimeError: tensors do not match, or a gradient is sparse.
    """
    rows = []
    for param, grad, output in zip(params, grads, outputs, strict=True):
        if grad is None:
            continue
        check_grad(owner, param, grad)
        if output is not None:
            check_output(owner, param, output)
        row = (param, match_layout(grad.detach(), param))
        rows.append(row if output is None else (*row, output))
    return rows


def fit_together(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
) -> bool:
    """Whether an operator may be given these lists, and checks the rest: dtypes, devices, layouts.

    It changes nothing where it refuses; then :func:`check_grad` and the others find out why.
    """
    return all(
        grad is not None
        and grad.layout is torch.strided
        and grad.shape == param.shape
        and (output is None or output.shape == param.shape)
        for param, grad, output in zip(params, grads, outputs, strict=True)
    )


def match_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` in the memory layout of ``like``: itself where it has that."""
    if tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous()):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.stride(), tensor.shape


class Batches:
    """Rows of tensors that one launch may take together: same dtypes, device and numbers."""

    def __init__(self) -> None:
        self._rows: dict[tuple, list[tuple[Tensor, ...]]] = {}

    def add(self, numbers: tuple, *row: Tensor) -> None:
        """Add the tensors of one parameter, to be stepped with ``numbers``."""
        key = (numbers, row[0].device, tuple(tensor.dtype for tensor in row))
        self._rows.setdefault(key, []).append(row)

    def __iter__(self):
        """Yield the numbers of each batch, and its lists."""
        for (numbers, *_), rows in self._rows.items():
            yield numbers, [list(column) for column in zip(*rows, strict=True)]

    def is_only(self, lists: Sequence[Sequence[Tensor]]) -> bool:
        """Whether these are one launch, of the very memory that ``lists`` have.

        What an operator said of such lists is its last word: to launch them again is of no use, and
        would step twice what it had written to before it failed.
        """
        rows = list(self._rows.values())
        return len(rows) == 1 and [list(map(_form, row)) for row in rows[0]] == [
            list(map(_form, row)) for row in zip(*lists, strict=True)
        ]

    @property
    def devices(self) -> set[torch.device]:
        """The devices of all rows."""
        return {device for _, device, _ in self._rows}


def raw_lists(op: str, tensor_lists: Sequence[Sequence[Tensor]], *names: str) -> list[list[Tensor]]:
    """The lists of a raw call; a name that ends in ``?`` is that of a list that may be left out.

    Raises:
        RuntimeError: another number of lists, or lists of different lengths. The operators check
            the tensors in them.
    """
    lists = [list(tensors) for tensors in tensor_lists]
    needed = sum(not name.endswith("?") for name in names)
    if not needed <= len(lists) <= len(names):
        wanted = ", ".join(name.replace("?", " (may be left out)") for name in names)
        raise RuntimeError(
            f"{op}: tensor_lists.size() != depth: expected lists of {wanted}; got {len(lists)}."
        )
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) > 1:
        raise RuntimeError(f"{op}: Size mismatch among tensor lists: their lengths are {lengths}.")
    return lists


def number_near(number: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A number or tensor of numbers as contiguous ``dtype``, at least ``[1]``, beside ``like``."""
    return torch.as_tensor(number, dtype=dtype, device=like.device).reshape(-1).contiguous()
