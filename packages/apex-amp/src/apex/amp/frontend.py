"""The entry points: ``initialize``, and the checkpoint of the loss scalers."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from ._amp_state import _amp_state, maybe_print
from ._initialize import _initialize
from ._process_optimizer import check_is_unprocessed
from .amp import replace_handle
from .casting.levels import O0, O1, O2, O3, O4, O5, Properties, opt_levels
from .gradients.scaler_state import parsed
from .handle import NoOpHandle
from .masters.checks import (
    check_models,
    check_optimizers,
    check_params_fp32,
    check_scripts,
)
from .masters.owners import check_masters_are_apart

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "Properties",
    "initialize",
    "load_state_dict",
    "opt_levels",
    "state_dict",
]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    hysteresis: int = 1,
) -> Any:
    """Prepare models and optimizers, in place, for training in mixed precision.

    ===== ============================== ============== ============== ==========
    level model and inputs               functions      master weights loss scale
    ===== ============================== ============== ============== ==========
    O0    float32                        as they are    no             1
    O1    float32                        autocast fp16  no             dynamic
    O2    float16, batch norms float32   as they are    yes            dynamic
    O3    float16                        as they are    no             1
    O4    float32                        autocast bf16  no             1
    O5    bfloat16, batch norms float32  as they are    yes            1
    ===== ============================== ============== ============== ==========

    Call it once per optimizer, after moving models to their devices and before wrapping them for
    data parallelism. A further call replaces the options and the casts of the one before.

    Args:
        models: a module, or a list of modules; float32 parameters, on any device.
        optimizers: a ``torch.optim.Optimizer``, an ``apex.parallel.LARC``, a list of them, or None.
        enabled: False: return everything as it is, and let the other functions of amp do nothing,
            but for optimizers that have master weights from an earlier call.
        opt_level: "O0" to "O5"; its defaults, above, are overridden by the next arguments.
        cast_model_type: floating-point dtype to cast models and inputs to; False for no cast.
        patch_torch_functions: cast arguments of functions; O1 and O4 only.
        keep_batchnorm_fp32: leave affine batch norms in float32 when casting a model; the strings
            "True" and "False" are accepted, too.
        master_weights: let optimizers step on float32 copies of 16-bit parameters.
        loss_scale: a positive number, a string with one, or "dynamic".
        cast_model_outputs: dtype of the floating-point outputs of models. Default: float32 if the
            model is cast; otherwise outputs stay as they are.
        num_losses: number of loss scalers; ``scale_loss(loss_id=...)`` chooses. 0 for models whose
            losses are not scaled by :func:`scale_loss`.
        verbosity: 0: print nothing; 1: options and skipped steps; 2: also every cast of O1 and O4.
        min_loss_scale, max_loss_scale: bounds of dynamic loss scaling; None is no bound.
        patch_torch_functions_type: float16 for O1, bfloat16 for O4; the default.
        hysteresis: number of overflows, without a clean iteration between them, after which a
            dynamic loss scale is reduced. Each overflow skips its step.

    Returns:
        ``models``, or ``(models, optimizers)`` if there are optimizers; each is a list if it was
        given as a list.

    A call that raises changes nothing.

    Raises:
        TypeError: an argument is of the wrong type.
        RuntimeError: unknown ``opt_level``, an option that does not go with it, a model that is
            wrapped for data parallelism or not in float32, an optimizer that was initialized
            before, two that share a parameter and have master weights (also one of an
            earlier call that is still in use), or cuDNN is switched off.
        ValueError: a loss scale or ``num_losses`` out of range.

    Source:
        Micikevicius et al., *Mixed Precision Training*, ICLR 2018.
    """
    overrides = {
        "enabled": enabled,
        "opt_level": opt_level,
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "patch_torch_functions_type": patch_torch_functions_type,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    with _amp_state.changing, _unchanged_on_error():
        _check_enabled(enabled)
        _amp_state.verbosity = verbosity
        _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
        if enabled:
            properties = _resolve(overrides)
            model_list, optimizer_list = _checked(models, optimizers)
            check_scripts(model_list, properties)
            check_masters_are_apart(optimizer_list, bool(properties.master_weights))
            _check_numbers(num_losses, hysteresis, cast_model_outputs)
            _initialize(
                *(model_list, optimizer_list, properties, num_losses, cast_model_outputs),
                hysteresis=hysteresis,
            )
            _amp_state.opt_properties = properties
        else:
            _disable()
    return models if optimizers is None else (models, optimizers)


@contextlib.contextmanager
def _unchanged_on_error() -> Iterator[None]:
    before = dict(_amp_state.__dict__)
    try:
        yield
    except BaseException:
        now = _amp_state.__dict__
        now.update(before)  # never empty: other threads may be training
        for name in now.keys() - before.keys():
            del now[name]
        raise


def _check_enabled(enabled: Any) -> None:
    if enabled not in (True, False):  # 0, 1 and numpy's booleans are equal to these
        raise TypeError(
            f"amp.initialize: enabled must be True or False, got {enabled!r}. The opt level is the "
            "fourth argument; give it by keyword: opt_level='O2'."
        )


def _disable() -> None:
    replace_handle(NoOpHandle())
    _amp_state.opt_properties = Properties()
    _amp_state.loss_scalers = []


def _resolve(overrides: dict[str, Any]) -> Properties:
    """The options of the opt level, overridden, and printed."""
    if not torch.backends.cudnn.enabled:
        raise RuntimeError(
            "amp.initialize: torch.backends.cudnn.enabled is False; amp relies on cuDNN for fast "
            "16-bit convolutions. Set it to True."
        )
    opt_level = overrides["opt_level"]
    if not isinstance(opt_level, str) or opt_level not in opt_levels:
        raise RuntimeError(
            f"amp.initialize: unknown opt_level {opt_level!r}; expected 'O0', 'O1', 'O2', 'O3', "
            "'O4' or 'O5'. The prefix is the letter O, not the digit zero."
        )
    level = opt_levels[opt_level]
    properties = level(Properties())
    _print(f"Selected optimization level {level.brief.rstrip()}\n{level.more}\n")
    _print("Defaults for this optimization level are:", properties)
    _print("Processing user overrides (additional keyword arguments that are not None)...")
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    _print("After processing overrides, optimization options are:", properties)
    if opt_level == "O0" and properties.loss_scale != 1.0:
        warnings.warn(
            f"amp.initialize: loss_scale={properties.loss_scale} at opt_level O0 does not help: "
            "float32 gradients need no loss scaling. Leave loss_scale out.",
            stacklevel=3,
        )
    return properties


def _print(text: str, properties: Properties | None = None) -> None:
    lines = [text]
    if properties is not None:
        lines += [f"{name:26} : {value}" for name, value in properties.options.items()]
    maybe_print("\n".join(lines), rank0=True)


def _checked(models: Any, optimizers: Any) -> tuple[list[torch.nn.Module], list[Any]]:
    """Both arguments as lists, after all checks that must precede any change."""
    if optimizers is None:
        optimizer_list = []
    else:
        optimizer_list = optimizers if isinstance(optimizers, list) else [optimizers]
    check_optimizers(optimizer_list)
    for optimizer in optimizer_list:
        check_is_unprocessed(optimizer)
    model_list = models if isinstance(models, list) else [models]
    for i, model in enumerate(model_list):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                "amp.initialize: models must be a torch.nn.Module or a list of them, got "
                f"{type(model).__name__}" + (f" at index {i}." if models is model_list else ".")
            )
    check_models(model_list)
    if not _amp_state.allow_incoming_model_not_fp32:
        check_params_fp32(model_list)
    return model_list, optimizer_list


def _check_numbers(num_losses: int, hysteresis: int, cast_model_outputs: Any) -> None:
    if not isinstance(hysteresis, int) or hysteresis < 1:
        raise ValueError(f"amp.initialize: hysteresis must be a positive int, got {hysteresis!r}.")
    if not isinstance(num_losses, int) or num_losses < 0:
        raise ValueError(f"amp.initialize: num_losses must be an int >= 0, got {num_losses!r}.")
    if cast_model_outputs is not None and not (
        isinstance(cast_model_outputs, torch.dtype) and cast_model_outputs.is_floating_point
    ):
        raise TypeError(
            "amp.initialize: cast_model_outputs must be a floating-point torch.dtype or None, got "
            f"{cast_model_outputs!r}."
        )


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state of all loss scalers, for a checkpoint.

    Args:
        destination: mapping to write to; default: a new one.

    Returns:
        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, "loss_scaler1": ...}``: plain
        numbers, so that ``torch.load(weights_only=True)`` reads it; with a ``hysteresis`` above 1
        also ``"overflows_left": int``. Empty if amp is not enabled.
    """
    if destination is None:
        destination = OrderedDict()
    for i, scaler in enumerate(getattr(_amp_state, "loss_scalers", [])):
        destination[f"loss_scaler{i}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
        if scaler._hysteresis > 1:
            destination[f"loss_scaler{i}"]["overflows_left"] = scaler._overflows_left
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Restore the loss scalers from :func:`state_dict`.

    Call it after ``amp.initialize`` with the opt level of the checkpoint. The best order is:
    initialize, load the model, the optimizer, and amp.

    Args:
        state_dict: entries of scalers that do not exist here are left out, with a message.

    Raises:
        RuntimeError: a key is not one of amp's; nothing is changed then.
        ValueError: an entry lacks a number, or has a wrong one; nothing is changed then.
    """
    scalers = getattr(_amp_state, "loss_scalers", [])
    entries = parsed(state_dict)
    if len(entries) != len(scalers):
        maybe_print(
            f"Warning: amp.load_state_dict: the checkpoint has {len(entries)} loss scalers, but "
            f"amp.initialize made {len(scalers)}."
        )
    for index, (loss_scale, unskipped, overflows_left) in entries.items():
        if index >= len(scalers):
            maybe_print(f"amp.load_state_dict: ignoring loss_scaler{index}: there is none here.")
            continue
        scalers[index]._loss_scale = loss_scale
        scalers[index]._unskipped = unskipped
        limit = scalers[index]._hysteresis
        left = limit if overflows_left is None else min(overflows_left, limit)
        scalers[index]._overflows_left = left
