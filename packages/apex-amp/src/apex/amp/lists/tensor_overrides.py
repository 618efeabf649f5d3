"""The cast lists of ``torch.Tensor``: operators, and the methods among the functions of torch."""

import torch

from . import torch_overrides

MODULE = torch.Tensor


def _methods(names: list[str]) -> list[str]:
    return [name for name in names if hasattr(MODULE, name)]


FP16_FUNCS = ["__matmul__", *_methods(torch_overrides.FP16_FUNCS)]
BFLOAT16_FUNCS = ["__matmul__", *_methods(torch_overrides.BFLOAT16_FUNCS)]

# `cpu`: what a tensor is brought to the host for, such as plots and sums, wants float32.
FP32_FUNCS = [
    *("__ipow__", "__pow__", "__rpow__", "cpu"),
    *_methods(torch_overrides.FP32_FUNCS),
]

_OPERATORS = [
    *("__add__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__idiv__", "__imul__"),
    *("__isub__", "__itruediv__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__", "__rdiv__"),
    *("__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__"),
]
CASTS = _methods([*_OPERATORS, *torch_overrides.CASTS])
# Sequences of tensors have no methods.
SEQUENCE_CASTS: list[str] = []
