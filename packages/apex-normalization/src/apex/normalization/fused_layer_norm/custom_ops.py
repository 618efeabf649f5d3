"""The operators ``torch.ops.apex.fused_*``, under the names and schemas that Apex registers.

They are autograd and checks in Python around the operators of ``ops.py``; a call of those costs
less. Each has a fake kernel and, if it is a forward, a gradient, which cannot be differentiated
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._shared.native.library import register_fake
from . import compute
from .checks import check_recoverable
from .formulas import TABLE

_library = torch.library.Library("apex", "FRAGMENT")
fakes: dict[str, Callable[..., Any]] = {}  # the fake kernels, under the names that Apex's have
_LAYER = "Tensor weight, Tensor? bias, "
_RMS = "Tensor weight, "
_END = "int[] normalized_shape, float eps, bool memory_efficient=False"


def _forward(name: str, parameters: str, returns: str):
    """Define ``apex::name`` from the decorated function, which serves real and fake tensors."""
    return _refusing_forward_mode(f"{name}(Tensor input, {parameters}{_END}) -> {returns}")


def _refusing_forward_mode(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Define an operator that raises where its tangents would be lost."""
    name, define = schema.partition("(")[0], _define(schema)

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def operator(*arguments: Any, **options: Any) -> Any:
            _refuse_forward_mode(name)
            return function(*arguments, **options)

        return define(operator)

    return decorate


def _refuse_forward_mode(name: str) -> None:
    """Raise where tangents may be wanted: torch gives operators without a formula zeros, silently.

    An operator cannot see whether its input has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    raise NotImplementedError(
        f"apex::{name}: operators have no forward-mode derivative, but this call is within "
        "torch.func.jvp, jacfwd, hessian or dual_level. Call the functions of "
        "apex.normalization.fused_layer_norm, which have one."
    )


def _backward(name: str, statistics: str, parameters: str, returns: str):
    return _refusing_forward_mode(
        f"{name}(Tensor grad_output, {statistics}, Tensor input_or_output, int[] normalized_shape,"
        f" {parameters}float eps, bool memory_efficient=False) -> {returns}"
    )


def _define(schema: str) -> Callable[[Callable[..., Any]], Any]:
    name = schema.partition("(")[0]

    def decorate(function: Callable[..., Any]) -> Any:
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        # The function calls operators that have fake kernels.
        register_fake(_library, f"apex::{name}", function)
        overload = getattr(torch.ops.apex, name).default
        TABLE[overload] = fakes[f"{name}_fake"] = function
        overload.__doc__ = function.__doc__
        return overload

    return decorate


def _statistics(dy: Tensor, saved: Tensor, from_output: bool, *statistics: Tensor | None):
    return compute.as_statistics(saved.dtype, dy.dtype, from_output, *statistics)


@_backward(
    "fused_layer_norm_affine_bwd", "Tensor? mean, Tensor invvar", _LAYER, "(Tensor, Tensor, Tensor)"
)
def fused_layer_norm_affine_bwd(
    grad_output, mean, invvar, input_or_output, normalized_shape, weight, bias, eps,
    memory_efficient=False,
):  # fmt: skip
    """Return dx in the saved tensor's dtype, and dweight and dbias in ``grad_output``'s."""
    mean, invvar = _statistics(grad_output, input_or_output, memory_efficient, mean, invvar)
    return compute.layer_norm_gradients(
        grad_output, input_or_output, weight, bias, mean, invvar, normalized_shape, eps,
        input_or_output.dtype, memory_efficient, True,
    )  # fmt: skip


@_backward("fused_layer_norm_bwd", "Tensor? mean, Tensor invvar", "", "Tensor")
def fused_layer_norm_bwd(
    grad_output, mean, invvar, input_or_output, normalized_shape, eps, memory_efficient=False
):
    """Return dx."""
    mean, invvar = _statistics(grad_output, input_or_output, memory_efficient, mean, invvar)
    return compute.layer_norm_gradients(
        grad_output, input_or_output, None, None, mean, invvar, normalized_shape, eps,
        input_or_output.dtype, memory_efficient, False,
    )[0]  # fmt: skip


@_backward("fused_rms_norm_affine_bwd", "Tensor invvar", _RMS, "(Tensor, Tensor)")
def fused_rms_norm_affine_bwd(
    grad_output, invvar, input_or_output, normalized_shape, weight, eps, memory_efficient=False
):
    """Return dx in the saved tensor's dtype, and dweight in ``grad_output``'s."""
    (invvar,) = _statistics(grad_output, input_or_output, memory_efficient, invvar)
    return compute.rms_norm_gradients(
        grad_output, input_or_output, weight, invvar, normalized_shape, eps, input_or_output.dtype,
        memory_efficient, True,
    )  # fmt: skip


@_backward("fused_rms_norm_bwd", "Tensor invvar", "", "Tensor")
def fused_rms_norm_bwd(
    grad_output, invvar, input_or_output, normalized_shape, eps, memory_efficient=False
):
    """Return dx."""
    (invvar,) = _statistics(grad_output, input_or_output, memory_efficient, invvar)
    return compute.rms_norm_gradients(
        grad_output, input_or_output, None, invvar, normalized_shape, eps, input_or_output.dtype,
        memory_efficient, False,
    )[0]  # fmt: skip


def _layer_forward(name: str, mixed: bool) -> Any:
    def forward(input, weight, bias, normalized_shape, eps, memory_efficient=False):
        """Return output, mean and invvar, which is ``1 / sqrt(var + eps)``."""
        return compute.in_input_dtype(
            input, *compute.layer_norm(name, input, weight, bias, normalized_shape, eps, mixed)
        )

    return _forward(f"{name}_fwd", _LAYER, "(Tensor, Tensor, Tensor)")(forward)


def _rms_forward(name: str, mixed: bool) -> Any:
    def forward(input, weight, normalized_shape, eps, memory_efficient=False):
        """Return output and invvar, which is ``1 / sqrt(mean(input ** 2) + eps)``."""
        return compute.in_input_dtype(
            input, *compute.rms_norm(name, input, weight, normalized_shape, eps, mixed)
        )

    return _forward(f"{name}_fwd", _RMS, "(Tensor, Tensor)")(forward)


fused_layer_norm_affine_fwd = _layer_forward("fused_layer_norm_affine", mixed=False)
"""Return output, mean and invvar, which is ``1 / sqrt(var + eps)``; weight and bias have the
input's dtype."""
fused_layer_norm_affine_mixed_dtypes_fwd = _layer_forward(
    "fused_layer_norm_affine_mixed_dtypes", mixed=True
)
"""The same; the output has the weight's dtype, which may differ from the input's."""
fused_rms_norm_affine_fwd = _rms_forward("fused_rms_norm_affine", mixed=False)
"""Return output and invvar, which is ``1 / sqrt(mean(input ** 2) + eps)``; the weight has the
input's dtype."""
fused_rms_norm_affine_mixed_dtypes_fwd = _rms_forward(
    "fused_rms_norm_affine_mixed_dtypes", mixed=True
)
"""The same; the output has the weight's dtype, which may differ from the input's."""


@_forward("fused_layer_norm_fwd", "", "(Tensor, Tensor, Tensor)")
def fused_layer_norm_fwd(input, normalized_shape, eps, memory_efficient=False):
    """Return output, mean and invvar, which is ``1 / sqrt(var + eps)``."""
    return compute.layer_norm("fused_layer_norm", input, None, None, normalized_shape, eps, False)


@_forward("fused_rms_norm_fwd", "", "(Tensor, Tensor)")
def fused_rms_norm_fwd(input, normalized_shape, eps, memory_efficient=False):
    """Return output and invvar, which is ``1 / sqrt(mean(input ** 2) + eps)``."""
    return compute.rms_norm("fused_rms_norm", input, None, normalized_shape, eps, False)


def _register_autograd(overload: Any, gradient: Any, setup_context: Any = None) -> None:
    """``torch.library.register_autograd``, which makes its autograd function at the first call.

    That function's class and dataclass take 0.5 ms, which an import does not wait for.
    """

    @functools.cache
    def torchs_kernel() -> Callable[..., Any]:
        from torch._library import autograd

        return autograd.make_autograd_impl(overload, autograd.Info(gradient, setup_context))

    def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
        return torchs_kernel()(keyset, *arguments, **options)

    name = overload.name().removeprefix("apex::")
    _library.impl(name, kernel, "Autograd", with_keyset=True)


def _register_gradient(forward: Any, backward: Any, parameters: int, has_mean: bool) -> None:
    """Differentiate ``forward`` with respect to the input and ``parameters`` by ``backward``."""

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        x, *weights = inputs[: 1 + parameters]
        ctx.shape, ctx.eps, ctx.efficient = inputs[1 + parameters :][:3]
        ctx.x_dtype = x.dtype
        if ctx.efficient and any(ctx.needs_input_grad):
            check_recoverable(forward.name(), weights[0] if weights else None)
        y, *statistics = output
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y if ctx.efficient else x, *weights, *statistics)

    def gradient(ctx: Any, dy: Tensor | None, *_: Any):
        rest = (None,) * 3
        if dy is None:
            return *(None,) * (1 + parameters), *rest
        saved, *tensors = ctx.saved_tensors
        weights, statistics = tensors[:parameters], tensors[parameters:]
        if has_mean and ctx.efficient:
            statistics[0] = None
        grads = backward(dy, *statistics, saved, ctx.shape, *weights, ctx.eps, ctx.efficient)
        dx, *dweights = grads if parameters else [grads]
        dweights = [d if w is not None else None for d, w in zip(dweights, weights, strict=True)]
        return dx.to(ctx.x_dtype), *dweights, *rest

    _register_autograd(forward, gradient, setup_context)


def _refuse_gradient(backward: Any) -> None:
    """Have ``backward`` refuse to be differentiated; torch would leave out the term, silently."""

    def gradient(ctx: Any, *_: Any):
        raise NotImplementedError(
            f"{backward.name()}: the gradient of this operator cannot be differentiated again. Use "
            "the functions and modules of apex.normalization, whose gradients can."
        )

    _register_autograd(backward, gradient)


for _op in (
    *(fused_layer_norm_affine_bwd, fused_layer_norm_bwd),
    *(fused_rms_norm_affine_bwd, fused_rms_norm_bwd),
):
    _refuse_gradient(_op)
for _op in (fused_layer_norm_affine_fwd, fused_layer_norm_affine_mixed_dtypes_fwd):
    _register_gradient(_op, fused_layer_norm_affine_bwd, parameters=2, has_mean=True)
for _op in (fused_rms_norm_affine_fwd, fused_rms_norm_affine_mixed_dtypes_fwd):
    _register_gradient(_op, fused_rms_norm_affine_bwd, parameters=1, has_mean=False)
_register_gradient(fused_layer_norm_fwd, fused_layer_norm_bwd, parameters=0, has_mean=True)
_register_gradient(fused_rms_norm_fwd, fused_rms_norm_bwd, parameters=0, has_mean=False)
