"""Operations of torch by what they do with channels."""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.nn import functional as F

# Equal for each channel: modules, functions, and names of methods.
ALIKE_MODULES = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus),
    *(nn.LogSigmoid, nn.Softsign, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin),
    *(nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold, nn.RReLU),
)
ALIKE = {
    *(operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul),
    *(operator.truediv, operator.itruediv, operator.neg, operator.pow),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.relu, torch.sigmoid, torch.tanh, torch.abs),
    *(torch.exp, torch.sqrt, torch.square, torch.clamp, torch.softmax, torch.log_softmax),
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.hardsigmoid),
    *(F.hardswish, F.hardtanh, F.sigmoid, F.tanh, F.softplus, F.softmax, F.log_softmax, F.dropout),
    *(F.dropout2d, F.dropout3d, F.alpha_dropout),
}
ALIKE_METHODS = {
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "relu", "relu_", "sigmoid"),
    *("tanh", "abs", "exp", "sqrt", "square", "clamp", "clamp_", "contiguous", "clone", "detach"),
    *("float", "half", "bfloat16", "double", "to", "softmax", "log_softmax"),
}
PER_PLANE = {  # by the last dimensions that are mixed
    1: (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
    2: (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d),
    3: (nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
}
PER_PLANE_FUNCTIONS = {
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d), 1),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d), 2),
    F.adaptive_max_pool2d: 2,
    **dict.fromkeys((F.max_pool3d, F.avg_pool3d, F.adaptive_avg_pool3d), 3),
}
CONVOLUTIONS = {F.conv1d: 1, torch.conv1d: 1, F.conv2d: 2, torch.conv2d: 2, F.conv3d: 3}
CONCATENATIONS = {torch.cat, torch.concat, torch.concatenate}
PRODUCTS = {torch.matmul, torch.mm, operator.matmul}
MEANS = {torch.mean: "mean", torch.sum: "sum", torch.amax: "amax", torch.amin: "amin"}
SHAPES = {"dim", "numel", "ndimension", "stride"}
# Views, and the names of their arguments.
VIEWS = {
    **dict.fromkeys(("view", "expand"), ("size",)),
    "reshape": ("shape",),
    "permute": ("dims",),
    "t": (),
    "flatten": ("start_dim", "end_dim"),
    **dict.fromkeys(("transpose", "swapaxes"), ("dim0", "dim1")),
    **dict.fromkeys(("unsqueeze", "squeeze"), ("dim",)),
}
VIEW_FUNCTIONS = {getattr(torch, name): name for name in VIEWS if name not in ("view", "expand")}
# What computes numbers from numbers; all other functions of numbers make tensors.
OF_NUMBERS = ("_operator", "builtins", "math")
