"""Layer and RMS normalization as modules, in place of ``torch.nn.LayerNorm`` and ``RMSNorm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .checks import Shape, as_shape, check_eps, mixed_options
from .formulas import LAYER_NORM, RMS_NORM
from .functional import (
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
    run_norm,
)

# What torch.fx.symbolic_trace records as one call, as it does torch.nn's norms.
for _function in (
    *("fused_layer_norm", "fused_layer_norm_affine", "mixed_dtype_fused_layer_norm_affine"),
    *("fused_rms_norm", "fused_rms_norm_affine", "mixed_dtype_fused_rms_norm_affine"),
):
    torch.fx.wrap(_function)


class _Norm(nn.Module):
    """What layer and RMS normalization share: shape, eps, options and the weight."""

    _called: str  # by messages of a call
    _is_mixed = False  # whether the result has the weight's dtype
    _takes_no_eps = False  # whether eps may be None
    zero_centered_gamma = False  # of modules in pickles of Apex's

    def __init__(
        self,
        normalized_shape,
        eps,
        elementwise_affine,
        memory_efficient,
        sequence_parallel_enabled,
        zero_centered_gamma,
        device,
        dtype,
    ):
        super().__init__()
        if eps is not None or not self._takes_no_eps:
            check_eps(type(self).__name__, eps)
        self.normalized_shape = torch.Size(as_shape(type(self).__name__, normalized_shape))
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.zero_centered_gamma = zero_centered_gamma
        self._add_parameter("weight", elementwise_affine, device, dtype)

    def _add_parameter(self, name: str, exists: bool, device, dtype) -> None:
        values = torch.empty(self.normalized_shape, device=device, dtype=dtype) if exists else None
        self.register_parameter(name, nn.Parameter(values) if exists else None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)  # also of `norm.weight = ...`
        self._mark_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of copies, whose parameters are new
        self._mark_parameters()

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)  # to_empty() makes new parameters, and so may to()
        self._mark_parameters()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # which may put other tensors into place
        self._mark_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one, or to zero if it is zero-centred, and the bias to zero."""
        if self.weight is not None:
            (nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_)(self.weight)
        if getattr(self, "bias", None) is not None:
            nn.init.zeros_(self.bias)

    def _mark_parameters(self) -> None:
        """Mark parameters that have no mark; torch copies no attributes of parameters.

        Megatron sums gradients of those that are marked over the tensor-parallel group.
        """
        enabled = getattr(self, "sequence_parallel_enabled", False)  # not in pickles of Apex's
        for parameter in self._parameters.values():
            if parameter is not None and not hasattr(parameter, "sequence_parallel_enabled"):
                parameter.sequence_parallel_enabled = enabled

    def __prepare_scriptable__(self):
        """Raise: torch.jit.script calls this first, and its own error would not say what to do."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}: torch.jit.script cannot compile this module, got an instance of {name}. Use "
            "torch.compile, torch.export or torch.jit.trace, or script a model with torch.nn's "
            "norms, which take the same state_dict."
        )

    def extra_repr(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return (
            f"{tuple(self.normalized_shape)}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}{centered}"
        )


class FusedLayerNorm(_Norm):
    r"""Layer normalization over the last dimensions that reads each row once.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \, w + b

    Args:
        normalized_shape: sizes of the last dimensions of the input that are normalized together;
            an int is one dimension.
        eps: added to the biased variance, in units of ``input ** 2``; ``>= 0``.
        elementwise_affine: whether there are weight and bias, else both are None.
        memory_efficient: keep the output instead of the input for the backward; see
            :func:`~apex.normalization.fused_layer_norm.fused_layer_norm_affine` for what it loses.
        bias: whether there is a bias beside the weight.
        sequence_parallel_enabled: the attribute of this name that weight and bias get. Trainers
            such as Megatron's sum the gradients of parameters with this attribute over the
            tensor-parallel group, because every process normalizes a part of the sequence.
        zero_centered_gamma: multiply by ``1 + weight``, and start from a weight of zeros. The sum
            is formed in float32 (float64), so small changes of a 16-bit weight count, and weight
            decay draws the factor to 1. TransformerEngine's and Megatron's argument of this name.
        device, dtype: of the parameters.

    Shape and dtype:
        Input ``[..., *normalized_shape]`` in float64, float32, float16 or bfloat16, whatever the
        weight's dtype; output the same. Of a 16-bit weight with a wider input the output has the
        weight's dtype; :class:`MixedFusedLayerNorm` always returns that. Under autocast the output
        has the autocast dtype, under amp's O1 and O4 float32.

    Raises:
        ValueError: shapes or devices do not match, or ``eps`` is negative.
        TypeError: the input is not floating point.

    Note:
        ``state_dict`` has ``weight`` and ``bias``, as that of :class:`torch.nn.LayerNorm`.

    Source:
        Ba, Kiros & Hinton, *Layer Normalization*, 2016.

    Example:
        >>> norm = FusedLayerNorm(64)
        >>> norm(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    _called = "FusedLayerNorm"

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        bias: bool = True,
        sequence_parallel_enabled: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            memory_efficient,
            sequence_parallel_enabled,
            zero_centered_gamma,
            device,
            dtype,
        )
        self._add_parameter("bias", elementwise_affine and bias, device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        shape, eps, efficient = self.normalized_shape, self.eps, self.memory_efficient
        parameters = self._parameters  # attributes of modules take a while to look up
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:  # parametrized, or views of a flat parameter
            weight, bias = self.weight, self.bias
        centered = weight is not None and self.zero_centered_gamma
        if type(input) is Tensor:  # what torch.fx records is none
            name, weights, mixed = self._called, (weight, bias), self._is_mixed
            return run_norm(
                name, LAYER_NORM, input, weights, shape, eps, efficient, mixed, centered
            )
        if weight is None and not self._is_mixed:
            return fused_layer_norm(input, shape, eps, efficient)
        function = (
            mixed_dtype_fused_layer_norm_affine if self._is_mixed else fused_layer_norm_affine
        )
        return function(input, weight, bias, shape, eps, efficient, zero_centered_gamma=centered)


class FusedRMSNorm(_Norm):
    r"""RMS normalization over the last dimensions that reads each row once.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \, w

    Args:
        eps: added to the mean square, in units of ``input ** 2``; ``>= 0``. None is machine epsilon
            as with :class:`torch.nn.RMSNorm`, whose default it is: float32's, or float64's for
            float64 input.
        elementwise_affine: whether there is a weight, else it is None.
        zero_centered_gamma: multiply by ``1 + weight``, as Gemma's norm does.

    Other arguments, dtypes and errors are those of :class:`FusedLayerNorm`; there is no bias.

    Source:
        Zhang & Sennrich, *Root Mean Square Layer Normalization*, NeurIPS 2019.

    Example:
        >>> norm = FusedRMSNorm(64, eps=1e-6)
        >>> norm(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    _called = "FusedRMSNorm"
    _takes_no_eps = True

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        sequence_parallel_enabled: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            memory_efficient,
            sequence_parallel_enabled,
            zero_centered_gamma,
            device,
            dtype,
        )
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        options = self.normalized_shape, self.eps, self.memory_efficient
        weight = self._parameters.get("weight")  # None also where it is parametrized
        if weight is None:
            weight = self.weight
        centered = weight is not None and self.zero_centered_gamma
        if type(input) is Tensor:  # as above
            mixed = self._is_mixed
            return run_norm(self._called, RMS_NORM, input, (weight,), *options, mixed, centered)
        if weight is None and not self._is_mixed:
            return fused_rms_norm(input, *options)
        function = mixed_dtype_fused_rms_norm_affine if self._is_mixed else fused_rms_norm_affine
        return function(input, weight, *options, zero_centered_gamma=centered)


class MixedFusedLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` for input of any floating-point dtype; returns the weight's dtype.

    Always has weight and bias. Other keywords than those of :class:`FusedLayerNorm` are ignored
    with a warning.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    _called, _is_mixed = "MixedFusedLayerNorm", True

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        options = mixed_options("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient, **options)


class MixedFusedRMSNorm(FusedRMSNorm):
    """:class:`FusedRMSNorm` for input of any floating-point dtype; returns the weight's dtype.

    Always has a weight. Other keywords than those of :class:`FusedRMSNorm` are ignored with a
    warning.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    _called, _is_mixed = "MixedFusedRMSNorm", True

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        options = mixed_options("MixedFusedRMSNorm", kwargs)
        if options.pop("bias", False):
            raise ValueError("MixedFusedRMSNorm: RMS normalization has no bias, got bias=True.")
        super().__init__(normalized_shape, eps, True, memory_efficient, **options)
