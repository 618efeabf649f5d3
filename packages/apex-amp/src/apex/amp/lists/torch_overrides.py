"""The cast lists of ``torch``."""

import torch

MODULE = torch

# torch's version for scripts that choose by it: "2.10" is 2.1 as a float, hence the hundredths.
version_strings = torch.__version__.split(".")
version_major, version_minor = int(version_strings[0]), int(version_strings[1])
version_num = version_major + version_minor / 100

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
