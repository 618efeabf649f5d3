"""Rows as wide as a GPU's groups of lanes, blocks and registers hold, and a pack wider."""

import pytest
import torch
import torch.nn.functional as F

from apex.normalization.fused_add_norm import fused_add_layer_norm
from apex.normalization.fused_layer_norm import fused_layer_norm_affine
from apex_testkit import assert_as_accurate_as

EPS = 1e-5
# A pack is 4 columns of float32, 8 of 16 bits. A group of lanes has 32 of them; sums of columns are
# kept for 1,024; rows for 2,048, of float32 for 4,096. Those of float64 are not kept.
COLUMNS = {
    torch.float32: (128, 132, 4096, 4100, 8192, 8196, 16384, 16388),
    torch.bfloat16: (256, 264, 8192, 8200, 16384, 16392),
    torch.float64: (64, 66, 6144),
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
