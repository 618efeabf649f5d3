"""The ``...Function`` classes of Apex; autocast changes nothing, and all sizes take our kernels.

Their arguments are those of Apex's, ``memory_efficient`` among them, which Megatron looks for. What
is new is by keyword only.
"""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .checks import Shape
from .formulas import LAYER_NORM, RMS_NORM
from .functional import run_norm


class FusedLayerNormAffineFunction(NamedFunction):
    """Layer normalization with weight and bias; bias may be None."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
        *,
        zero_centered_gamma: bool = False,
    ) -> Tensor:
        given = input, (weight, bias), normalized_shape, eps, memory_efficient
        return run_norm(
            "fused_layer_norm_affine", LAYER_NORM, *given, False, zero_centered_gamma, casts=False
        )


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer normalization whose output has the dtype of weight and bias, whatever the input's."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
        *,
        zero_centered_gamma: bool = False,
    ) -> Tensor:
        given = input, (weight, bias), normalized_shape, eps, memory_efficient
        return run_norm(
            "mixed_dtype_fused_layer_norm_affine",
            LAYER_NORM,
            *given,
            True,
            zero_centered_gamma,
            casts=False,
        )


class FusedLayerNormFunction(NamedFunction):
    """Layer normalization without weight and bias."""

    @staticmethod
    def apply(
        input: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        given = input, (None, None), normalized_shape, eps, memory_efficient
        return run_norm("fused_layer_norm", LAYER_NORM, *given, casts=False)


class FusedRMSNormAffineFunction(NamedFunction):
    """RMS normalization with a weight."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float | None,
        memory_efficient: bool = False,
        *,
        zero_centered_gamma: bool = False,
    ) -> Tensor:
        given = input, (weight,), normalized_shape, eps, memory_efficient
        return run_norm(
            "fused_rms_norm_affine", RMS_NORM, *given, False, zero_centered_gamma, casts=False
        )


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS normalization whose output has the weight's dtype, whatever the input's."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float | None,
        memory_efficient: bool = False,
        *,
        zero_centered_gamma: bool = False,
    ) -> Tensor:
        given = input, (weight,), normalized_shape, eps, memory_efficient
        return run_norm(
            "mixed_dtype_fused_rms_norm_affine",
            RMS_NORM,
            *given,
            True,
            zero_centered_gamma,
            casts=False,
        )


class FusedRMSNormFunction(NamedFunction):
    """RMS normalization without weight."""

    @staticmethod
    def apply(
        input: Tensor,
        normalized_shape: Shape,
        eps: float | None,
        memory_efficient: bool = False,
    ) -> Tensor:
        given = input, (None,), normalized_shape, eps, memory_efficient
        return run_norm("fused_rms_norm", RMS_NORM, *given, casts=False)
