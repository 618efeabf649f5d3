"""Applies an opt level to models and optimizers that have been checked."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ._amp_state import _amp_state
from ._process_optimizer import _process_optimizer
from .amp import init, replace_handle, route_cpu_float16
from .casting.autocast import device_types_in_use
from .casting.casts import applier, to_type
from .casting.forward import AmpForward
from .casting.levels import Properties
from .handle import NoOpHandle
from .masters.checks import check_models, check_optimizers, check_params_fp32
from .masters.convert import convert_network, convert_sharded_network
from .masters.exact import O2StateDictHook, add_checkpoint_hooks
from .masters.sharding import has_shards
from .scaler import LossScaler

__all__ = [
    "O2StateDictHook",
    "applier",
    "check_models",
    "check_optimizers",
    "check_params_fp32",
    "to_type",
]

_ENVIRONMENT_FLAG = "APEX_AMP_ENABLED"  # tells FP8 code such as Transformer Engine's that amp is on


def _initialize(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    properties: Properties,
    num_losses: int = 1,
    cast_model_outputs: torch.dtype | None = None,
    *,
    hysteresis: int = 1,
) -> None:
    """Cast and wrap models, fit optimizers, make loss scalers and the handle, in place."""
    scalers = [
        LossScaler(
            properties.loss_scale,
            min_loss_scale=_amp_state.min_loss_scale,
            max_loss_scale=_amp_state.max_loss_scale,
            hysteresis=hysteresis,
        )
        for _ in range(num_losses)
    ]
    _install_handle(models, properties)
    for model in models:
        if properties.cast_model_type:
            _cast_model(model, properties, cast_model_outputs)
        else:
            _wrap_forward(model, None, cast_model_outputs, bool(properties.patch_torch_functions))
    for optimizer in optimizers:
        if optimizer.state and properties.cast_model_type and not properties.master_weights:
            optimizer.load_state_dict(optimizer.state_dict())  # state in the parameters' dtype
        _process_optimizer(optimizer, properties)
    _amp_state.loss_scalers = scalers
    _amp_state.models = [weakref.ref(model) for model in models]


def _cast_model(
    model: torch.nn.Module, properties: Properties, output_dtype: torch.dtype | None
) -> None:
    dtype = properties.cast_model_type
    has_hooks = isinstance(model.forward, AmpForward) and model.forward.input_dtype is not None
    if properties.keep_batchnorm_fp32:
        (convert_sharded_network if has_shards(model) else convert_network)(model, dtype)
    else:
        # Not model.to(dtype): that makes real numbers of complex ones.
        model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    _wrap_forward(model, dtype, output_dtype or torch.float32, False)
    if not has_hooks:
        add_checkpoint_hooks(model, masters=bool(properties.master_weights))


def _wrap_forward(
    model: torch.nn.Module,
    input_dtype: torch.dtype | None,
    output_dtype: torch.dtype | None,
    casts: bool,
) -> None:
    is_wrapped = isinstance(model.forward, AmpForward)
    if casts or is_wrapped or input_dtype is not None or output_dtype is not None:
        AmpForward(model, input_dtype, output_dtype, casts).install()


def _install_handle(models: Sequence[torch.nn.Module], properties: Properties) -> None:
    """Replace the handle of an earlier initialization by this one's."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    devices = device_types_in_use(tensors)
    if properties.patch_torch_functions:
        handle = init(
            loss_scale=properties.loss_scale,
            patch_type=properties.patch_torch_functions_type or torch.float16,
            verbose=_amp_state.verbosity >= 2,
            device_types=devices,
        )
    else:
        handle = NoOpHandle()
        replace_handle(handle)
        if properties.cast_model_type is torch.float16 and "cpu" in devices:
            route_cpu_float16(handle)
    if properties.opt_level != "O0":
        os.environ[_ENVIRONMENT_FLAG] = "1"
        handle._undo.callback(os.environ.pop, _ENVIRONMENT_FLAG, None)
