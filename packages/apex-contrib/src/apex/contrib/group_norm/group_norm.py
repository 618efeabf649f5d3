"""Group normalization under the names of Apex's: channels-last, SiLU in the same pass."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled
from torch.nn import functional as F

from .._shared.native.operands import amp_to_float32, check_floating, is_amp
from .custom_ops import (
    fake_group_norm_nhwc_bprop,
    fake_group_norm_nhwc_fprop,
    group_norm_nhwc_bprop,
    group_norm_nhwc_fprop,
    one_time_warning,
)
from .functional import NAME, check, group_norm, is_nhwc, is_silu
from .group_norm_nhwc.formula import group_norm_nhwc

__all__ = [
    "GroupNorm",
    "cuda_group_norm_nhwc_one_pass",
    "cuda_group_norm_nhwc_two_pass",
    "cuda_group_norm_v2_nhwc",
    "decompositions",
    "fake_group_norm_nhwc_bprop",
    "fake_group_norm_nhwc_fprop",
    "get_cc_and_sm_count",
    "group_norm_nhwc_bprop",
    "group_norm_nhwc_fprop",
    "one_time_warning",
    "torch_group_norm",
]

decompositions = group_norm_nhwc.decompositions
"""The operators in ATen's, for ``ExportedProgram.run_decompositions``: call it."""


def torch_group_norm(
    x: Tensor,
    g: int,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    act: str | None = "",
    *,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """Normalize ``x`` ``[N, C, *]`` by torch's own function, computed in the weight's dtype.

    Args:
        x: input; the output has its dtype.
        g: number of groups, which divides C.
        w, b: ``[C]``, or None.
        eps: added to the biased variance.
        act: "silu" or "swish" for SiLU; "" or None for none.
        zero_centered_gamma: multiply by ``1 + w``; all is then computed in float32 at least.

    Raises:
        TypeError: ``x`` is no float64, float32, float16 or bfloat16 tensor.
        ValueError: shapes do not fit, or ``act`` is another word.
    """
    silu = is_silu(act)
    check_floating(NAME, "x", x)
    if zero_centered_gamma and w is not None:
        dtype = torch.promote_types(w.dtype, torch.float32)
        w, b = 1 + w.to(dtype), None if b is None else b.to(dtype)
    wide = x if w is None else x.to(w.dtype)
    try:
        y = F.group_norm(wide, g, w, b, eps)
    except RuntimeError:
        check(wide, g, w, b, eps)  # says which argument does not fit
        raise
    return (F.silu(y) if silu else y).to(x.dtype)


cuda_group_norm_nhwc_one_pass = group_norm
"""Apex's name of its kernel for small samples; here ``group_norm``, which takes all sizes."""
cuda_group_norm_nhwc_two_pass = group_norm
"""Apex's name of its kernel for large samples; here ``group_norm``, which takes all sizes."""
cuda_group_norm_v2_nhwc = group_norm
"""Apex's name of its kernel for some shapes; here ``group_norm``, which takes all shapes."""


@functools.cache
def get_cc_and_sm_count(device_index: int) -> tuple[tuple[int, int], int]:
    """Return a GPU's compute capability and how many multiprocessors it has."""
    properties = torch.cuda.get_device_properties(device_index)
    return (properties.major, properties.minor), properties.multi_processor_count


class GroupNorm(nn.Module):
    """Group normalization of channels-last tensors, as Apex's class; SiLU in the same pass.

    Channels-last input runs our kernels, see :func:`cuda_group_norm_nhwc_one_pass`. Input of
    another layout, and float64 input with weights of another dtype, are torch's, see
    :func:`torch_group_norm`.

    Args:
        num_groups: number of groups, which divides ``num_channels``.
        num_channels: number of channels C; any. (Apex's kernels take 24 of them.)
        eps: added to the biased variance.
        affine: whether there are a weight and a bias.
        device, dtype: of the parameters.
        act: "silu" or "swish" for SiLU after it, in any case; "" or None for none.
        zero_centered_gamma: multiply by ``1 + weight``, summed in float32 (float64), and start from
            a weight of zeros.

    Input and output are ``[N, C, *]``, of one dtype and layout. Under autocast they keep it: what
    convolutions made float16 stays so. Under amp's O1 and O4 the output is float32, as that of
    ``torch.nn.GroupNorm``.

    Raises:
        ValueError: ``num_groups`` does not divide ``num_channels``, ``eps`` is negative, or ``act``
            is another word.

    Example:
        >>> x = torch.randn(2, 64, 8, 8).to(memory_format=torch.channels_last)
        >>> GroupNorm(32, 64, act="silu")(x).shape
        torch.Size([2, 64, 8, 8])
    """

    zero_centered_gamma = False  # of modules in pickles of Apex's
    # Apex's kernels serve these. Ours serve all; scripts read them.
    SUPPORTED_CHANNELS: ClassVar[frozenset[int]] = frozenset(
        (128, 256, 320, 384, 448, 512, 640, 768, 896, 960, 1024, 1280, 1344, 1536, 1792, 1920)
    ).union((2048, 2240, 2560, 2688, 3072, 3136, 3584, 4096))
    SUPPORTED_GROUPS: ClassVar[frozenset[int]] = frozenset([16, 32])
    SUPPORTED_DTYPES: ClassVar[frozenset[tuple[torch.dtype, torch.dtype]]] = frozenset(
        (of_input, of_weight)
        for of_input in (torch.float32, torch.float16, torch.bfloat16)
        for of_weight in (torch.float32, torch.float16, torch.bfloat16)
    )
    GN_V2_SUPPORTED_CHANNELS: ClassVar[dict[int, frozenset[int]]] = {
        8 * 8: frozenset([1280, 2560]),
        16 * 16: frozenset([640, 1280, 1920, 2560]),
        32 * 32: frozenset([320, 640, 960, 1280, 1920]),
        64 * 64: frozenset([320, 640, 960]),
    }
    GN_V2_SUPPORTED_DTYPES: ClassVar[frozenset[tuple[torch.dtype, torch.dtype]]] = frozenset(
        [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16)]
    )
    GN_V2_SUPPORTED_GROUPS_SWISH: ClassVar[frozenset[tuple[int, bool]]] = frozenset(
        [(16, True), (32, False)]
    )
    GN_V2_SUPPORTED_LOWER_BOUND_SM_COUNT: ClassVar[dict[tuple[int, int], int]] = {(10, 0): 148}
    __constants__: ClassVar[list[str]] = [
        "num_groups",
        "num_channels",
        "eps",
        "affine",
        "act",
        "SUPPORTED_CHANNELS",
        "SUPPORTED_GROUPS",
        "SUPPORTED_DTYPES",
        "GN_V2_SUPPORTED_CHANNELS",
        "GN_V2_SUPPORTED_DTYPES",
        "GN_V2_SUPPORTED_GROUPS_SWISH",
        "GN_V2_SUPPORTED_LOWER_BOUND_SM_COUNT",
    ]

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        act: str | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels < 1 or num_channels % num_groups:
            raise ValueError(
                f"GroupNorm: num_groups must divide num_channels, both positive; got {num_groups} "
                f"and {num_channels}."
            )
        if not eps >= 0:
            raise ValueError(f"GroupNorm: eps must not be negative, got {eps}.")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.affine, self.act = affine, act.lower() if act else act
        is_silu(self.act)
        self.zero_centered_gamma = zero_centered_gamma
        self.sm = 0  # of the current GPU: 10 * major + minor
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            self.sm = 10 * major + minor
        if affine:
            self.weight = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones, or to zeros if it is zero-centred, and the bias to zeros."""
        if self.affine:
            (nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_)(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` ``[N, C, *]``."""
        if _is_any_autocast_enabled() and is_amp(input):  # the first has no frame
            (input,) = amp_to_float32(input)
        parameters = self._parameters  # attributes of modules take a while to look up
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:  # parametrized, or views of a flat parameter
            weight, bias = self.weight, self.bias
        given = (input, self.num_groups, weight, bias, self.eps, self.act)
        pair = input.dtype, input.dtype if weight is None else weight.dtype
        if input.dim() == 4:  # as is_nhwc(), without its frame
            is_ours = input.is_contiguous(memory_format=torch.channels_last)
        else:
            is_ours = is_nhwc(input)
        is_ours = is_ours and (pair[0] is pair[1] or pair in self.SUPPORTED_DTYPES)
        norm = group_norm if is_ours else torch_group_norm
        return norm(*given, zero_centered_gamma=self.zero_centered_gamma)

    def _check_legality(self, x: Tensor) -> bool:
        """Whether our kernels take ``x`` as it is."""
        if not is_nhwc(x):
            return False
        dtype = x.dtype if self.weight is None else self.weight.dtype
        return x.dtype == dtype or (x.dtype, dtype) in self.SUPPORTED_DTYPES

    def _check_v2_legality(self, x: Tensor) -> bool:
        """Whether Apex's second kernels would take ``x``; here nothing depends on it."""
        if not (self.affine and x.is_cuda and self._check_legality(x)):
            return False
        capability, count = get_cc_and_sm_count(x.get_device())
        return (
            capability in self.GN_V2_SUPPORTED_LOWER_BOUND_SM_COUNT
            and count >= self.GN_V2_SUPPORTED_LOWER_BOUND_SM_COUNT[capability]
            and (x.dtype, self.weight.dtype) in self.GN_V2_SUPPORTED_DTYPES
            and (self.num_groups, bool(self.act)) in self.GN_V2_SUPPORTED_GROUPS_SWISH
            and x.shape[1] in self.GN_V2_SUPPORTED_CHANNELS.get(x.shape[2:].numel(), ())
        )

    def extra_repr(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return (
            f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}, "
            f"act={self.act}{centered}"
        )
