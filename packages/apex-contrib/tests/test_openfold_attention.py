"""Attention with pair bias against an own float64 oracle, by both of its ways."""

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

import apex.contrib.openfold_triton as openfold
from apex.contrib.multihead_attn import mask_softmax_dropout as ops
from apex.contrib.openfold_triton import AttnBiasJIT, AttnNoBiasJIT, AttnTri, CanSchTriMHA, mha
from apex.contrib.openfold_triton import attention as module
from apex_testkit import FLOATS, HALVES, LAYOUTS, assert_as_accurate_as
from apex_testkit.formulas import CHECKS, Case

# leading dimensions, heads, queries, keys, features
SHAPES = {
    "openfold": ((1, 6), 4, 9, 9, 16),
    "odd": ((3,), 2, 7, 5, 3),
    "one": ((1,), 1, 1, 1, 1),
    "batches": ((2, 3), 2, 5, 6, 4),
    "no batch": ((), 2, 4, 5, 8),
    "empty": ((0,), 2, 4, 5, 8),
    "no queries": ((2,), 2, 0, 5, 8),
    "no keys": ((2,), 2, 5, 0, 8),
    "long": ((2,), 2, 65, 130, 8),
}


def oracle(q, k, v, mask, bias, inf=1e4):
    """Written with einsum; masks and biases as tensors of the shape of the scores."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + (mask.to(q.dtype) - 1) * inf
    if bias is not None:
        scores = scores + bias
    return torch.einsum("...qk,...kd->...qd", torch.softmax(scores, -1), v)


def ours(q, k, v, mask, bias, inf=1e4):
    return AttnTri(q, k, v, mask, bias, inf)


def seen_keys(*shape, device):
    seen = torch.rand(shape, device=device) > 0.3
    seen[..., :1] = True  # at least one
    return seen


def masks(lead, heads, queries, keys, device):
    """OpenFold's, one for all, and ones that depend on the query, or on the head."""
    shapes = {
        "openfold": (*lead, 1, 1, keys),
        "all": (keys,),
        "queries": (*(1 for _ in lead), 1, queries, keys),
        "heads": (*lead, heads, 1, keys),
        "whole": (*lead, heads, queries, keys),
    }
    return {name: seen_keys(*shape, device=device).float() for name, shape in shapes.items()}


def operands(shape, dtype, device, bias="shared"):
    lead, heads, queries, keys, size = SHAPES[shape]
    q, k, v = (
        torch.randn(*lead, heads, n, size, device=device).to(dtype) for n in (queries, keys, keys)
    )
    shapes = {
        "shared": (*(1 for _ in lead), heads, queries, keys),
        "first": (*lead[:1], *(1 for _ in lead[1:]), heads, queries, keys),
        "whole": (*lead, heads, queries, keys),
        "keys": (keys,),
    }
    if bias is None:
        return q, k, v, None
    return q, k, v, torch.randn(shapes[bias], device=device).to(dtype)


def with_gradients(function, q, k, v, mask, bias, dy):
    given = [q, k, v] if bias is None else [q, k, v, bias]
    leaves = [t.detach().requires_grad_() for t in given]
    y = function(*leaves[:3], mask, None if bias is None else leaves[3])
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.fixture(params=["composed", "sdpa"])
def way(request, monkeypatch):
    """Both ways, whichever of them is the faster here."""
    monkeypatch.setattr(module, "_sdpa_is_faster", lambda *_: request.param == "sdpa")
    return request.param


def check(shape, dtype, kind, of_bias, device):
    q, k, v, bias = operands(shape, dtype, device, of_bias)
    mask = masks(*SHAPES[shape][:4], device).get(kind)
    dy = torch.randn(*q.shape, device=device).to(dtype)
    actual = with_gradients(ours, q, k, v, mask, bias, dy)
    reference = lambda *given: with_gradients(oracle, *given)
    # Every product, and the sum with the bias, is rounded, in both directions.
    assert_as_accurate_as(reference, actual, q, k, v, mask, bias, dy, ulps=16.0)
    assert actual[0].dtype == dtype


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, way, device):
    check(shape, dtype, "openfold", "shared", device)


@pytest.mark.parametrize("of_bias", [None, "shared", "first", "whole", "keys"])
@pytest.mark.parametrize("kind", [None, "openfold", "all", "queries", "heads", "whole"])
def test_masks_and_biases(kind, of_bias, way, device):
    for shape, dtype in (
        ("batches", torch.float32),
        ("batches", torch.bfloat16),
        ("openfold", torch.bfloat16),  # whose rows torch's kernels for GPUs take
    ):
        check(shape, dtype, kind, of_bias, device)


@pytest.mark.parametrize("of_bias", [None, "shared", "keys"])
@pytest.mark.parametrize("kind", [None, "openfold", "whole"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_gradients(dtype, kind, of_bias, way, device):
    """Torch has other kernels then."""
    for shape in ("openfold", "long"):
        q, k, v, bias = operands(shape, dtype, device, of_bias)
        mask = masks(*SHAPES[shape][:4], device).get(kind)
        with torch.no_grad():
            y = ours(q, k, v, mask, bias)
        assert_as_accurate_as(oracle, y, q, k, v, mask, bias, ulps=16.0)


@pytest.mark.parametrize("trained", ["all", "bias"])
def test_leading_ones_that_queries_lack(trained, device):
    """OpenFold's mask and bias, of queries without its first dimension; and a bias alone trained.

    Torch's kernels for GPUs have no backward for that one.
    """
    q, k, v = torch.randn(3, 6, 4, 9, 16, device=device, requires_grad=trained == "all")
    mask = seen_keys(1, 6, 1, 1, 9, device=device)
    bias = torch.randn(1, 1, 4, 9, 9, device=device, requires_grad=True)
    own = bias.detach().requires_grad_()
    y = AttnTri(q, k, v, mask, bias)
    expected = AttnTri(q[None], k[None], v[None], mask, own)
    assert torch.equal(y, expected[0])
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(bias.grad, own.grad)


@pytest.mark.parametrize("of_bias", [None, "shared", "keys"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, of_bias, device):
    """With a mask and without; rows of "batches" in float32 and of "openfold" are whole vectors."""
    for shape, dtype in (
        ("batches", torch.float32),
        ("batches", torch.bfloat16),
        ("openfold", torch.float32),
        ("openfold", torch.bfloat16),
    ):
        q, k, v, bias = operands(shape, dtype, device, of_bias)
        dy = torch.randn_like(q)
        # On a CPU, torch rounds weights to bfloat16 elsewhere where rows are not adjacent elements.
        unit = torch.finfo(dtype).eps
        near = {} if dtype == torch.float32 else {"rtol": 2 * unit, "atol": 2 * unit}
        for mask in (masks(*SHAPES[shape][:4], device)["openfold"], None):
            given = (q, k, v, mask, bias)
            laid_out = [t if t is None else LAYOUTS[layout](t) for t in given]
            actual = with_gradients(ours, *laid_out, LAYOUTS[layout](dy))
            torch.testing.assert_close(actual, with_gradients(ours, *given, dy), **near)
            with torch.no_grad():
                torch.testing.assert_close(ours(*laid_out), ours(*given), **near)


def test_a_gradient_laid_out_as_the_kernels_own(device):
    """Torch copies other gradients; this one may start anywhere."""
    q, k, v, bias = operands("openfold", torch.float32, device)
    dy = torch.randn_like(q)
    flat = LAYOUTS["misaligned"](dy.transpose(-2, -3).contiguous())
    torch.testing.assert_close(
        with_gradients(ours, q, k, v, None, bias, flat.transpose(-2, -3)),
        with_gradients(ours, q, k, v, None, bias, dy),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_query_that_sees_nothing_sees_all(dtype, way, device):
    """What is added to all scores of a row changes nothing; with inf of 1e9 scores drown in it."""
    q, k, v, bias = operands("odd", dtype, device)
    mask = torch.ones(3, 1, 1, 5, device=device)
    mask[1] = 0
    for inf in (1e2, 1e9):
        y = AttnTri(q, k, v, mask, bias, inf)
        assert y.isfinite().all()
        torch.testing.assert_close(y[[0, 2]], AttnTri(q[[0, 2]], k[[0, 2]], v[[0, 2]], None, bias))
    near = oracle(*(t.double() for t in (q, k, v)), None, bias.double())[1]
    unit = 2e3 * torch.finfo(dtype).eps  # a score near 1e2 lacks two digits
    if dtype in (torch.float64, torch.float32):
        torch.testing.assert_close(
            AttnTri(q, k, v, mask, bias, 1e2)[1].double(), near, rtol=unit, atol=unit
        )


def test_any_dtype_of_the_mask(device):
    q, k, v, bias = operands("odd", torch.float32, device)
    mask = seen_keys(3, 1, 1, 5, device=device)
    expected = AttnTri(q, k, v, mask.float(), bias)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64):
        assert torch.equal(AttnTri(q, k, v, mask.to(dtype), bias), expected)
    soft = torch.rand(3, 1, 1, 5, device=device)
    assert_as_accurate_as(oracle, ours(q, k, v, soft, bias, 10.0), q, k, v, soft, bias, 10.0)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_bias_of_another_dtype(half, way, device):
    q, k, v, bias = operands("odd", half, device)
    dy = torch.randn_like(q)
    y, *grads = with_gradients(ours, q, k, v, None, bias.float(), dy)
    same_y, *same_grads = with_gradients(ours, q, k, v, None, bias, dy)
    assert torch.equal(y, same_y)
    assert grads[3].dtype == torch.float32
    assert torch.equal(grads[3].to(half), same_grads[3])


def of_case(dtype, device, size=5):
    q, k, v = (torch.randn(3, 2, 4, size, device=device).to(dtype) for _ in "qkv")
    mask = seen_keys(3, 1, 1, 4, device=device).to(dtype)
    return q, k, v, mask, torch.randn(1, 2, 4, 4, device=device).to(dtype)


CASE = Case(
    ours,
    of_case,
    oracle,
    grads=(0, 1, 2, 4),
    rows=(0, 1, 2),
    operators=(ops.mask_softmax_forward, ops.mask_softmax_backward),
    decompositions=openfold.decompositions,
    ulps=16,
    without={"batch invariance": "torch's matrix products choose by size"},
)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_composed(check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASE, device)


def test_a_batch_of_biases_alone(device):
    """In-place sums in vmap cannot widen what they write to."""
    q, k, v, mask, bias = of_case(torch.float32, device)
    many = torch.stack([bias, 2 * bias])
    with torch.no_grad():
        actual = torch.func.vmap(lambda bias: ours(q, k, v, mask, bias))(many)
    torch.testing.assert_close(actual, torch.stack([ours(q, k, v, mask, b) for b in many]))


@pytest.mark.parametrize("check", ["vmap", "autocast"])
def test_torchs_own_way(check, device, monkeypatch):
    """What else runs it; transforms that differentiate take the formula in either case."""
    monkeypatch.setattr(module, "_sdpa_is_faster", lambda *_: True)
    CHECKS[check](CASE, device)


@pytest.mark.parametrize("size", [5, 8])
def test_torchs_own_way_is_taken(size, device, monkeypatch):
    """On a CPU without gradients, where it is the faster one then; on a GPU with a kernel."""
    taken = []
    by_sdpa = module._by_sdpa
    monkeypatch.setattr(module, "_by_sdpa", lambda *given: taken.append(1) or by_sdpa(*given))
    is_cpu = device.type == "cpu"
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for trained in ((), (0, 1, 2, 4), (4,)):  # nothing; all; the bias, which no kernel trains
            given = of_case(dtype, device, size)
            for i in trained:
                given[i].requires_grad_()
            taken.clear()
            AttnTri(*given)
            is_served = dtype != torch.float64 and (is_cpu or size == 8)
            is_trainable = not trained or (0 in trained and not is_cpu)
            assert len(taken) == (is_served and is_trainable)
            with torch.no_grad():
                AttnTri(*given)
            assert len(taken) == (is_served and is_trainable) + is_served


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_aligned(dtype, device):
    """What starts at vectors, along every stride, is no copy; the rest is a contiguous one."""
    x = torch.randn(2, 3, 4, 8, device=device).to(dtype)
    aligned = lambda x: module._aligned(x, x.stride()[:-1])
    first = x[:, :1]  # a stride that nothing steps along
    for kept in (x, x.transpose(1, 2), x[1:], x[:, ::2], first, x[..., :1, :].expand(2, 3, 4, 8)):
        assert aligned(kept) is kept
    flat = first.as_strided(first.shape, (96, 5, 8, 1))
    for other in (flat, x[..., 3:], *(LAYOUTS[n](x) for n in LAYOUTS if n != "contiguous")):
        copy = aligned(other)
        assert copy.is_contiguous()
        assert copy.storage_offset() == 0
        assert torch.equal(copy, other)


def test_compiles_with_any_size(way, device):
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ("openfold", "batches"):
        q, k, v, bias = operands(shape, torch.float32, device)
        mask = masks(*SHAPES[shape][:4], device)["openfold"]
        dy = torch.randn_like(q)
        torch.testing.assert_close(
            with_gradients(compiled, q, k, v, mask, bias, dy),
            with_gradients(ours, q, k, v, mask, bias, dy),
        )


def test_autocast_reaches_into_no_product(device):
    """Results are those of the tensors cast; a backward under autocast gives the same bits."""
    q, k, v, mask, bias = of_case(torch.float32, device)
    halves = [t.bfloat16() for t in (q, k, v)]
    dy = torch.randn_like(halves[0])
    expected = with_gradients(ours, *halves, mask, bias.bfloat16(), dy)
    with torch.autocast(device.type, torch.bfloat16):
        actual = with_gradients(ours, *halves, mask, bias.bfloat16(), dy)
        cast = with_gradients(ours, q, k, v, mask, bias, dy)
        assert ours(*(t.double() for t in (q, k, v)), mask, None).dtype == torch.float64
    assert all(map(torch.equal, actual, expected))
    assert [t.dtype for t in cast] == [torch.bfloat16] + [torch.float32] * 4
    assert all(torch.equal(a.bfloat16(), e) for a, e in zip(cast, expected, strict=True))


def test_names_of_apex(device):
    q, k, v, mask, bias = of_case(torch.float32, device)
    expected = AttnTri(q, k, v, mask, bias)
    torch.testing.assert_close(expected, oracle(q, k, v, mask, bias, 1e9))
    for y in (
        AttnTri(q[None], k[None], v[None], mask[None], bias[None], 1e9, False)[0],
        mha.FusedAttenionCoreFunc.apply(q, k, v, mask, bias, inf=1e9, is_training=True),
        mha.FusedAttenionCoreFunc.forward(None, q, k, v, mask, bias),
        AttnBiasJIT(q, k, v, mask, bias, 1e9),
        mha._attention_bias(query=q, key=k, value=v, mask=mask, bias=bias, inf=1e9),
    ):
        assert torch.equal(y, expected)
    without = AttnTri(q, k, v, mask)
    assert torch.equal(AttnNoBiasJIT(q, k, v, mask, 1e9), without)
    assert torch.equal(mha._attention_no_bias(q, k, v, mask, 1e9), without)
    names = ["q", "k", "v", "mask", "bias", "inf", "is_training"]
    spec = inspect.getfullargspec(AttnTri)
    assert (spec.args, spec.defaults) == (names, (None, None, 1e9, True))
    spec = inspect.getfullargspec(mha.FusedAttenionCoreFunc.forward)
    assert (spec.args, spec.defaults) == (["ctx", *names], (None, None, 1e9, True))


def test_what_schedules_triton_in_apex():
    assert not mha.is_enabled()
    mha.enable()
    assert mha.is_enabled()
    mha.disable()
    assert not mha.is_enabled()
    shape = [1, 128, 4, 256, 32]
    for given in (shape, tuple(shape), torch.Size(shape)):
        assert CanSchTriMHA(given) is True
    for wrong in ({"has_bias": False}, {"inf": 1e8}, {"training": False}):
        assert CanSchTriMHA(shape, **wrong) is False
    for other in ([128, 4, 256, 32], [2, 128, 4, 256, 32], [1, 8, 4, 256, 32], [1, 16, 4, 64, 32]):
        assert CanSchTriMHA(other) is False
    for n, expected in ((256, (128, 64, 4, 1)), (100, (128, 64, 4, 1)), (5, (16, 16, 2, 1))):
        assert mha.schedule_triton_mha([1, 128, 4, n, 32]) == expected
    assert mha.schedule_triton_mha(shape, fwd=False) == (64, 64, 4, 1)


def test_nothing_is_tuned(capsys):
    assert openfold.sync_triton_auto_tune_cache_across_gpus() is None
    assert openfold.sync_triton_auto_tune_cache_across_gpus(strict=False, verbose=True) is None
    assert capsys.readouterr() == ("", "")
    file = openfold._save_triton_auto_tune_cache(strict=True)
    openfold._load_triton_auto_tune_cache(file)
    foreign = type(file)(b'{"_layer_norm_forward": {}}')
    with pytest.raises(ValueError, match="kernels that are not here, _layer_norm_forward"):
        openfold._load_triton_auto_tune_cache(foreign)
    foreign.seek(0)
    openfold._load_triton_auto_tune_cache(foreign, strict=False)


def test_imports_need_no_triton():
    code = (
        "import sys; sys.modules['triton'] = sys.modules['einops'] = None\n"
        "import apex.contrib.openfold_triton as o, apex.contrib.openfold_triton.mha\n"
        "import apex.contrib.openfold_triton.layer_norm\n"
        "import apex.contrib.openfold_triton.fused_adam_swa\n"
        "print(*(getattr(o, name).__name__ for name in o.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == openfold.__all__


Q = torch.ones(2, 3, 4, 5)
BAD = {
    "integers": (TypeError, "query must be a float64", (Q.int(), Q, Q)),
    "dtypes": (TypeError, "value is torch.float64 on cpu, but query", (Q, Q, Q.double())),
    "devices": (TypeError, "key is torch.float32 on meta", (Q, Q.to("meta"), Q)),
    "heads": (ValueError, r"\[2, 2, 4, 5\] and", (Q, Q[:, :2], Q)),
    "keys": (ValueError, r"and \[2, 3, 2, 5\]", (Q, Q, Q[:, :, :2])),
    "features": (ValueError, "query must be", (Q, Q[..., :3], Q)),
    "no features": (ValueError, "query must be", (Q[..., :0], Q[..., :0], Q)),
    "a vector": (ValueError, "query must be", (Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0])),
    "mask": (ValueError, r"mask must be broadcastable to the scores, \[2, 3, 4, 4\], got \[5\]",
             (Q, Q, Q, torch.ones(5))),
    "long mask": (ValueError, "mask must be broadcastable", (Q, Q, Q, torch.ones(2, 1, 1, 1, 4))),
    "bias": (ValueError, "bias must be broadcastable", (Q, Q, Q, None, torch.ones(3, 3, 4, 4))),
    "integer bias": (TypeError, "bias must be a float64", (Q, Q, Q, None, torch.ones(4).int())),
    "no tensor": (TypeError, "mask must be a tensor or None, got list", (Q, Q, Q, [1])),
    "gradient": (ValueError, "mask requires a gradient",
                 (Q, Q, Q, torch.ones(4, requires_grad=True))),
    "negative inf": (ValueError, "inf must be a finite number >= 0", (Q, Q, Q, None, None, -1.0)),
    "infinite inf": (ValueError, "got inf", (Q, Q, Q, torch.ones(4), None, float("inf"))),
    "mask's device": (ValueError, "mask is on meta", (Q, Q, Q, torch.ones(4, device="meta"))),
}  # fmt: skip


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"AttnTri: .*{text}"):
        AttnTri(*given)
    if len(given) == 3:
        with pytest.raises(error, match=f"AttnNoBiasJIT: .*{text}"):
            AttnNoBiasJIT(*given, None, 1e9)


def test_names_that_scripts_read_tuned_settings_from():
    """MLPerf HPC's OpenFold imports them; there is nothing to tune here."""
    assert list(openfold._tuneable_triton_kernels.items()) == []
    for gpu in ("ampere", "hopper"):
        module = importlib.import_module(f"apex.contrib.openfold_triton._layer_norm_config_{gpu}")
        assert getattr(module, f"_auto_tuned_config_{gpu}")() == {}
