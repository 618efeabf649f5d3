"""Residual add and normalization in one op give the bits of the two steps, rows of any kind.

Rows far from zero and rows with outliers are where a second algorithm would differ most.
"""

import pytest
import torch

from apex.normalization import fused_add_layer_norm, fused_add_rms_norm
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineMixedDtypesFunction,
    FusedRMSNormAffineMixedDtypesFunction,
)
from apex_testkit import FLOATS, HALVES, assert_as_accurate_as

EPS = 1e-5
WIDE = torch.float32
KINDS = ["layer", "rms"]
SHAPES = [(1000, 64), (5, 67), (3, 7), (2, 4096), (2, 20_001)]
TRIPLES = [
    *((t, t, t) for t in FLOATS),
    *((h, r, w) for h in HALVES for r, w in ((h, WIDE), (WIDE, WIDE), (WIDE, h))),
]


def with_outliers(x):
    x[:, : 1 + x.shape[1] // 64] *= 1e4
    return x


ROWS = {"normal": lambda x: x, "offset": lambda x: x + 1e4, "outliers": with_outliers}


def operands(shape, kind_of_rows, dtypes, device):
    """x, residual, weight, bias."""
    x, residual = torch.randn(2, *shape, device=device)
    weight, bias = torch.randn(2, shape[1], device=device, dtype=dtypes[2])
    return ROWS[kind_of_rows](x).to(dtypes[0]), residual.to(dtypes[1]), weight, bias


def fused(kind, x, residual, weight, bias):
    if kind == "layer":
        return fused_add_layer_norm(x, residual, weight, bias, EPS, prenorm=True)
    return fused_add_rms_norm(x, residual, weight, EPS, prenorm=True)


def norm(kind, x, weight, bias):
    """Our kernels at every size; on the CPU the functions call torch's for small layer norms."""
    if kind == "layer":
        return FusedLayerNormAffineMixedDtypesFunction.apply(x, weight, bias, weight.shape, EPS)
    return FusedRMSNormAffineMixedDtypesFunction.apply(x, weight, weight.shape, EPS)


def by_steps(kind, x, residual, weight, bias):
    """Add, then normalize, in float32 where the output has another dtype than the sum."""
    total = x + residual
    wide = total.dtype if total.dtype == weight.dtype else WIDE
    return norm(kind, total, weight.to(wide), bias.to(wide)).to(x.dtype), total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", TRIPLES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_forward(rows, dtypes, kind, device):
    for shape in SHAPES:
        arguments = operands(shape, rows, dtypes, device)
        for a, e in zip(fused(kind, *arguments), by_steps(kind, *arguments), strict=True):
            assert torch.equal(a, e), f"{shape}: {(a != e).sum()} of {a.numel()} differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_gradients(rows, dtype, kind, device):
    """Of the output alone: where the sum has a gradient, the fused op rounds once, not twice."""
    for shape in SHAPES:
        arguments = operands(shape, rows, [dtype] * 3, device)
        dy = torch.randn_like(arguments[0])

        def gradients(norm, arguments, dy):
            inputs = [t.detach().requires_grad_() for t in arguments]
            y, _ = norm(kind, *inputs)
            used = inputs if kind == "layer" else inputs[:3]
            return torch.autograd.grad(y, used, dy)

        expected = gradients(by_steps, arguments, dy)
        for a, e in zip(gradients(fused, arguments, dy), expected, strict=True):
            assert torch.equal(a, e), f"{shape}: {(a != e).sum()} of {a.numel()} differ"


@pytest.mark.parametrize("rows", ["offset", "outliers"])
def test_accuracy(rows, device):
    """What the outliers left of the others is judged by itself: its ulp is far smaller."""
    x, residual, weight, bias = operands((8, 4096), rows, [WIDE] * 3, device)
    y, total = fused("layer", x, residual, weight, bias)

    def formula(total, weight, bias):
        deviation = total - total.mean(-1, keepdim=True)
        rstd = torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS)
        return (deviation * rstd * weight + bias)[:, 65:]

    # Below plain's error, which is what a mean and a variance in two passes make at this offset.
    slack = 0.75 if rows == "offset" else 2.0
    assert_as_accurate_as(formula, y[:, 65:], total, weight, bias, slack=slack)
