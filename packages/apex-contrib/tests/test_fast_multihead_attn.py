"""Apex's extension module of attention: its functions and saved tensors against autograd."""

import importlib
import sys

import pytest
import torch
from torch.nn import functional as F

T, S, B, HEADS, E, P = 5, 7, 2, 3, 12, 0.25


def randoms(*shapes):
    return [torch.randn(s, dtype=torch.float64) for s in shapes]


def self_reference(x, w_in, w_out, b_in=None, b_out=None, *, mask=None, keep=None):
    lin = F.linear(x, w_in, b_in).view(T, B, HEADS, 3, -1)
    q, k, v = (lin[:, :, :, i] for i in range(3))
    return _finish(q, k, v, w_out, b_out, mask, keep)


def encdec_reference(x, y, w_q, w_kv, w_out, *, mask=None, keep=None):
    q = F.linear(x, w_q).view(T, B, HEADS, -1)
    kv = F.linear(y, w_kv).view(S, B, HEADS, 2, -1)
    return _finish(q, kv[:, :, :, 0], kv[:, :, :, 1], w_out, None, mask, keep)


def _finish(q, k, v, w_out, b_out, mask, keep):
    scores = torch.einsum("tbhd,sbhd->bhts", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask[:, None, None]
    weights = torch.softmax(scores, -1)
    if keep is not None:
        weights = weights * keep.view(weights.shape) / (1 - P)
    return F.linear(torch.einsum("bhts,sbhd->tbhd", weights, v).flatten(2), w_out, b_out)


def gradients(function, tensors, dy):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    return y.detach(), torch.autograd.grad(y, leaves, dy)


def assert_all_close(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def pad_mask(keys, added):
    hidden = torch.rand(B, keys) < 0.3
    hidden[:, 0] = False
    numbers = torch.where(hidden, -10000.0, 0.0).double()
    return (numbers if added else hidden.to(torch.uint8)), numbers


@pytest.mark.parametrize("name", ["self_attn", "self_attn_bias", "self_attn_bias_additive_mask"])
def test_self_attn(name):
    import fast_multihead_attn as ext

    added = name.endswith("mask")
    x, w_in, w_out, dy, *biases = randoms((T, B, E), (3 * E, E), (E, E), (T, B, E), (3 * E,), (E,))
    biases = biases if "bias" in name else []
    mask, numbers = pad_mask(T, added)
    forward = getattr(ext, f"{name}_forward")
    lin, soft, dropped, keep, mm2, out = forward(
        True, False, True, HEADS, x, w_in, w_out, *biases, mask, P
    )
    assert (keep.dtype, keep.shape) == (torch.uint8, (B * HEADS, T, T))
    assert (lin.shape, mm2.shape) == ((T, B, 3 * E), (T, B * HEADS, E // HEADS))
    assert 0.5 < keep.double().mean() < 0.95
    tensors = [x, w_in, w_out, *biases]
    reference = lambda *given: self_reference(*given, mask=numbers, keep=keep)
    y, expected = gradients(reference, tensors, dy)
    torch.testing.assert_close(out, y)
    extra = (mask,) if added else ()
    backward = getattr(ext, f"{name}_backward")
    actual = backward(HEADS, dy, mm2, dropped, soft, *extra, lin, x, w_in, w_out, keep, P)
    assert_all_close(actual, expected)
    evaluated = forward(False, False, False, HEADS, x, w_in, w_out, *biases, None, P)
    torch.testing.assert_close(evaluated[-1], self_reference(*tensors))


def test_self_attn_norm_add():
    import fast_multihead_attn as ext

    x, w_in, w_out, dy, gamma, beta = randoms((T, B, E), (3 * E, E), (E, E), (T, B, E), (E,), (E,))
    mask, numbers = pad_mask(T, False)
    given = (True, False, True, HEADS, x, gamma, beta, w_in, w_out, mask, P)
    *norm, lin, soft, dropped, keep, mm2, keep_added, out = ext.self_attn_norm_add_forward(*given)

    def reference(x, gamma, beta, w_in, w_out):
        inner = F.layer_norm(x, (E,), gamma, beta)
        y = self_reference(inner, w_in, w_out, mask=numbers, keep=keep)
        return x + y * keep_added / (1 - P)

    y, expected = gradients(reference, [x, gamma, beta, w_in, w_out], dy)
    torch.testing.assert_close(out, y)
    saved = (mm2, dropped, soft, lin, *norm, x, gamma, beta, w_in, w_out, keep, keep_added)
    assert_all_close(ext.self_attn_norm_add_backward(HEADS, dy, *saved, P), expected)


@pytest.mark.parametrize("norm", [False, True])
def test_encdec(norm):
    import fast_multihead_attn as ext

    x, y, w_q, w_kv, w_out, dy, gamma, beta = randoms(
        *((T, B, E), (S, B, E), (E, E), (2 * E, E), (E, E), (T, B, E), (E,), (E,))
    )
    mask, numbers = pad_mask(S, False)
    weights, flags = (w_q, w_kv, w_out), (True, False, True, HEADS)
    if not norm:
        given = (*flags, x, y, *weights, mask, P)
        lin_q, lin_kv, soft, dropped, keep, mm2, out = ext.encdec_multihead_attn_forward(*given)
        reference = lambda *given: encdec_reference(*given, mask=numbers, keep=keep)
        expected_y, expected = gradients(reference, [x, y, *weights], dy)
        saved = (mm2, dropped, soft, lin_q, lin_kv, x, y, *weights, keep)
        actual = ext.encdec_multihead_attn_backward(HEADS, dy, *saved, P)
    else:
        given = (*flags, x, y, gamma, beta, *weights, mask, P)
        results = ext.encdec_multihead_attn_norm_add_forward(*given)
        *stats, lin_q, lin_kv, soft, dropped, keep, mm2, keep_added, out = results

        def reference(x, y, gamma, beta, *weights):
            inner = F.layer_norm(x, (E,), gamma, beta)
            z = encdec_reference(inner, y, *weights, mask=numbers, keep=keep)
            return x + z * keep_added / (1 - P)

        expected_y, expected = gradients(reference, [x, y, gamma, beta, *weights], dy)
        saved = (mm2, dropped, soft, lin_q, lin_kv, *stats, x, y, gamma, beta, *weights)
        actual = ext.encdec_multihead_attn_norm_add_backward(HEADS, dy, *saved, keep, keep_added, P)
    torch.testing.assert_close(out, expected_y)
    assert_all_close(actual, expected)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_mask_softmax_dropout(dtype, added):
    import fast_multihead_attn as ext

    scores, dy = (t.to(dtype) for t in randoms((B * HEADS, T, S), (B * HEADS, T, S)))
    mask, numbers = pad_mask(S, added)
    name = "additive_mask_softmax_dropout" if added else "mask_softmax_dropout"
    forward, backward = (getattr(ext, f"{name}_{way}") for way in ("forward", "backward"))
    dropped, keep, soft = forward(True, True, HEADS, scores, mask, P)

    def reference(x):
        x = x.double().unflatten(0, (B, HEADS)) + numbers[:, None, None]
        return torch.softmax(x, -1).flatten(0, 1) * keep / (1 - P)

    y, (expected,) = gradients(reference, [scores], dy.double())
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {}
    torch.testing.assert_close(dropped.double(), y, **close)
    extra = () if added else (mask,)
    before = dy.clone()
    actual = backward(True, HEADS, dy, soft, keep, *extra, P)
    torch.testing.assert_close(actual, expected, **close)
    assert torch.equal(dy, before)


@pytest.mark.parametrize("module", ["fast_multihead_attn", "fmhalib"])
def test_import_error_where_kernels_cannot_run(module, monkeypatch):
    from apex.contrib._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module(module)
