"""Convolutions, each with what follows it: a bias or a frozen scale and bias, a mask, a ReLU."""

from .conv_bias_relu import (
    ConvBias,
    ConvBiasMaskReLU,
    ConvBiasReLU,
    ConvFrozenScaleBiasReLU,
    decompositions,
)

__all__ = [
    "ConvBias",
    "ConvBiasMaskReLU",
    "ConvBiasReLU",
    "ConvFrozenScaleBiasReLU",
    "decompositions",
]
