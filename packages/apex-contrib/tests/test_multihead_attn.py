"""Attention modules and functions against an own float64 oracle, and Apex's extension module."""

import pytest
import torch
from torch.nn import functional as F

from apex.contrib._shared.native.philox import uniform_rows
from apex.contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn
from apex.contrib.multihead_attn.encdec_multihead_attn_func import EncdecAttnFunc, encdec_attn_func
from apex.contrib.multihead_attn.fast_encdec_multihead_attn_func import fast_encdec_attn_func
from apex.contrib.multihead_attn.fast_encdec_multihead_attn_norm_add_func import (
    fast_encdec_attn_norm_add_func,
)
from apex.contrib.multihead_attn.fast_self_multihead_attn_func import fast_self_attn_func
from apex.contrib.multihead_attn.fast_self_multihead_attn_norm_add_func import (
    fast_self_attn_norm_add_func,
)
from apex.contrib.multihead_attn.self_multihead_attn import jit_dropout_add
from apex.contrib.multihead_attn.self_multihead_attn_func import SelfAttnFunc, self_attn_func
from apex_testkit import FLOATS, assert_as_accurate_as

# time of queries, of keys, batch, heads, features of a head
SHAPES = {
    "odd": (7, 9, 3, 2, 5),
    "one": (1, 1, 1, 1, 3),
    "empty": (3, 4, 0, 2, 4),
    "more": (33, 20, 2, 4, 8),
}
MASKS = ("none", "bool", "uint8", "added", "time")
CHECKED = [(s, d, "bool") for s in SHAPES for d in FLOATS] + [
    ("odd", d, m) for m in MASKS if m != "bool" for d in FLOATS
]


def attention(q, k, v, heads, mask, keep=None, p=0.0):
    """Of ``[t, b, e]``, written with einsum, and dropout by a given mask."""
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    scores = torch.einsum("tbhd,sbhd->bhts", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    if keep is not None:
        weights = torch.where(keep, weights / (1 - p), 0)
    return torch.einsum("bhts,sbhd->tbhd", weights, v).flatten(2), weights.mean(1)


def added_mask(mask, kind, dtype):
    """Any mask as numbers to add to ``[b, h, t, s]``."""
    if mask is None:
        return None
    numbers = mask if kind == "added" else torch.where(mask != 0, -torch.inf, 0.0)
    return (numbers if kind == "time" else numbers[:, None, None]).to(dtype)


def make_mask(kind, t, s, b, device):
    shape = (t, s) if kind == "time" else (b, s)
    hidden = torch.rand(shape, device=device) < 0.3
    hidden[:, :1] = False
    masks = {"none": None, "uint8": hidden.to(torch.uint8), "added": -10000.0 * hidden}
    return masks.get(kind, hidden)


def parts(weight, heads, count):
    """The matrices, or vectors, of a weight ``[heads, count, d, ...]``."""
    each = weight.unflatten(0, (heads, count, -1))
    return [each[:, i].flatten(0, 1) for i in range(count)]


def self_oracle(x, params, heads, mask, keep=None, p=0.0):
    w_in, w_out, b_in, b_out, gamma, beta = params
    y = x if gamma is None else F.layer_norm(x, x.shape[-1:], gamma, beta)
    biases = [None] * 3 if b_in is None else parts(b_in, heads, 3)
    q, k, v = (F.linear(y, w, b) for w, b in zip(parts(w_in, heads, 3), biases, strict=True))
    context, weights = attention(q, k, v, heads, mask, keep, p)
    y = F.linear(context, w_out, b_out)
    return (y if gamma is None else x + y), weights


def encdec_oracle(x, y, params, heads, mask, keep=None, p=0.0):
    w_q, w_kv, w_out, b_q, b_kv, b_out, gamma, beta = params
    queries = x if gamma is None else F.layer_norm(x, x.shape[-1:], gamma, beta)
    (w_k, w_v), (b_k, b_v) = (
        parts(w_kv, heads, 2),
        [None] * 2 if b_kv is None else parts(b_kv, heads, 2),
    )
    q, k, v = F.linear(queries, w_q, b_q), F.linear(y, w_k, b_k), F.linear(y, w_v, b_v)
    context, weights = attention(q, k, v, heads, mask, keep, p)
    out = F.linear(context, w_out, b_out)
    return (out if gamma is None else x + out), weights


def with_gradients(function, tensors, dy):
    """Outputs, weights, and gradients of all tensors that are not None."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    y, weights = function(*leaves)
    given = [t for t in leaves if t is not None]
    return y.detach(), weights.detach(), *torch.autograd.grad(y, given, dy)


def random_tensors(shapes, dtype, device):
    make = lambda s: (torch.randn(s, device=device) / (s[-1] ** 0.5 if len(s) == 2 else 1)).to(
        dtype
    )
    return [None if s is None else make(s) for s in shapes]


def self_shapes(e, bias, norm):
    return [(3 * e, e), (e, e), (3 * e,) if bias else None, (e,) if bias else None] + (
        [(e,), (e,)] if norm else [None, None]
    )


def module_of(cls, params, names, *arguments, **options):
    module = cls(*arguments, **options).to(params[0].device, params[0].dtype)
    state = {n: t for n, t in zip(names, params, strict=True) if t is not None}
    module.load_state_dict(state)
    return module


SELF_NAMES = ["in_proj_weight", "out_proj_weight", "in_proj_bias", "out_proj_bias"]
ENCDEC_NAMES = [f"in_proj_weight_{n}" for n in ("q", "kv")] + ["out_proj_weight"]
ENCDEC_NAMES += [f"in_proj_bias_{n}" for n in ("q", "kv")] + ["out_proj_bias"]
NORM_NAMES = ["lyr_nrm_gamma_weights", "lyr_nrm_beta_weights"]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm_add"])
@pytest.mark.parametrize(("shape", "dtype", "kind"), CHECKED, ids=str)
def test_self_attention(shape, dtype, kind, norm, device):
    t, _, b, heads, size = SHAPES[shape]
    e, bias = heads * size, shape != "more"
    x, dy, *params = random_tensors([(t, b, e)] * 2 + self_shapes(e, bias, norm), dtype, device)
    mask = make_mask(kind, t, t, b, device)
    options = {"mask_additive": kind == "added", "include_norm_add": norm, "bias": bias}
    names = SELF_NAMES + NORM_NAMES
    module = module_of(SelfMultiheadAttn, params, names, e, heads, **options)

    def ours(x, *params):
        state = {n: t for n, t in zip(names, params, strict=True) if t is not None}
        which = {"attn_mask" if kind == "time" else "key_padding_mask": mask}
        call = {**which, "need_weights": True}
        return torch.func.functional_call(module, state, (x, x, x), call)

    def reference(x, dy, *params):
        of = lambda x, *params: self_oracle(x, params, heads, added_mask(mask, kind, x.dtype))
        return with_gradients(of, [x, *params], dy)

    actual = with_gradients(ours, [x, *params], dy)
    # Every product is rounded, in both directions; float64 rounds as often as truth.
    assert_as_accurate_as(reference, actual, x, dy, *params, ulps=16.0)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm_add"])
@pytest.mark.parametrize(("shape", "dtype", "kind"), CHECKED[::3], ids=str)
def test_encdec_attention(shape, dtype, kind, norm, device):
    t, s, b, heads, size = SHAPES[shape]
    e, bias, kind = heads * size, shape != "more", "bool" if kind == "added" else kind
    shapes = [(e, e), (2 * e, e), (e, e), *([(e,), (2 * e,), (e,)] if bias else [None] * 3)]
    shapes += [(e,), (e,)] if norm else [None, None]
    x, dy, y, *params = random_tensors([(t, b, e)] * 2 + [(s, b, e)] + shapes, dtype, device)
    mask = make_mask(kind, t, s, b, device)
    names = ENCDEC_NAMES + NORM_NAMES
    options = {"include_norm_add": norm, "bias": bias}
    module = module_of(EncdecMultiheadAttn, params, names, e, heads, **options)

    def ours(x, y, *params):
        state = {n: t for n, t in zip(names, params, strict=True) if t is not None}
        which = {"attn_mask" if kind == "time" else "key_padding_mask": mask}
        call = {**which, "need_weights": True}
        return torch.func.functional_call(module, state, (x, y, y), call)

    def reference(x, y, dy, *params):
        of = lambda x, y, *params: encdec_oracle(
            x, y, params, heads, added_mask(mask, kind, x.dtype)
        )
        return with_gradients(of, [x, y, *params], dy)

    actual = with_gradients(ours, [x, y, *params], dy)
    assert_as_accurate_as(reference, actual, x, y, dy, *params, ulps=16.0)


def keep_of(seed_state, shape, p, device):
    """What the next dropout after ``manual_seed(seed_state)`` keeps."""
    torch.manual_seed(seed_state)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    return uniform_rows(seed, torch.Size(shape)) >= p


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout(dtype, device):
    """Outputs and gradients are those of the kept weights; evaluation drops nothing."""
    (t, _, b, heads, size), p = SHAPES["odd"], 0.3
    e = heads * size
    x, dy, *params = random_tensors([(t, b, e)] * 2 + self_shapes(e, True, False), dtype, device)
    keep = keep_of(3, (b, heads, t, t), p, device)

    def ours(x, *params):
        torch.manual_seed(3)
        w_in, w_out, b_in, b_out, *_ = params
        y = self_attn_func(
            False, True, heads, size**-0.5, x, w_in, w_out, b_in, b_out, None, False, p
        )
        return y, y

    def reference(x, dy, *params):
        of = lambda x, *params: (self_oracle(x, params, heads, None, keep, p)[0],) * 2
        return with_gradients(of, [x, *params], dy)

    actual = with_gradients(ours, [x, *params], dy)
    assert_as_accurate_as(reference, actual, x, dy, *params, ulps=16.0)
    module = SelfMultiheadAttn(e, heads, dropout=p).to(device, dtype)
    module.in_proj_weight.data, module.out_proj_weight.data = params[:2]
    evaluated, _ = module(x, x, x, is_training=False)
    again, _ = module(x, None, None, is_training=False)
    assert torch.equal(evaluated, again)
    assert not torch.equal(module(x, x, x)[0], evaluated)


def test_norm_add_drops_twice(device):
    t, b, heads, e, p = 6, 2, 2, 8, 0.5
    x = torch.randn(t, b, e, device=device, dtype=torch.float64)
    module = SelfMultiheadAttn(e, heads, dropout=p, include_norm_add=True).to(device, torch.float64)
    torch.manual_seed(4)
    y, _ = module(x, x, x)
    torch.manual_seed(4)
    make = lambda: torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    keep = uniform_rows(make(), torch.Size((b, heads, t, t))) >= p
    keep_added = uniform_rows(make(), x.shape) >= p
    norm = (module.lyr_nrm_gamma_weights, module.lyr_nrm_beta_weights)
    params = (module.in_proj_weight, module.out_proj_weight, None, None, *norm)
    expected = self_oracle(x, params, heads, None, keep, p)[0] - x
    torch.testing.assert_close(y, x + torch.where(keep_added, expected / (1 - p), 0))
    torch.manual_seed(1)
    keep = keep_of(1, (3, 5), p, device)
    torch.manual_seed(1)
    ones = torch.ones(3, 5, device=device)
    assert torch.equal(jit_dropout_add(ones, ones, p, True), 1 + 2.0 * keep)
    assert torch.equal(jit_dropout_add(ones, ones, p, False), 2 * ones)


def test_names_and_layouts(device):
    """State dicts have Apex's names, with and without biases; separate parameters are the same."""
    x = torch.randn(5, 2, 12, device=device)
    joined = SelfMultiheadAttn(12, 3, bias=True).to(device)
    assert list(joined.state_dict()) == SELF_NAMES
    separate = SelfMultiheadAttn(12, 3, bias=True, separate_qkv_params=True, impl="default").to(
        device
    )
    names = [f"{n}_weight" for n in "qkv"] + ["out_proj_weight"]
    assert list(separate.state_dict()) == names + [f"{n}_bias" for n in "qkv"] + ["out_proj_bias"]
    joined.in_proj_bias.data.normal_()
    for kind in ("weight", "bias"):
        for name, part in zip("qkv", parts(getattr(joined, f"in_proj_{kind}"), 3, 3), strict=True):
            getattr(separate, f"{name}_{kind}").data.copy_(part)
        getattr(separate, f"out_proj_{kind}").data.copy_(getattr(joined, f"out_proj_{kind}"))
    torch.testing.assert_close(separate(x, x, x)[0], joined(x, x, x)[0])
    encdec = EncdecMultiheadAttn(12, 3, include_norm_add=True)
    assert list(encdec.state_dict()) == ENCDEC_NAMES[:3] + NORM_NAMES
    assert encdec.out_proj_bias is None
    old = {**encdec.state_dict(), "lyr_nrm.weight": torch.full((12,), 2.0)}
    del old["lyr_nrm_gamma_weights"]
    encdec.load_state_dict(old)
    assert torch.equal(encdec.lyr_nrm_gamma_weights, torch.full((12,), 2.0))
    for module in (SelfMultiheadAttn, EncdecMultiheadAttn):
        values = module(12, 3, bias=True, include_norm_add=True).named_parameters()
        of_vectors = {name: value.unique().tolist() for name, value in values if value.dim() == 1}
        ones = {name for name, value in of_vectors.items() if value == [1]}
        assert ones == {"lyr_nrm_gamma_weights"}
        assert all(value == [0] for name, value in of_vectors.items() if name not in ones)
    wide = SelfMultiheadAttn(512, 8).in_proj_weight
    assert abs(wide.std() / (6 / (2 * 512)) ** 0.5 * 3**0.5 - 1) < 0.02  # as three of [e, e]


def test_functions_of_apex_agree(device):
    double = {"dtype": torch.float64, "device": device}
    x, y = torch.randn(5, 2, 12, **double), torch.randn(4, 2, 12, **double)
    heads, scale = 3, 0.5
    w_in, w_out, w_kv = (torch.randn(n * 12, 12, **double) for n in (3, 1, 2))
    gamma, beta = torch.rand(12, **double), torch.rand(12, **double)
    pad, pad_y = make_mask("bool", 5, 5, 2, device), make_mask("bool", 5, 4, 2, device)
    plain = fast_self_attn_func(False, True, heads, x, w_in, w_out, None, None, pad, False, 0.0)
    given = (x, w_in, w_out, None, None, pad, False, 0.0)
    torch.testing.assert_close(SelfAttnFunc.apply(False, True, heads, scale, *given), plain)
    normed = F.layer_norm(x, (12,), gamma, beta)
    inner = fast_self_attn_func(
        False, True, heads, normed, w_in, w_out, None, None, pad, False, 0.0
    )
    actual = fast_self_attn_norm_add_func(False, True, heads, x, gamma, beta, w_in, w_out, pad, 0.0)
    torch.testing.assert_close(actual, x + inner)
    given = (w_out, w_kv, w_out)
    cross = fast_encdec_attn_func(False, True, heads, normed, y, *given, pad_y, 0.0)
    same = encdec_attn_func(
        False, True, heads, scale, normed, y, *given, None, None, None, pad_y, 0.0
    )
    torch.testing.assert_close(same, cross)
    assert EncdecAttnFunc.apply is encdec_attn_func
    given = (x, y, gamma, beta, w_out, w_kv, w_out, pad_y, 0.0)
    actual = fast_encdec_attn_norm_add_func(False, True, heads, *given)
    torch.testing.assert_close(actual, x + cross)


@pytest.mark.parametrize("norm", [False, True])
def test_compiles_and_differentiates(norm, device):
    """In one graph, with dropout; and twice, and within torch.func."""
    module = SelfMultiheadAttn(8, 2, dropout=0.25, bias=True, include_norm_add=norm)
    module = module.to(device, torch.float64)
    x = torch.randn(3, 2, 8, device=device, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool, device=device)

    def function(x):
        torch.manual_seed(1)
        return module(x, x, x, key_padding_mask=mask)[0]

    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: module(x, x, x, key_padding_mask=mask)[0], fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(1)
    y = compiled(x)
    torch.testing.assert_close(y, function(x))
    (actual,) = torch.autograd.grad(y.sin().sum(), x)
    (expected,) = torch.autograd.grad(function(x).sin().sum(), x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.func.grad(lambda x: function(x).sin().sum())(x.detach()), expected
    )
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_autocast(device):
    module = SelfMultiheadAttn(8, 2, bias=True, include_norm_add=True).to(device)
    x = torch.randn(3, 2, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y, _ = module(x, x, x)
    half = module.bfloat16()
    assert torch.equal(y, half(x.bfloat16(), None, None)[0])


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_backward_under_autocast_changes_nothing(p, device):
    module = SelfMultiheadAttn(32, 2, dropout=p, bias=True, include_norm_add=True).to(device)
    x = torch.randn(16, 2, 32, device=device, requires_grad=True)
    leaves, y = [x, *module.parameters()], module(x, x, x)[0]
    outside = torch.autograd.grad(y, leaves, y.detach(), retain_graph=True)
    with torch.autocast(device.type, torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(y, leaves, y.detach()), outside))


@pytest.mark.parametrize("wanted", ["queries", "keys", "weights"])
def test_only_what_is_needed(wanted, device):
    module = EncdecMultiheadAttn(8, 2, dropout=0.3, bias=True).to(device, torch.float64)
    x, y = (torch.randn(n, 2, 8, device=device, dtype=torch.float64) for n in (3, 5))
    leaves = {"queries": [x], "keys": [y], "weights": [module.in_proj_weight_kv]}[wanted]

    def gradients(inputs):
        for leaf in inputs:
            leaf.requires_grad_()
        torch.manual_seed(3)
        return torch.autograd.grad(module(x, y, y)[0].sin().sum(), leaves)

    module.requires_grad_(False)
    actual = gradients(leaves)
    assert torch.equal(actual[0], gradients([x, y, *module.parameters()])[0])


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8)], ids=str)
def test_of_nothing(shape, device):
    module = SelfMultiheadAttn(8, 2, dropout=0.3, bias=True).to(device)
    x = torch.randn(shape, device=device, requires_grad=True)
    y, _ = module(x, x, x)
    gradients = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    assert y.shape == gradients[0].shape == shape
    assert not any(g.any() for g in gradients[1:])


def test_a_batch_of_gradients(device):
    module = SelfMultiheadAttn(8, 2, dropout=0.3, bias=True).to(device, torch.float64)
    x = torch.randn(3, 2, 8, device=device, dtype=torch.float64, requires_grad=True)
    y, dy = module(x, x, x)[0], torch.randn(4, 3, 2, 8, device=device, dtype=torch.float64)
    run = lambda dy, **how: torch.autograd.grad(y, x, dy, retain_graph=True, **how)[0]
    torch.testing.assert_close(run(dy, is_grads_batched=True), torch.stack([run(d) for d in dy]))


X = torch.ones(3, 2, 8)
BAD = {
    "two masks": (ValueError, "not both", {"key_padding_mask": X, "attn_mask": X}),
    "key": (ValueError, "key must be the tensor query", {"key": X.clone()}),
    "mask": (ValueError, r"key_padding_mask must have shape \[2, 3\]", {"key_padding_mask": X[0]}),
    "time mask": (ValueError, r"attn_mask must have shape \[3, 3\]", {"attn_mask": X[0]}),
    "shape": (ValueError, r"inputs must have shape \[time", {"query": X[0]}),
    "features": (ValueError, r"input_weights must have shape \[12, 4\]", {"query": X[..., :4]}),
    "dtype": (TypeError, "input_weights is torch.float32, but", {"query": X.double()}),
    "integers": (TypeError, "inputs must be a float64", {"query": X.int()}),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    query = given.pop("query", X) if "query" in given else X
    call = {"query": query, "key": query, "value": query, **given}
    with pytest.raises(error, match=f"SelfMultiheadAttn: .*{text}"):
        SelfMultiheadAttn(8, 2)(**call)


def test_bad_parameters_of_the_norm():
    w_in, w_out, gamma = torch.randn(24, 8), torch.randn(8, 8), torch.randn(8)
    call = lambda *norm: fast_self_attn_norm_add_func(
        False, True, 2, X, *norm, w_in, w_out, None, 0.0
    )
    name = "fast_self_attn_norm_add_func"
    with pytest.raises(TypeError, match=f"{name}: gamma must be torch.float32.* got NoneType"):
        call(None, gamma)
    with pytest.raises(TypeError, match=f"{name}: beta must be torch.float32.* got torch.float64"):
        call(gamma, gamma.double())
    with pytest.raises(ValueError, match=rf"{name}: beta must have shape \[8\] .* got \[7\]"):
        call(gamma, gamma[:7])


def test_bad_arguments_of_modules():
    for given, text in [
        ((8, 3), "embed_dim must be a positive multiple"),
        ((8, 2, 1.5), r"dropout_prob must be in \[0, 1\]"),
        ((8, 2, 0.0, False, False, "slow"), "impl must be"),
    ]:
        for module in (SelfMultiheadAttn, EncdecMultiheadAttn):
            with pytest.raises(ValueError, match=text):
                module(*given)
    with pytest.raises(ValueError, match="value must be the tensor key"):
        EncdecMultiheadAttn(8, 2)(X, X, X.clone())
    with pytest.raises(ValueError, match="inputs_kv must have shape"):
        EncdecMultiheadAttn(8, 2)(X, X[:, :1], None)


@pytest.mark.parametrize("kind", [SelfMultiheadAttn, EncdecMultiheadAttn])
def test_parameters_of_a_subclass_are_not_drawn(kind):
    module = kind(8, 2)
    module.register_parameter("own", torch.nn.Parameter(torch.zeros(3, 8)))
    before = [p.clone() for p in module.parameters()]
    module.reset_parameters()
    drawn = {
        n for (n, p), b in zip(module.named_parameters(), before, strict=True) if (p != b).any()
    }
    assert drawn == {n for n in dict(module.named_parameters()) if "weight" in n}
