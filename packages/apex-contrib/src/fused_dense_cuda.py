"""Apex's extension module of dense layers: its positional signatures over this wheel's functions.

Importable only where the kernels can run, because callers take the import as that answer. Nothing
here has a gradient, and autocast changes nothing. Errors are those of :mod:`apex.fused_dense`.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from apex.contrib._ops import library
from apex.fused_dense import raw as _raw

library.require_for_import(__name__, "dense_epilogue")

__all__ = [
    "linear_bias_backward",
    "linear_bias_forward",
    "linear_gelu_linear_backward",
    "linear_gelu_linear_forward",
    "wgrad_gemm_accum_fp16",
    "wgrad_gemm_accum_fp32",
]


def linear_bias_forward(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``input @ weight.T + bias``: ``[..., in]``, ``[out, in]``, ``[out]`` to ``[..., out]``."""
    return _raw.dense("linear_bias_forward", input, weight, bias)


def linear_bias_backward(input: Tensor, weight: Tensor, d_output: Tensor) -> list[Tensor]:
    """Gradients of input, weight and bias, given that of the output."""
    return _raw.dense_gradients("linear_bias_backward", input, weight, d_output)


def linear_gelu_linear_forward(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> list[Tensor]:
    """Return GELU's output, the output, and GELU's input."""
    name = "linear_gelu_linear_forward"
    return _raw.gelu_dense(name, input, weight1, bias1, weight2, bias2)


def linear_gelu_linear_backward(
    input: Tensor,
    gelu_in: Tensor,
    output1: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    d_output2: Tensor,
) -> list[Tensor]:
    """Gradients of input, weight1, bias1, weight2 and bias2, given what the forward returned."""
    name = "linear_gelu_linear_backward"
    return _raw.gelu_dense_gradients(name, input, gelu_in, output1, weight1, weight2, d_output2)


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """An older place of ``fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32``."""
    _weight_gradient("wgrad_gemm_accum_fp32").wgrad_gemm_accum_fp32(input, d_output, d_weight)


def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """An older place of ``fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16``."""
    _weight_gradient("wgrad_gemm_accum_fp16").wgrad_gemm_accum_fp16(input, d_output, d_weight)


def _weight_gradient(name: str) -> ModuleType:
    try:
        import fused_weight_gradient_mlp_cuda
    except ImportError as error:
        raise RuntimeError(
            f"fused_dense_cuda.{name}: this function is in the package apex-parallel, which is not "
            "installed: pip install apex-parallel."
        ) from error
    return fused_weight_gradient_mlp_cuda
