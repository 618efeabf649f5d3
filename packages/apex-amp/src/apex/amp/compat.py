"""Questions about tensors whose answers once depended on the version of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def variable_is_tensor() -> bool:
    """Whether a ``Variable`` is a tensor: since torch 0.4 it is."""
    return True


def tensor_is_variable() -> bool:
    """Whether the class of tensors is ``Variable``: it is not."""
    return False


def tensor_is_float_tensor() -> bool:
    """Whether the class of tensors is ``FloatTensor``: since torch 0.4 it is not."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Whether ``x`` is a tensor."""
    return isinstance(x, torch.Tensor)


def is_floating_point(x: Any) -> bool:
    """Whether ``x`` is a tensor of a floating-point dtype."""
    return is_tensor_like(x) and x.is_floating_point()


def scalar_python_val(x: Any) -> Any:
    """The number in a tensor of one element, or at the start of a sequence."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Those of ``attrs`` that ``module`` has."""
    return [name for name in attrs if hasattr(module, name)]
