"""Where torch's own attention is called, for every combination; and that it computes the same.

Only GPUs call it. Here a CPU is made to.
"""

import inspect
import itertools

import pytest
import torch
from torch.nn import functional as F

from apex.contrib.fmha import FMHAFun
from apex.contrib.fmha import fmha as fmha_module
from apex.contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn, attention
from apex.contrib.multihead_attn import torch_attention as chosen
from apex_testkit import FLOATS, assert_as_accurate_as

HALVES = torch.float16, torch.bfloat16
KINDS = "none", "padding", "time", "added", "rounded"


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu"])
@pytest.mark.parametrize("p", [0, 0.0, 0.1, 1.0])
def test_every_choice_of_sdpa(device_type, p):
    taken = {
        (mask, weights)
        for mask, weights in itertools.product(KINDS, (False, True))
        if chosen.takes_sdpa(device_type, p, mask, weights)
    }
    on_gpu = {(mask, False) for mask in ("none", "padding", "time", "added")}
    assert taken == (on_gpu if device_type == "cuda" and p == 0 else set())


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("is_rocm", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("has_flash", [False, True])
def test_every_choice_of_varlen(device_type, is_rocm, p, has_flash):
    names = chosen.varlen_parameters()
    changed = ("query", "key", "value", "cu_seqlens", *names[4:])
    given = itertools.product(FLOATS, (0, 4, 8, 64, 256, 264), (names, changed, ()))
    taken = {
        (dtype, size, parameters)
        for dtype, size, parameters in given
        if chosen.takes_varlen(device_type, is_rocm, dtype, size, p, has_flash, parameters)
    }
    serves = device_type == "cuda" and not is_rocm and p == 0 and has_flash
    expected = {(dtype, size, names) for dtype in HALVES for size in (8, 64, 256)}
    assert taken == (expected if serves else set())


def test_varlen_of_this_torch():
    """Seven arguments by position; what follows means full attention with the usual scale."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    assert tuple(parameters)[:7] == chosen._VARLEN
    inspect.signature(varlen_attn).bind(*range(7))
    unset = {"is_causal": False, "window_size": (-1, -1), "scale": None, "seqused_k": None}
    assert {"is_causal", "window_size"} & set(parameters)
    for name, parameter in list(parameters.items())[7:]:
        assert parameter.default == unset.get(name, parameter.default)
        assert parameter.default is not inspect.Parameter.empty


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kinds_of_masks(dtype):
    mask = torch.zeros(2, 3)
    assert chosen.mask_kind(None, False, False, dtype) == "none"
    assert chosen.mask_kind(mask, False, False, dtype) == "padding"
    assert chosen.mask_kind(mask, True, False, dtype) == "time"
    assert chosen.mask_kind(mask.to(dtype), False, True, dtype) == "added"
    other = torch.float32 if dtype != torch.float32 else torch.float64
    assert chosen.mask_kind(mask.to(other), False, True, dtype) == "rounded"


@pytest.fixture
def forced(monkeypatch):
    """A CPU that takes what a GPU takes; gives the number of calls so far."""
    calls = []
    takes_sdpa, by_sdpa = chosen.takes_sdpa, chosen.attend_without_weights
    monkeypatch.setattr(attention, "takes_sdpa", lambda _, *rest: takes_sdpa("cuda", *rest))
    count = lambda *given: calls.append(0) or by_sdpa(*given)
    monkeypatch.setattr(attention, "attend_without_weights", count)
    monkeypatch.setattr("apex.contrib._shared.native.half_matmul._slow", ())
    return lambda: len(calls)


def hidden_by(kind, t, s, b, dtype):
    mask = torch.rand((t, s) if kind == "time" else (b, s)) < 0.3
    mask[:, :1] = False
    return {"none": None, "uint8": mask.to(torch.uint8)}.get(
        kind, (-30.0 * mask).to(dtype) if kind == "added" else mask
    )


def call_of(kind, mask):
    return {"attn_mask" if kind == "time" else "key_padding_mask": mask}


def with_gradients(function, dy, given):
    leaves = [t.detach().requires_grad_() for t in given]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def oracle(x, w_in, w_out, heads, mask, kind):
    q, k, v = F.linear(x, w_in).unflatten(2, (heads, 3, -1)).unbind(3)
    scores = torch.einsum("tbhd,sbhd->bhts", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        numbers = mask if kind == "added" else torch.where(mask != 0, -torch.inf, 0.0)
        scores = scores + (numbers if kind == "time" else numbers[:, None, None]).to(x.dtype)
    weights = torch.softmax(scores, -1)
    return F.linear(torch.einsum("bhts,sbhd->tbhd", weights, v).flatten(2), w_out)


@pytest.mark.parametrize("kind", ["none", "bool", "uint8", "added", "time"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_as_the_oracle(dtype, kind, forced):
    t, b, heads, e = 9, 3, 2, 10
    x, dy = (torch.randn(t, b, e).to(dtype) for _ in range(2))
    w_in, w_out = ((torch.randn(n * e, e) / e**0.5).to(dtype) for n in (3, 1))
    mask = hidden_by(kind, t, t, b, dtype)
    module = SelfMultiheadAttn(e, heads, dropout=0.5, mask_additive=kind == "added").to(dtype)

    def ours(x, w_in, w_out):
        state = {"in_proj_weight": w_in, "out_proj_weight": w_out}
        options = {**call_of(kind, mask), "is_training": False}
        return torch.func.functional_call(module, state, (x, x, x), options)[0]

    def reference(dy, *given):
        return with_gradients(lambda *g: oracle(*g, heads, mask, kind), dy, given)

    actual = with_gradients(ours, dy, (x, w_in, w_out))
    assert forced() == 1
    assert_as_accurate_as(reference, actual, dy, x, w_in, w_out, ulps=16.0)


@pytest.mark.parametrize("kind", ["bool", "added", "time"])
def test_rows_that_see_nothing_are_nan(kind, forced, monkeypatch):
    """In results and gradients, exactly where the composition has them."""
    t, b, e = 5, 3, 8
    x, dy = torch.randn(t, b, e), torch.randn(t, b, e)
    mask = torch.zeros((t, t) if kind == "time" else (b, t), dtype=torch.bool)
    mask[1] = True
    mask = torch.where(mask, -torch.inf, 0.0) if kind == "added" else mask
    module = SelfMultiheadAttn(e, 2, mask_additive=kind == "added")
    function = lambda x: module(x, x, x, **call_of(kind, mask))[0]
    actual = with_gradients(function, dy, [x])
    assert forced() == 1
    monkeypatch.undo()
    expected = with_gradients(function, dy, [x])
    assert 0 < expected[0].isnan().sum() < x.numel()
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("norm", [False, True])
def test_encdec_and_norm(norm, forced, monkeypatch):
    x, y = torch.randn(4, 2, 8), torch.randn(6, 2, 8)
    module = EncdecMultiheadAttn(8, 2, dropout=0.5, bias=True, include_norm_add=norm)
    mask = hidden_by("bool", 4, 6, 2, x.dtype)
    function = lambda x, y: module(x, y, y, mask, is_training=False)[0]
    dy = torch.randn(4, 2, 8)
    actual = with_gradients(function, dy, [x, y])
    assert forced() == 1
    monkeypatch.undo()
    torch.testing.assert_close(actual, with_gradients(function, dy, [x, y]))


def test_what_stays_composed(forced):
    """Dropout, weights, empty sequences, and transforms, whose derivatives torch does not have."""
    module, x = SelfMultiheadAttn(8, 2, dropout=0.5), torch.randn(4, 2, 8)
    module(x, x, x)
    assert module(x, x, x, need_weights=True, is_training=False)[1].shape == (2, 4, 4)
    for empty in (x[:0], x[:, :0]):
        assert module(empty, empty, empty, is_training=False)[0].shape == empty.shape
    function = lambda x: module(x, x, x, is_training=False)[0].sin().sum()
    hessian = torch.func.hessian(function)(x.double()[:, :1].float())
    assert hessian.isfinite().all()
    assert forced() == 0


def test_compiles(forced):
    module, x = SelfMultiheadAttn(8, 2), torch.randn(4, 2, 8, requires_grad=True)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    function = lambda x: module(x, x, x, key_padding_mask=mask)[0]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), function(x))


def plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
    """What the kernels compute: outside of all sequences nothing is written, in both directions."""
    assert cu_seq_q.dtype == torch.int32
    assert cu_seq_q is cu_seq_k
    assert max_q == max_k
    starts = cu_seq_q.tolist()
    parts = [torch.nan * query[: starts[0]]]  # and its gradient is NaN, whatever comes back
    for begin, end in itertools.pairwise(starts):
        assert end - begin <= max_q
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1))
    return torch.cat([*parts, torch.nan * query[starts[-1] :]])


@pytest.mark.parametrize("lengths", [[4], [3, 7, 1], [2, 0, 5], [0, 0, 3]], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_packed_sequences(dtype, lengths, monkeypatch):
    """Empty sequences, and tokens before the first and behind the last, which give 0."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
    total, first = sum(lengths) + 5, 2
    qkv = torch.randn(total, 3, 2, 8).to(dtype)
    dy = torch.randn(total, 2, 8).to(dtype)
    starts = torch.tensor([first, *lengths]).cumsum(0)  # int64, too
    function = lambda qkv: FMHAFun.apply(qkv, starts, 0.5, 9, False)
    expected = with_gradients(function, dy, [qkv])
    calls = []
    serves = lambda qkv, p: calls.append(p) or True
    monkeypatch.setattr(fmha_module, "serves_packed", serves)
    monkeypatch.setattr("apex.contrib._shared.native.half_matmul._slow", ())
    actual = with_gradients(function, dy, [qkv])
    assert calls == [0.0]
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    for result in actual:
        assert not result[:first].any()
        assert not result[total - 3 :].any()


def test_packed_on_a_cpu():
    assert not chosen.serves_packed(torch.randn(4, 3, 2, 8).half(), 0.0)
