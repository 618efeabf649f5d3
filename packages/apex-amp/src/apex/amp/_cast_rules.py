"""Casts that autocast on the CPU lacks: those of autocast on CUDA, and Apex's banned function.

What a function does under O1 and O4 must not depend on the device. The tables are the entries of
CUDA's autocast lists (docs: "Automatic Mixed Precision package", CUDA op-specific behaviour) that
have no entry in the CPU's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch

# Run in the dtype of autocast. The recurrent ones need it as a whole: of float32 input the CPU's
# autocast makes a mixture in which GRU returns float32 and LSTM in float16 fails.
_LOWER = (
    *("addmv", "addr", "mv", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"),
    *("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data"),
)
# Run in float32: they need its range or precision.
_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("reciprocal", "rsqrt", "sinh", "softplus", "tan"),
    *("pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    *("softmax.int", "log_softmax.int", "logsumexp"),
    *("layer_norm", "group_norm", "rms_norm", "native_layer_norm", "cosine_similarity"),
    *("cumprod", "cumsum", "dist", "sum", "sum.dim_IntList", "renorm", "pdist"),
    *("norm.Scalar", "norm.ScalarOpt_dim", "frobenius_norm.dim", "nuclear_norm"),
    *("nuclear_norm.dim", "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
# Run in the widest dtype among their arguments.
_WIDEST = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add"),
    *("tensordot", "vdot"),
)
_BANNED = "binary_cross_entropy"
_BANNED_TEXT = (
    "amp does not work out-of-the-box with torch.nn.functional.binary_cross_entropy or "
    "torch.nn.BCELoss: a sigmoid computed in 16 bits rounds to 0 or 1, and its logarithm is "
    "infinite. Use BCEWithLogitsLoss on the values before the sigmoid; or have the sigmoid run in "
    'float32 with amp.register_float_function(torch, "sigmoid") before amp.initialize; or, if the '
    "16-bit values are known to be safe, call amp.init(allow_banned=True)."
)
_HALVES = (torch.float16, torch.bfloat16)

Cast = Callable[[Any], Any]


@contextlib.contextmanager
def cast_rules(device_types: Sequence[str], allow_banned: bool) -> Iterator[None]:
    """Have torch's dispatcher follow the rules within the context."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for device_type in device_types:
            banned = _banned(device_type, allow_banned)
            library.impl(_BANNED, banned, f"Autocast{device_type.upper()}")
        if "cpu" in device_types:
            for names, make in ((_LOWER, _lower), (_FLOAT32, _float32), (_WIDEST, _widest)):
                for name in names:
                    library.impl(name, _cast_first(name, make), "AutocastCPU")
    yield
    del library  # torch then restores what was registered before


def _banned(device_type: str, allow_banned: bool) -> Callable[..., torch.Tensor]:
    op = torch.ops.aten.binary_cross_entropy.default

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        values = (*args, *kwargs.values())
        if not allow_banned and any(_is_half(value) for value in values):
            raise NotImplementedError(_BANNED_TEXT)
        with _without_autocast(device_type):
            return op(*map(_to_float32, args), **{k: _to_float32(v) for k, v in kwargs.items()})

    return run


def _cast_first(name: str, make: Callable[[Sequence[Any]], Cast]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        cast = make((*args, *kwargs.values()))
        with _without_autocast("cpu"):
            return op(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})

    return run


@contextlib.contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    before = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALVES


def _to_float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _float32(values: Sequence[Any]) -> Cast:
    return _to_float32


def _lower(values: Sequence[Any]) -> Cast:
    return _caster(torch.get_autocast_dtype("cpu"))


def _widest(values: Sequence[Any]) -> Cast:
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return _caster(reduce(torch.promote_types, dtypes)) if dtypes else lambda value: value


def _caster(dtype: torch.dtype) -> Cast:
    """Cast floating-point tensors to ``dtype``; float64, which autocast leaves alone, is kept."""

    def cast(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [cast(item) for item in value]
        is_castable = (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
        )
        return value.to(dtype) if is_castable else value

    return cast
