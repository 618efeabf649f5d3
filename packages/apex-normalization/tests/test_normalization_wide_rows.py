"""Rows that just fit, or do not, into the shared memory that a GPU grants a block."""

import pytest
import torch
import torch.nn.functional as F

from apex.normalization.fused_add_norm import fused_add_layer_norm
from apex.normalization.fused_layer_norm import fused_layer_norm_affine
from apex_testkit import assert_as_accurate_as

EPS = 1e-5
# 48 KiB are 12,288 floats: one row kept by the forward pass, two of half the size by the backward.
COLUMNS = {
    torch.float32: (3072, 6128, 6144, 12248, 12288, 12296),
    torch.bfloat16: (6144, 12288),
    torch.float64: (760, 768, 1024, 3048, 3072, 6144),
}
cases = pytest.mark.parametrize(
    ("dtype", "columns"),
    [pytest.param(d, c, id=f"{c} {d}") for d, sizes in COLUMNS.items() for c in sizes],
)


def operands(dtype, columns, device):
    x, dy = torch.randn(2, 1, columns, device=device).to(dtype).unbind()
    weight, bias = torch.randn(2, columns, device=device).to(dtype).unbind()
    return x, weight, bias, dy


def gradients(norm, x, weight, bias, dy):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = norm(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def reference(x, weight, bias, dy):
    return gradients(
        lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b, EPS), x, weight, bias, dy
    )


@cases
def test_layer_norm(dtype, columns, device):
    inputs = operands(dtype, columns, device)
    actual = gradients(lambda x, w, b: fused_layer_norm_affine(x, w, b, columns, EPS), *inputs)
    for index, tensor in enumerate(actual):
        assert_as_accurate_as(lambda *given, i=index: reference(*given)[i], tensor, *inputs)


@cases
def test_add_layer_norm(dtype, columns, device):
    x, weight, bias, dy = operands(dtype, columns, device)
    residual = torch.zeros_like(x)

    def norm(x, w, b):
        return fused_add_layer_norm(x, residual, w, b, EPS)

    for index, tensor in enumerate(gradients(norm, x, weight, bias, dy)):
        assert_as_accurate_as(
            lambda *given, i=index: reference(*given)[i], tensor, x, weight, bias, dy
        )
