"""The cast lists of ``torch``."""

import torch

MODULE = torch

FP16_FUNCS = [
    *("conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("conv_tbc", "prelu"),
    *("addmm", "addmv", "addr", "matmul", "mm", "mv"),
    *("addbmm", "baddbmm", "bmm"),
]
BFLOAT16_FUNCS = list(FP16_FUNCS)

FP32_FUNCS = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal"),
    *("rsqrt", "sinh", "tan", "pow"),
    *("cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"),
]

CASTS = [
    *("addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot"),
    *("add", "div", "mul"),
    *("eq", "equal", "ge", "gt", "le", "lt", "ne"),
]
SEQUENCE_CASTS = ["cat", "stack"]
