"""Errors that several modules raise: of kernels that cannot be built, and of what none takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # building a wheel without kernels has no torch
    import torch


class BuildError(RuntimeError):
    """A kernel library is missing, cannot be built here, or cannot be loaded.

    The message names the package, the op and the device, gives the reason and says what to do.
    """


def check_is_no_module(name: str, params: Any) -> None:
    """Raise TypeError where an optimizer is given a module instead of its parameters."""
    import torch

    # ModuleList and the like are iterable: torch's optimizers say what is wrong with their items.
    if isinstance(params, torch.nn.Module) and not hasattr(params, "__iter__"):
        kind = type(params).__name__
        raise TypeError(f"{name}: params is a {kind}; pass its parameters: model.parameters().")


def check_is_no_text(owner: str, name: str, value: Any) -> None:
    """Raise TypeError where a hyper-parameter is text, as YAML's 1e-3 is."""
    if isinstance(value, str):
        raise TypeError(
            f"{owner}: {name} of a group must be a number, got {value!r}. It is text. (YAML reads "
            "1e-3 so: write 1.0e-3.)"
        )


def not_dense(name: str, argument: str, tensor: torch.Tensor) -> NotImplementedError:
    """The error for a tensor that has no plain memory, and how to get one that has."""
    kind, remedy = f"of layout {tensor.layout}", "to_dense"
    if tensor.is_quantized:
        kind, remedy = f"quantized ({tensor.dtype})", "dequantize"
    return NotImplementedError(
        f"{name}: {argument} is {kind}; kernels take dense tensors. Use {argument}.{remedy}()."
    )
