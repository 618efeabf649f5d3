"""megatron-core's fused softmaxes run on our extension modules; its rotary embeddings agree."""

import pytest
import scaled_masked_softmax_cuda
import scaled_softmax_cuda
import scaled_upper_triang_masked_softmax_cuda
import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.enums import AttnMaskType

from apex.transformer.functional import (
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_thd,
)

MODULES = {
    "causal": scaled_upper_triang_masked_softmax_cuda,
    "padding": scaled_masked_softmax_cuda,
    "no mask": scaled_softmax_cuda,
}


def mask_func(scores, mask):
    return scores.masked_fill(mask, -10000.0)


def softmax(kind, fusion, scale, dtype):
    mask_type = AttnMaskType.causal if kind == "causal" else AttnMaskType.padding
    flags = dtype == torch.float16, dtype == torch.bfloat16
    return FusedScaleMaskSoftmax(*flags, mask_type, fusion, mask_func, True, scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_softmax(kind, dtype, monkeypatch):
    """Its kernel path calls our modules, forward and backward, and equals its plain path."""
    calls = []
    for name in ("forward", "backward"):
        own = getattr(MODULES[kind], name)
        spied = lambda *given, own=own, name=name: (calls.append(name), own(*given))[1]
        monkeypatch.setattr(MODULES[kind], name, spied)
    x = torch.randn(2, 4, 32, 32).to(dtype).requires_grad_()
    mask = torch.rand(2, 1, 32, 32) < 0.3
    mask[..., 0] = False
    future = torch.ones(32, 32, dtype=torch.bool).triu(1)[None, None]
    # Its plain path would make this one on a GPU, and its kernels want none.
    mask, plain_mask = {"padding": (mask, mask), "causal": (None, future), "no mask": (None, None)}[
        kind
    ]
    fused, plain = (softmax(kind, fusion, 0.25, dtype) for fusion in (True, False))
    assert fused.is_kernel_available(mask, *x.shape)
    y, expected = fused(x, mask), plain(x, plain_mask)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    actual, wanted = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
    torch.testing.assert_close(actual, wanted, atol=2e-3, rtol=2e-2)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("width", [16, 8])
def test_rotary_embeddings(width):
    t = torch.randn(12, 2, 4, 16)
    angles = torch.arange(12)[:, None] * 100 ** (-torch.arange(0, width, 2) / width)
    freqs = torch.cat((angles, angles), -1)[:, None, None]
    expected = rope_utils._apply_rotary_pos_emb_bshd(t, freqs)
    torch.testing.assert_close(fused_apply_rotary_pos_emb(t, freqs), expected)


def test_rotary_embeddings_of_packed_sequences(one_process):
    """In the call shape that slime uses: [tokens, heads, d], int32 cu_seqlens."""
    lengths = [5, 1, 8]
    t = torch.randn(sum(lengths), 4, 16)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    freqs = torch.randn(9, 1, 1, 16)
    group = torch.distributed.group.WORLD
    expected = rope_utils._apply_rotary_pos_emb_thd(t, starts, freqs, cp_group=group)
    torch.testing.assert_close(fused_apply_rotary_pos_emb_thd(t, starts, freqs), expected)
