"""Casts that torch's autocast lacks on one device or all, and functions that amp refuses.

A function under O1 and O4 does the same on every device: what :mod:`apex.amp.lists` says.
Autocast's lists on CUDA nearly agree with that (docs: "Automatic Mixed Precision package", CUDA
op-specific behaviour). The first tables hold what CUDA lacks, too; the others hold what the CPU's
autocast lacks in comparison with CUDA's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch

from ..lists import functional_overrides
from .casts import HALVES, to_float32

# On every device: run in float32,
_FLOAT32_EVERYWHERE = (
    *("gelu", "grid_sampler", "ctc_loss.IntList", "ctc_loss.Tensor"),
    *("std", "std.dim", "std.correction", "var", "var.dim", "var.correction"),
)
# in the widest dtype among the arguments (autocast knows 16 bits of one kind and float32 only),
_WIDEST_EVERYWHERE = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add"),
    *("tensordot", "vdot"),
)
# in place, in the first argument's dtype,
_FIRST_EVERYWHERE = ("addmm_", "addmv_", "addbmm_", "baddbmm_")
# or not on 16-bit values, where the result could not be float32.
_NOT_IN_16_BITS = (
    *("acos_", "asin_", "cosh_", "erfinv_", "exp_", "expm1_", "log_", "log10_", "log2_"),
    *("reciprocal_", "rsqrt_", "sinh_", "tan_", "pow_.Scalar", "pow_.Tensor"),
    *("cumprod_", "cumsum_", "renorm_"),
)
# On the CPU: run in the dtype of autocast. The recurrent ones need it as a whole: of float32 input
# autocast makes a mixture in which GRU returns float32 and LSTM in float16 fails.
_LOWER = (
    *("addmv", "addr", "mv", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"),
    *("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data"),
)
# In float32: they need its range or precision.
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
# In the widest dtype.
_WIDEST = ("cat", "stack", "index_copy")
# As they come: on CUDA they are in no list.
_AS_GIVEN = (
    *("max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_unpool2d", "max_unpool3d"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
)
_BANNED = "binary_cross_entropy"

Cast = Callable[[Any], Any]


@contextlib.contextmanager
def cast_rules(device_types: Sequence[str], allow_banned: bool) -> Iterator[None]:
    """Have torch's dispatcher follow the rules within the context."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for device_type in device_types:
            for name, kernel in _kernels(device_type, allow_banned):
                library.impl(name, kernel, f"Autocast{device_type.upper()}")
    yield
    del library  # torch then restores what was registered before


def _kernels(device_type: str, allow_banned: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield _BANNED, _banned(device_type, allow_banned)
    for name in _NOT_IN_16_BITS:
        yield name, _refusing(name, device_type)
    rules = [(_FLOAT32_EVERYWHERE, _float32), (_WIDEST_EVERYWHERE, _widest)]
    rules.append((_FIRST_EVERYWHERE, _first))
    if device_type == "cpu":
        rules += [(_LOWER, _lower), (_FLOAT32, _float32), (_WIDEST, _widest), (_AS_GIVEN, _none)]
    for names, make in rules:
        for name in names:
            yield name, _cast_first(name, make, device_type)


def _banned(device_type: str, allow_banned: bool) -> Callable[..., torch.Tensor]:
    op = torch.ops.aten.binary_cross_entropy.default
    without_autocast = _WithoutAutocast(device_type)
    # A script may have taken the function out of the list.
    text = dict(functional_overrides.BANNED_FUNCS).get(_BANNED)

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        values = (*args, *kwargs.values())
        if text is not None and not allow_banned and any(_is_half(value) for value in values):
            raise NotImplementedError(text)
        with without_autocast:
            if text is None:
                return op(*args, **kwargs)
            return op(*map(to_float32, args), **{k: to_float32(v) for k, v in kwargs.items()})

    return run


def _refusing(name: str, device_type: str) -> Callable[..., torch.Tensor]:
    op, without_autocast = _overload(name), _WithoutAutocast(device_type)
    function = name.partition(".")[0]

    def run(this: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_half(this):
            raise NotImplementedError(
                f"amp: {function} writes float32 results, but its tensor is {this.dtype}. "
                f"Use {function.rstrip('_')} without the underscore; or call .float() on the "
                "tensor; or, to compute in 16 bits, put `with amp.disable_casts():` around it."
            )
        with without_autocast:
            return op(this, *map(to_float32, args), **kwargs)

    return run


def _cast_first(
    name: str, make: Callable[[Sequence[Any]], Cast | None], device_type: str
) -> Callable[..., Any]:
    op, without_autocast = _overload(name), _WithoutAutocast(device_type)

    def run(*args: Any, **kwargs: Any) -> Any:
        cast = make((*args, *kwargs.values()))
        with without_autocast:
            if cast is None:
                return op(*args, **kwargs)
            return op(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})

    return run


def _overload(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _WithoutAutocast:
    """Autocast is off within; a kernel of its dispatch key is called only while it is on.

    A class, and one instance for all calls: ``contextlib`` costs more than most casts.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device_type, True)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALVES


def _float32(values: Sequence[Any]) -> Cast:
    return to_float32


def _lower(values: Sequence[Any]) -> Cast:
    return _caster(torch.get_autocast_dtype("cpu"))


def _first(values: Sequence[Any]) -> Cast:
    return _caster(values[0].dtype)


def _none(values: Sequence[Any]) -> None:
    """No cast."""


def _widest(values: Sequence[Any]) -> Cast | None:
    """The cast to the widest dtype, or None where there is one dtype: the usual case."""
    tensors = [t for v in values for t in (v if isinstance(v, (list, tuple)) else (v,))]
    dtypes = {t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return _caster(reduce(torch.promote_types, dtypes)) if len(dtypes) > 1 else None


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
