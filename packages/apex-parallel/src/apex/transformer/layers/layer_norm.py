"""Layer normalizations of apex-normalization and apex-contrib, for sequence parallelism.

With sequence parallelism every tensor-parallel rank normalizes a part of the sequence. The
gradients of weight and bias are then parts of a sum, and their attribute
``sequence_parallel_enabled`` tells a trainer to add them over the tensor-parallel ranks.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

try:
    from apex.normalization import FusedLayerNorm as OrigFusedLayerNorm
    from apex.normalization import MixedFusedLayerNorm as OrigMixedFusedLayerNorm
except ImportError as error:
    raise ImportError(
        "apex.transformer.layers needs another wheel: pip install apex-normalization"
    ) from error
try:
    from apex.contrib.layer_norm import FastLayerNorm as OrigFastLayerNorm
except ImportError:  # apex-contrib is not installed; FastLayerNorm says so
    OrigFastLayerNorm = None

__all__ = ["FastLayerNorm", "FusedLayerNorm", "MixedFusedLayerNorm"]


def _set_sequence_parallel_enabled(param: Tensor, sequence_parallel_enabled: bool) -> None:
    param.sequence_parallel_enabled = sequence_parallel_enabled


def _mark(module: nn.Module, sequence_parallel_enabled: bool) -> None:
    module.sequence_parallel_enabled = sequence_parallel_enabled
    for parameter in module.parameters(recurse=False):
        _set_sequence_parallel_enabled(parameter, sequence_parallel_enabled)


class FusedLayerNorm(OrigFusedLayerNorm):
    """:class:`apex.normalization.FusedLayerNorm` with marked parameters."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        _mark(self, sequence_parallel_enabled)


class MixedFusedLayerNorm(OrigMixedFusedLayerNorm):
    """:class:`apex.normalization.MixedFusedLayerNorm` with marked parameters.

    ``sequence_parallel_enabled`` is among the keyword arguments; the others are passed on.
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        sequence_parallel_enabled = kwargs.pop("sequence_parallel_enabled", False)
        super().__init__(normalized_shape, eps=eps, **kwargs)
        _mark(self, sequence_parallel_enabled)


if OrigFastLayerNorm is not None:

    class FastLayerNorm(OrigFastLayerNorm):
        """:class:`apex.contrib.layer_norm.FastLayerNorm` with marked parameters."""

        def __init__(
            self, hidden_size: int, eps: float = 1e-5, *, sequence_parallel_enabled: bool = False
        ) -> None:
            super().__init__(hidden_size, eps)
            _mark(self, sequence_parallel_enabled)

else:

    class FastLayerNorm(FusedLayerNorm):
        """:class:`FusedLayerNorm` under another name, because apex-contrib is not installed."""

        def __init__(
            self, hidden_size: int, eps: float = 1e-5, *, sequence_parallel_enabled: bool = False
        ) -> None:
            warnings.warn(
                "FastLayerNorm is FusedLayerNorm here, because apex.contrib.layer_norm is missing: "
                "pip install apex-contrib",
                stacklevel=2,
            )
            super().__init__(hidden_size, eps, sequence_parallel_enabled=sequence_parallel_enabled)
