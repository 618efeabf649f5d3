"""Attention of packed sequences against float64, sequence by sequence."""

from types import SimpleNamespace

import pytest
import torch

from apex.contrib._shared.native.philox import draw_seed
from apex.contrib.fmha import FMHAFun, fmha
from apex.contrib.fmha.fmha import FMHA, _padded
from apex_testkit import FLOATS, assert_as_accurate_as

LENGTHS = {"one": [4], "odd": [3, 7, 1], "hole": [2, 0, 5], "equal": [6] * 5}
LENGTHS["uneven"] = [40, 1, 0, 17]


@pytest.fixture(autouse=True, params=[0, 64], ids=["one_by_one", "padded"])
def _short(request, monkeypatch):
    """Both ways of a CPU serve these lengths."""
    monkeypatch.setattr(fmha, "_SHORT", request.param)


def starts(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def oracle(qkv, lengths):
    results, begin = [], 0
    for length in lengths:
        q, k, v = qkv[begin : begin + length].unbind(1)
        weights = torch.softmax(torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5, -1)
        results.append(torch.einsum("hts,shd->thd", weights, v))
        begin += length
    rest = qkv.shape[0] - begin
    return torch.cat([*results, qkv.new_zeros(rest, *qkv.shape[2:])])


def with_gradients(function, qkv, dy):
    qkv = qkv.detach().requires_grad_()
    y = function(qkv)
    return y.detach(), *torch.autograd.grad(y, qkv, dy)


@pytest.mark.parametrize("rest", [0, 3])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, lengths, rest, device):
    total = sum(lengths) + rest
    qkv = torch.randn(total, 3, 2, 8, device=device).to(dtype)
    dy = torch.randn(total, 2, 8, device=device).to(dtype)
    cu = starts(lengths, device)
    ours = lambda qkv: FMHAFun.apply(qkv, cu, 0.1, max(lengths) + 1, False, True)
    reference = lambda qkv, dy: with_gradients(lambda qkv: oracle(qkv, lengths), qkv, dy)
    actual = with_gradients(ours, qkv, dy)
    assert_as_accurate_as(reference, actual, qkv, dy, ulps=8.0)  # four products, each rounded


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("few", [False, True])
def test_extension_module_with_dropout(few, dtype, device):
    """Its gradients are those of autograd with the same seed."""
    import fmhalib

    lengths, p = [3, 7, 1], 0.3
    qkv = torch.randn(11, 3, 2, 8, device=device).to(dtype)
    dy, cu = torch.randn(11, 2, 8, device=device).to(dtype), starts(lengths, device)

    def function(qkv):
        torch.manual_seed(2)
        return FMHAFun.apply(qkv, cu, p, 8, True, False)

    expected = with_gradients(function, qkv, dy)
    torch.manual_seed(2)
    forward, backward = (fmhalib.fwd_nl, fmhalib.bwd_nl) if few else (fmhalib.fwd, fmhalib.bwd)
    out, softmax = forward(qkv, cu, p, 8, True, few, False, None)
    assert (softmax < 0).any()
    close = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {}
    torch.testing.assert_close(out, expected[0], **close)
    for given in (dy, dy.flatten(1)):
        dqkv, *rest = backward(given, qkv, softmax, cu, p, 8, False)
        torch.testing.assert_close(dqkv, expected[1], **close)
    assert len(rest) == 1 + few
    assert rest[0].shape == softmax.shape == (3, 2, 8, 8)
    generator = torch.Generator(device).manual_seed(2)
    assert torch.equal(fmhalib.fwd(qkv, cu, p, 8, True, few, False, generator)[0], out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_dropout_keeps_what_a_padded_batch_keeps(lengths, dtype, device):
    total, max_s, p = sum(lengths) + 2, max(lengths) + 3, 0.3
    qkv = torch.randn(total, 3, 2, 8, device=device).to(dtype)
    dy = torch.randn(total, 2, 8, device=device).to(dtype)
    cu = starts(lengths, device)
    torch.manual_seed(4)
    actual = with_gradients(lambda qkv: FMHAFun.apply(qkv, cu, p, max_s, True), qkv, dy)
    torch.manual_seed(4)
    seed = draw_seed(torch.device(device))
    padded = with_gradients(lambda qkv: _padded((p, max_s), qkv, cu, seed), qkv, dy)
    for ours, expected in zip(actual, padded, strict=True):
        torch.testing.assert_close(ours, expected)


def test_second_derivative(device):
    qkv = torch.randn(9, 3, 2, 4, device=device, dtype=torch.float64, requires_grad=True)
    cu = starts([3, 5], device)

    def function(qkv):
        torch.manual_seed(4)
        return FMHAFun.apply(qkv, cu, 0.3, 5, True)

    assert torch.autograd.gradcheck(function, qkv)
    assert torch.autograd.gradgradcheck(function, qkv)


def test_module_compiles(device):
    config = SimpleNamespace(
        attention_probs_dropout_prob=0.2, num_attention_heads=2, hidden_size=16
    )
    module, cu = FMHA(config), starts([3, 5], device)
    qkv = torch.randn(8, 48, device=device, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    actual = compiled(qkv, cu, 5)
    torch.manual_seed(1)
    torch.testing.assert_close(actual, module(qkv, cu, 5))
    evaluated = module(qkv, cu, 5, is_training=False)
    expected = oracle(qkv.detach().view(8, 3, 2, 8), [3, 5]).flatten(1)
    torch.testing.assert_close(evaluated, expected)
    with pytest.raises(ValueError, match="hidden_size must be a multiple"):
        FMHA(SimpleNamespace(**{**vars(config), "hidden_size": 15}))
    with pytest.raises(ValueError, match=r"qkv must have shape \[total, 48\]"):
        module(qkv[:, :3], cu, 5)


QKV, CU = torch.ones(8, 3, 2, 4), starts([3, 5], "cpu")
BAD = {
    "integers": (TypeError, "qkv must be a float64", (QKV.int(), CU, 0.1, 5)),
    "shape": (ValueError, r"qkv must have shape \[total, 3", (QKV[:, :2], CU, 0.1, 5)),
    "lengths": (TypeError, "cu_seqlens must be an int32 tensor", (QKV, CU.float(), 0.1, 5)),
    "no sequence": (
        ValueError,
        r"cu_seqlens must have shape \[batch \+ 1\]",
        (QKV, CU[:1], 0.1, 5),
    ),
    "falls": (ValueError, "cu_seqlens must rise", (QKV, CU.flip(0), 0.1, 5)),
    "long": (ValueError, "by at most max_s, 4", (QKV, CU, 0.1, 4)),
    "beyond": (ValueError, "cu_seqlens must rise", (QKV[:7], CU, 0.1, 5)),
    "max_s": (ValueError, "max_s must be positive", (QKV, CU, 0.1, 0)),
    "probability": (ValueError, "p_dropout must be", (QKV, CU, -0.1, 5)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"FMHAFun: .*{text}"):
        FMHAFun.apply(*given, True)
