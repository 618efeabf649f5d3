"""The enumerations of Megatron models: kinds of layers, of attention, of masks, of models."""

import enum

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType"]


class LayerType(enum.Enum):
    """Where a transformer's layer stands."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Whether queries and keys come from the same sequence."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """What attention must not see: what a mask says, or what comes later."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Whether a model has one stack of layers, or two."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
