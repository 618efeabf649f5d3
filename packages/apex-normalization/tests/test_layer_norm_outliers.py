"""Layer normalization of rows whose first columns are far larger than the others.

The kernel takes its pivot from these columns, which then is far from the row's mean.
"""

import pytest
import torch

from apex.normalization.fused_layer_norm import fused_layer_norm, fused_layer_norm_affine
from apex_testkit import assert_as_accurate_as

EPS = 1e-5


def formula(x):
    deviation = x - x.mean(-1, keepdim=True)
    return deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("columns", [64, 4096, 65536])
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_output(dtype, size, count, columns, device):
    x = torch.randn(4, columns, device=device)
    x[:, :count] = size * (1 + torch.rand(4, count, device=device))
    x = x.to(dtype)
    y = fused_layer_norm(x, columns, EPS)
    assert_as_accurate_as(formula, y, x)
    # By themselves: their own unit in the last place is far smaller.
    assert_as_accurate_as(lambda x: formula(x)[:, count:], y[:, count:], x)


def test_gradients(device):
    x, dy = torch.randn(2, 8, 4096, device=device)
    weight, bias = torch.randn(2, 4096, device=device)
    x[:, :16] = 1e6 * (1 + torch.rand(8, 16, device=device))

    def gradients(norm, x, weight, bias, dy):
        inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
        return torch.autograd.grad(norm(*inputs), inputs, dy)

    ours = lambda x, w, b: fused_layer_norm_affine(x, w, b, 4096, EPS)
    actual = gradients(ours, x, weight, bias, dy)
    affine = lambda x, w, b: formula(x) * w + b
    assert_as_accurate_as(lambda *args: gradients(affine, *args), actual, x, weight, bias, dy)
