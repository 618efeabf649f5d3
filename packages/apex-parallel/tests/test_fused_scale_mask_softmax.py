"""FusedScaleMaskSoftmax: which path runs, what both compute, and what is refused."""

import pytest
import torch

from apex.transformer import AttnMaskType
from apex.transformer.functional import FusedScaleMaskSoftmax

DTYPES = {
    (True, False): torch.float16,
    (False, True): torch.bfloat16,
    (False, False): torch.float32,
}


def mask_func(scores, mask):
    return scores.masked_fill(mask, -10000.0)


def module(fp16=False, bf16=True, kind=AttnMaskType.padding, fusion=True, in_fp32=True, scale=0.5):
    return FusedScaleMaskSoftmax(fp16, bf16, kind, fusion, mask_func, in_fp32, scale)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kind", AttnMaskType)
@pytest.mark.parametrize(("flags", "dtype"), DTYPES.items(), ids=map(str, DTYPES.values()))
def test_both_paths_compute_the_same(flags, dtype, kind, scale, device):
    x = torch.randn(2, 4, 24, 24, device=device).to(dtype)
    if kind == AttnMaskType.causal:
        mask = torch.ones(1, 1, 24, 24, dtype=torch.bool, device=device).triu(1)
    else:
        mask = torch.rand(2, 1, 24, 24, device=device) < 0.3
        mask[..., 0] = False
    fused = module(*flags, kind, scale=scale)
    plain = module(*flags, kind, fusion=False, scale=scale)
    assert fused.is_kernel_available(mask, *x.shape) == any(flags)
    assert not plain.is_kernel_available(mask, *x.shape)
    actual, expected = fused(x, mask), plain(x, mask)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected)


def test_where_kernels_do_not_run(device):
    x = torch.randn(1, 2, 3, 5, device=device).bfloat16()
    padding, causal = module(), module(kind=AttnMaskType.causal)
    assert not padding.is_kernel_available(None, *x.shape)
    torch.testing.assert_close(padding(x, None), torch.softmax(x.float() * 0.5, -1).bfloat16())
    assert not causal.is_kernel_available(None, *x.shape)  # no square
    assert causal.is_kernel_available(None, 1, 2, 3, 3)


def test_plain_path_in_16_bits(device):
    x = torch.randn(1, 2, 3, 5, device=device).bfloat16()
    plain = module(in_fp32=False, scale=None, fusion=False)
    assert torch.equal(plain(x, None), torch.softmax(x, -1))


@pytest.mark.parametrize(
    ("error", "text", "given"),
    [
        (RuntimeError, "both True", {"fp16": True, "bf16": True}),
        (RuntimeError, "scale is 0.5, which needs softmax_in_fp32=True", {"in_fp32": False}),
        (ValueError, "attn_mask_type must be .* got 'none'", {"kind": "none"}),
    ],
)
def test_bad_arguments(error, text, given):
    with pytest.raises(error, match=f"FusedScaleMaskSoftmax: .*{text}"):
        module(**given)


def test_bad_scores():
    with pytest.raises(ValueError, match=r"input must have shape .* got \[3, 3\]"):
        module()(torch.zeros(3, 3), None)


def test_compiles(device):
    x = torch.randn(2, 2, 8, 8, device=device).bfloat16()
    fused = module(kind=AttnMaskType.causal)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, None), fused(x, None))


def test_apex_computes_zeros_where_nothing_is_seen(device):
    x = torch.randn(1, 1, 2, 4, device=device).bfloat16()
    mask = torch.ones(1, 1, 2, 4, dtype=torch.bool, device=device)
    assert (module()(x, mask) == 0).all()
