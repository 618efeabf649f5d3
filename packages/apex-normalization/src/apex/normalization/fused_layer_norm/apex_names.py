"""The ``...Function`` classes of Apex: ``apply`` and, for its signature, ``forward``.

Plain classes: torch's compiler and ``torch.func`` see the functions behind them. ``forward`` has
the arguments of Apex's, ``memory_efficient`` among them, which Megatron looks for. What is new is
by keyword only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .functional import Shape, run_layer_norm, run_rms_norm


class _Names:
    @classmethod
    def apply(cls, *arguments: Any, **options: Any) -> Tensor:
        """Call the function; autocast changes nothing."""
        return cls.forward(None, *arguments, **options)


class FusedLayerNormAffineFunction(_Names):
    """Layer normalization with weight and bias; bias may be None."""

    @staticmethod
    def forward(
        ctx: Any,
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
        return run_layer_norm(name, input, weight, bias, normalized_shape, eps, *options)


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer normalization whose output has the dtype of weight and bias, whatever the input's."""

    @staticmethod
    def forward(
        ctx: Any,
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
        return run_layer_norm(name, input, weight, bias, normalized_shape, eps, *options)


class FusedLayerNormFunction(_Names):
    """Layer normalization without weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        return run_layer_norm(
            "fused_layer_norm", input, None, None, normalized_shape, eps, memory_efficient
        )


class FusedRMSNormAffineFunction(_Names):
    """RMS normalization with a weight."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float | None,
        memory_efficient: bool = False,
        *,
        zero_centered_gamma: bool = False,
    ) -> Tensor:
        name, options = "fused_rms_norm_affine", (memory_efficient, False, zero_centered_gamma)
        return run_rms_norm(name, input, weight, normalized_shape, eps, *options)


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS normalization whose output has the weight's dtype, whatever the input's."""

    @staticmethod
    def forward(
        ctx: Any,
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
        return run_rms_norm(name, input, weight, normalized_shape, eps, *options)


class FusedRMSNormFunction(_Names):
    """RMS normalization without weight."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: Shape,
        eps: float | None,
        memory_efficient: bool = False,
    ) -> Tensor:
        return run_rms_norm("fused_rms_norm", input, None, normalized_shape, eps, memory_efficient)
