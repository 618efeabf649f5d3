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
from .checks import check_recoverable
from .compute import gradients, normalize
from .formulas import LAYER_NORM, RMS_NORM, TABLE

_library = torch.library.Library("apex", "FRAGMENT")
fakes: dict[str, Callable[..., Any]] = {}  # the fake kernels, under the names that Apex's have
_LAYER = "Tensor weight, Tensor? bias, "
_RMS = "Tensor weight, "
_END = "int[] normalized_shape, float eps, bool memory_efficient=False"


def _forward(name: str, parameters: str, returns: str):
    return _define(f"{name}(Tensor input, {parameters}{_END}) -> {returns}")


def _backward(name: str, statistics: str, parameters: str, returns: str):
    return _define(
        f"{name}(Tensor grad_output, {statistics}, Tensor input_or_output, int[] normalized_shape,"
        f" {parameters}float eps, bool memory_efficient=False) -> {returns}"
    )


def _define(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Define an operator from the decorated function, which serves real and fake tensors.

    It raises where tangents may be wanted: torch gives operators without a formula zeros, silently,
    and an operator cannot see whether its input has a tangent.
    """
    name = schema.partition("(")[0]

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def operator(*arguments: Any, **options: Any) -> Any:
            if forward_ad._current_level >= 0:
                raise NotImplementedError(
                    f"apex::{name}: operators have no forward-mode derivative, but this call is "
                    "within torch.func.jvp, jacfwd, hessian or dual_level. Call the functions of "
                    "apex.normalization.fused_layer_norm, which have one."
                )
            return function(*arguments, **options)

        _library.define(schema)
        _library.impl(name, operator, "CompositeExplicitAutograd")
        # The function calls operators that have fake kernels.
        register_fake(_library, f"apex::{name}", operator)
        overload = getattr(torch.ops.apex, name).default
        TABLE[overload] = fakes[f"{name}_fake"] = operator
        overload.__doc__ = function.__doc__
        return overload

    return decorate


@_backward(
    "fused_layer_norm_affine_bwd", "Tensor? mean, Tensor invvar", _LAYER, "(Tensor, Tensor, Tensor)"
)
def fused_layer_norm_affine_bwd(
    grad_output, mean, invvar, input_or_output, normalized_shape, weight, bias, eps,
    memory_efficient=False,
):  # fmt: skip
    """Return dx in the saved tensor's dtype, and dweight and dbias in ``grad_output``'s."""
    given = input_or_output, (weight, bias), normalized_shape, eps, memory_efficient, True
    return gradients(LAYER_NORM, grad_output, (mean, invvar), *given)


@_backward("fused_layer_norm_bwd", "Tensor? mean, Tensor invvar", "", "Tensor")
def fused_layer_norm_bwd(
    grad_output, mean, invvar, input_or_output, normalized_shape, eps, memory_efficient=False
):
    """Return dx."""
    given = input_or_output, (None, None), normalized_shape, eps, memory_efficient, False
    return gradients(LAYER_NORM, grad_output, (mean, invvar), *given)[0]


@_backward("fused_rms_norm_affine_bwd", "Tensor invvar", _RMS, "(Tensor, Tensor)")
def fused_rms_norm_affine_bwd(
    grad_output, invvar, input_or_output, normalized_shape, weight, eps, memory_efficient=False
):
    """Return dx in the saved tensor's dtype, and dweight in ``grad_output``'s."""
    given = input_or_output, (weight,), normalized_shape, eps, memory_efficient, True
    return gradients(RMS_NORM, grad_output, (invvar,), *given)


@_backward("fused_rms_norm_bwd", "Tensor invvar", "", "Tensor")
def fused_rms_norm_bwd(
    grad_output, invvar, input_or_output, normalized_shape, eps, memory_efficient=False
):
    """Return dx."""
    given = input_or_output, (None,), normalized_shape, eps, memory_efficient, False
    return gradients(RMS_NORM, grad_output, (invvar,), *given)[0]


def _layer_forward(name: str, mixed: bool) -> Any:
    def forward(input, weight, bias, normalized_shape, eps, memory_efficient=False):
        """Return output, mean and invvar, which is ``1 / sqrt(var + eps)``."""
        return normalize(name, LAYER_NORM, input, (weight, bias), normalized_shape, eps, mixed)

    return _forward(f"{name}_fwd", _LAYER, "(Tensor, Tensor, Tensor)")(forward)


def _rms_forward(name: str, mixed: bool) -> Any:
    def forward(input, weight, normalized_shape, eps, memory_efficient=False):
        """Return output and invvar, which is ``1 / sqrt(mean(input ** 2) + eps)``."""
        return normalize(name, RMS_NORM, input, (weight,), normalized_shape, eps, mixed)

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
    return normalize("fused_layer_norm", LAYER_NORM, input, (None, None), normalized_shape, eps)


@_forward("fused_rms_norm_fwd", "", "(Tensor, Tensor)")
def fused_rms_norm_fwd(input, normalized_shape, eps, memory_efficient=False):
    """Return output and invvar, which is ``1 / sqrt(mean(input ** 2) + eps)``."""
    return normalize("fused_rms_norm", RMS_NORM, input, (None,), normalized_shape, eps)


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


def _register_gradient(forward: Any, backward: Any, parameters: int) -> None:
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
        if ctx.efficient:
            statistics[:-1] = [None] * len(statistics[:-1])  # a mean
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
for _op, *_facts in (
    (fused_layer_norm_affine_fwd, fused_layer_norm_affine_bwd, 2),
    (fused_layer_norm_affine_mixed_dtypes_fwd, fused_layer_norm_affine_bwd, 2),
    (fused_layer_norm_fwd, fused_layer_norm_bwd, 0),
    (fused_rms_norm_affine_fwd, fused_rms_norm_affine_bwd, 1),
    (fused_rms_norm_affine_mixed_dtypes_fwd, fused_rms_norm_affine_bwd, 1),
    (fused_rms_norm_fwd, fused_rms_norm_bwd, 0),
):
    _register_gradient(_op, *_facts)
