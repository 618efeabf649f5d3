"""Refuses models and optimizers that cannot be initialized, before anything is changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._amp_state import warn_or_err
from ..casting.casts import HALVES

# A class of a sibling wheel can only occur if its module was imported: amp need not import it.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("apex.parallel.distributed", "DistributedDataParallel"),
)
_FP16_OPTIMIZERS = (
    ("apex.fp16_utils", "FP16_Optimizer"),
    ("apex.fp16_utils.fp16_optimizer", "FP16_Optimizer"),
    ("apex.contrib.optimizers", "FP16_Optimizer"),
    ("apex.contrib.optimizers.fp16_optimizer", "FP16_Optimizer"),
)


def _imported(places: Sequence[tuple[str, str]]) -> tuple[type, ...]:
    """The classes among ``places`` whose modules have been imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in places)
    return tuple(item for item in found if isinstance(item, type))


def is_optimizer(value: Any) -> bool:
    """Whether amp can work with ``value``: a torch optimizer, or an ``apex.parallel.LARC``."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return isinstance(value, _imported([("apex.parallel.LARC", "LARC")]))


def inner_optimizer(value: Any) -> str:
    """What to say of an object that holds an optimizer, such as Lightning's or Accelerate's."""
    for name in ("optimizer", "optim", "_optimizer"):
        if is_optimizer(getattr(value, name, None)):
            return f" It wraps a {type(getattr(value, name)).__name__}: pass its `.{name}`."
    return ""


def check_models(models: Sequence[torch.nn.Module]) -> None:
    """Raise ``RuntimeError`` if a model is wrapped for data parallelism already."""
    wrappers = _imported(_WRAPPERS)
    for i, model in enumerate(models):
        if isinstance(model, wrappers):
            kind = type(model)
            raise RuntimeError(
                f"amp.initialize: models[{i}] is a {kind.__module__}.{kind.__qualname__}. Call "
                "amp.initialize on the model itself, and wrap what it returns."
            )


def check_scripts(models: Sequence[torch.nn.Module], properties: Any) -> None:
    """Raise ``RuntimeError`` if a level that casts models is to cast one that TorchScript has."""
    if not properties.cast_model_type:
        return
    for i, model in enumerate(models):
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                what = f"models[{i}]" + (f".{name}" if name else "")
                raise RuntimeError(
                    f"amp.initialize: {what} is compiled by torch.jit. At opt_level "
                    f"{properties.opt_level} amp casts its inputs and its checkpoints, in Python "
                    "that TorchScript does not run. Initialize the model before it is compiled, "
                    "and then compile it with torch.jit.trace; or use O1 or O4, which cast in "
                    "scripts, too."
                )


def check_params_fp32(models: Sequence[torch.nn.Module]) -> None:
    """Refuse floating-point parameters other than float32, and 16-bit buffers.

    Raises:
        RuntimeError: naming the tensor; with ``_amp_state.hard_override`` it is printed.
    """
    for model in models:
        for kind, name, tensor in _named_tensors(model):
            is_wrong = (
                tensor.dtype in HALVES
                if kind == "buffer"
                else tensor.is_floating_point() and tensor.dtype is not torch.float32
            )
            if is_wrong:
                warn_or_err(
                    f"amp.initialize: {kind} {name} of {type(model).__name__} is {tensor.dtype}; "
                    f"expected torch.float32. {_advice(tensor.dtype)}"
                )


def _advice(dtype: torch.dtype) -> str:
    if dtype in HALVES:
        return "Leave casts to amp: remove calls of .half() or .bfloat16() on the model."
    return (
        f"amp has no level for {dtype}: call model.float() first, and make the optimizer after it; "
        "or train this model without amp."
    )


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Refuse an ``FP16_Optimizer``, what is not an optimizer, and a second initialization.

    Raises:
        RuntimeError: an ``FP16_Optimizer``, or an optimizer that amp has processed before.
        TypeError: anything else that is not an optimizer.
    """
    for i, optimizer in enumerate(optimizers):
        if isinstance(optimizer, _imported(_FP16_OPTIMIZERS)):
            raise RuntimeError(
                f"amp.initialize: optimizers[{i}] is an FP16_Optimizer. amp makes master weights "
                "itself: pass the optimizer that it wraps."
            )
        if not is_optimizer(optimizer):
            raise TypeError(
                f"amp.initialize: optimizers[{i}] must be a torch.optim.Optimizer or an "
                f"apex.parallel.LARC, got {type(optimizer).__name__}.{inner_optimizer(optimizer)}"
            )
        if hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.initialize: optimizers[{i}] ({type(optimizer).__name__}) has been "
                "initialized before. Call amp.initialize once per optimizer; make a new one to "
                "start again."
            )
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise RuntimeError("amp.initialize: an optimizer occurs twice in optimizers.")
