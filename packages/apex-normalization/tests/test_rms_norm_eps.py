"""``eps=None`` of RMS norms is what torch takes; layer norms refuse it."""

import copy

import pytest
import torch

from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_add_rms_norm,
    fused_layer_norm,
)
from apex_testkit import FLOATS

RMS_MODULES = [FusedRMSNorm, MixedFusedRMSNorm]


@pytest.mark.parametrize("kind", [FusedLayerNorm, MixedFusedLayerNorm])
@pytest.mark.parametrize("eps", [None, "1e-5"])
def test_eps_that_is_no_number_is_refused(eps, kind):
    with pytest.raises(TypeError, match=f"{kind.__name__}: eps must be a number, got"):
        kind(5, eps=eps)
    module = kind(5)
    module.eps = eps
    with pytest.raises(TypeError, match="eps must be a number, got"):
        module(torch.randn(6, 5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_eps_is_torchs(dtype, device):
    """Of tiny rows, eps decides; torch takes that of the dtype that it computes in."""
    shape = [8]
    x = torch.randn(4, *shape, device=device, dtype=torch.float64)
    x = (x * (1e-8 if dtype == torch.float64 else 2e-4)).to(dtype)
    weight = torch.randn(shape, device=device, dtype=dtype)
    expected = torch.nn.functional.rms_norm(x, shape, weight, None)
    modules = [kind(shape, eps=None, device=device, dtype=dtype) for kind in RMS_MODULES]
    for module in modules:
        module.weight.data.copy_(weight)
        assert "eps=None" in repr(module)
    residual = torch.zeros_like(x)
    actual = [
        *(module(x) for module in modules),
        *(copy.deepcopy(module)(x) for module in modules),
        FusedRMSNorm(shape, None, False, device=device)(x) * weight,
        fused_layer_norm.fused_rms_norm(x, shape, None) * weight,
        fused_layer_norm.fused_rms_norm_affine(x, weight, shape, None, True),
        fused_layer_norm.mixed_dtype_fused_rms_norm_affine(x, weight, shape, eps=None),
        fused_layer_norm.manual_rms_norm(x, shape, weight, None),
        fused_layer_norm.FusedRMSNormAffineFunction.apply(x, weight, shape, None),
        fused_add_rms_norm(x, residual, weight, eps=None),
    ]
    for y in actual:
        torch.testing.assert_close(y, expected)
    gradients = []
    for norm in (torch.nn.functional.rms_norm, fused_layer_norm.fused_rms_norm):
        x.requires_grad_()
        gradients.append(torch.autograd.grad(norm(x, shape, eps=None), x, expected)[0])
        x = x.detach()
    torch.testing.assert_close(*gradients)
    compiled = torch.compile(modules[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    y = torch.func.vmap(modules[0])(x)
    torch.testing.assert_close(y, expected)
