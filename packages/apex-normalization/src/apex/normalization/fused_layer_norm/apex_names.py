"""The ``...Function`` classes of Apex; autocast changes nothing, and all sizes take our kernels.

Their arguments are those of Apex's, ``memory_efficient`` among them, which Megatron looks for. What
is new is by keyword only.
"""

from __future__ import annotations

from torch import Tensor

from .._shared.native.named_functions import NamedFunction
from .functional import Shape, run_layer_norm, run_rms_norm


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
        name, options = "fused_layer_norm_affine", (memory_efficient, False, zero_centered_gamma)
        return run_layer_norm(
            name, input, weight, bias, normalized_shape, eps, *options, casts=False
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
        name = "mixed_dtype_fused_layer_norm_affine"
        options = (memory_efficient, True, zero_centered_gamma)
        return run_layer_norm(
            name, input, weight, bias, normalized_shape, eps, *options, casts=False
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
        return run_layer_norm(
            "fused_layer_norm",
            input,
            None,
            None,
            normalized_shape,
            eps,
            memory_efficient,
            casts=False,
        )


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
        name, options = "fused_rms_norm_affine", (memory_efficient, False, zero_centered_gamma)
        return run_rms_norm(name, input, weight, normalized_shape, eps, *options, casts=False)


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
        name = "mixed_dtype_fused_rms_norm_affine"
        options = (memory_efficient, True, zero_centered_gamma)
        return run_rms_norm(name, input, weight, normalized_shape, eps, *options, casts=False)


class FusedRMSNormFunction(NamedFunction):
    """RMS normalization without weight."""

    @staticmethod
    def apply(
        input: Tensor,
        normalized_shape: Shape,
        eps: float | None,
        memory_efficient: bool = False,
    ) -> Tensor:
        return run_rms_norm(
            "fused_rms_norm", input, None, normalized_shape, eps, memory_efficient, casts=False
        )
