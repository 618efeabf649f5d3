"""Softmaxes of attention scores against float64 PyTorch, and what torch asks of them."""

import importlib
import sys

import pytest
import torch

from apex.transformer.functional import scaled_softmax as ops
from apex.transformer.functional.fused_softmax import (
    GenericScaledMaskedSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    generic_scaled_masked_softmax,
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)
from apex_testkit import FLOATS, LAYOUTS, assert_as_accurate_as, opcheck_samples
from apex_testkit.formulas import CHECKS, Case, check_sharded
from apex_testkit.grids import for_gpus

SCALE = 0.7
# [batch, heads, queries, keys]; "tall" has more than 65,536 rows.
SHAPES = {
    "empty": (0, 2, 3, 3),
    "one": (1, 1, 1, 1),
    "odd": (2, 3, 33, 33),
    "tail": (1, 1, 5, 1027),
    "vector": (1, 2, 64, 64),
    "tall": (1, 9363, 7, 7),
    **for_gpus(block=(1, 1, 3, 776), wide=(1, 1, 1, 16392)),
}


def plain(x, scale=SCALE):
    return torch.softmax(scale * x, -1)


def causal(x, scale=SCALE):
    above = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax((scale * x).masked_fill(above, -torch.inf), -1)


def masked(x, mask, scale=SCALE):
    hidden = mask.bool()
    y = torch.softmax((scale * x).masked_fill(hidden, -10000.0), -1)
    return y.masked_fill(hidden.all(-1, keepdim=True), 0)


def random_mask(x, batch=None):
    """Some keys are hidden, of one query all."""
    mask = torch.rand(batch or x.shape[0], 1, *x.shape[2:], device=x.device) < 0.4
    if mask.numel():
        mask[0, 0, -1] = True
    return mask


def scores(dtype, device, shape=(4, 2, 5, 5)):
    return (3 * torch.randn(shape, device=device)).to(dtype)


def case(function, oracle, backward, with_mask=False):
    def arguments(dtype, device):
        x = scores(dtype, device)
        return (x, random_mask(x)) if with_mask else (x,)

    def wide(dtype, device, columns):
        keys = 33 if function is causal_softmax else columns  # which has as many queries
        x = scores(dtype, device, (3, 2, 33 if keys == 33 else 2, keys))
        return (x, random_mask(x)) if with_mask else (x,)

    return Case(
        function,
        arguments,
        oracle,
        grads=(0,),
        rows=(0, 1) if with_mask else (0,),
        operators=(getattr(ops, f"{function.__name__}_forward"), backward),
        decompositions=ops.decompositions,
        ulps=3,  # truth rounds as often as we do: exp, quotient and products
        wide=wide,
        keeps_output="The gradient of a softmax is made of it, as that of torch.softmax.",
    )


def scaled_softmax(x):
    return ScaledSoftmax.apply(x, SCALE)


def causal_softmax(x):
    return scaled_upper_triang_masked_softmax(x, None, SCALE)


def masked_softmax(x, mask):
    return scaled_masked_softmax(x, mask, SCALE)


CASES = {
    "plain": case(scaled_softmax, plain, ops.scaled_softmax_backward),
    "causal": case(causal_softmax, causal, ops.causal_softmax_backward),
    "masked": case(masked_softmax, masked, ops.scaled_softmax_backward, with_mask=True),
}


def with_gradient(function, x, *rest):
    *rest, dy = rest
    x = x.detach().requires_grad_()
    y = function(x, *rest)
    return y.detach(), *torch.autograd.grad(y, x, dy)


@pytest.mark.parametrize("kind", ["plain", "causal", "masked"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, layout, kind, device):
    if kind == "causal" and shape[-1] != shape[-2]:
        shape = (*shape[:2], 130, 130)
    x, dy = (layout(scores(dtype, device, shape)) for _ in range(2))
    rest = (random_mask(x),) if kind == "masked" else ()
    function, oracle = CASES[kind].function, CASES[kind].oracle
    actual = with_gradient(function, x, *rest, dy)
    assert actual[0].is_contiguous()
    reference = lambda *given: with_gradient(oracle, *given)
    assert_as_accurate_as(reference, actual, x, *rest, dy, ulps=3.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_begin_at_no_pack(dtype, device):
    """Their width fills packs, and their memory begins one element behind."""
    given = (scores(dtype, device, (2, 3, 5, 64)) for _ in range(2))
    x, dy = (torch.cat([v.new_zeros(1), v.flatten()])[1:].view(v.shape) for v in given)
    actual = with_gradient(CASES["plain"].function, x, dy)
    reference = lambda *given: with_gradient(CASES["plain"].oracle, *given)
    assert_as_accurate_as(reference, actual, x, dy, ulps=3.0)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_formula(case, check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(case, device)


def on_ranks(rank, world_size):
    for case in CASES.values():
        check_sharded(case, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_is_a_good_citizen_of_torch(device):
    squares = [scores(torch.float32, device, s) for s in ((3, 3), (0, 2, 2), (2, 2, 4, 4))]
    x = squares[-1]
    opcheck_samples(ops.scaled_softmax_forward, [(x, SCALE) for x in squares])
    opcheck_samples(ops.causal_softmax_forward, [(x, SCALE) for x in squares])
    masks = [random_mask(x), random_mask(x, 1).expand(2, -1, -1, -1), random_mask(x).byte()]
    opcheck_samples(ops.masked_softmax_forward, [(x, mask, SCALE) for mask in masks])
    samples = [(y.mT, y, SCALE) for y in squares]
    opcheck_samples(ops.scaled_softmax_backward, samples)
    opcheck_samples(ops.causal_softmax_backward, samples)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_masks_that_hide_everything_and_masks_of_all_batches(batch, dtype, device):
    x = scores(dtype, device, (3, 2, 4, 70)).requires_grad_()
    mask = random_mask(x, batch).byte() * 5  # anything but 0 hides
    mask[0, 0, 1] = 1
    y = generic_scaled_masked_softmax(x, mask, 1.0)
    assert (y[0, :, 1] == 0).all()
    assert (y[0, :, -1] == 0).all()
    torch.testing.assert_close(y, masked(x, mask.expand(3, -1, -1, -1), 1.0).to(dtype))
    y.float().square().sum().backward()
    assert (x.grad[0, :, 1] == 0).all()
    assert torch.isfinite(x.grad).all()


def test_scores_below_the_masked_one(device):
    """They are not masked, whatever their size; a masked score is -10000, not less."""
    x = torch.tensor([[-30000.0, -30001.0, 0.0], [-9999.0, -30000.0, -10001.0]], device=device)
    x = x.view(1, 1, 2, 3)
    mask = torch.zeros(1, 1, 2, 3, dtype=torch.bool, device=device)
    torch.testing.assert_close(scaled_masked_softmax(x, mask, 1.0), torch.softmax(x, -1))
    mask[..., 1, 2] = True
    y = scaled_masked_softmax(x, mask, 1.0)
    expected = torch.softmax(torch.tensor([-9999.0, -30000.0, -10000.0], device=device), -1)
    torch.testing.assert_close(y[0, 0, 1], expected)
    mask[..., 0, 2] = True
    y = scaled_masked_softmax(x, mask, 1.0)
    assert y[0, 0, 0].tolist() == [0, 0, 1]  # the masked score is the largest


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_causal_rows_do_not_see(value, device):
    """Neither inf nor NaN above the diagonal reaches them, forward or backward."""
    x = scores(torch.float32, device, (1, 2, 6, 6))
    hidden = torch.ones(6, 6, dtype=torch.bool, device=device).triu(1)
    y = causal_softmax(x.masked_fill(hidden, value).requires_grad_())
    torch.testing.assert_close(y, causal(x))
    dy = torch.randn_like(x)
    actual = ops.causal_softmax_backward(dy.masked_fill(hidden, value), y.detach(), SCALE)
    expected = ops.causal_softmax_backward(dy, y.detach(), SCALE)
    assert torch.equal(actual, expected)
    assert (actual.masked_select(hidden) == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extreme_scores(dtype, device):
    big = 60000.0 if dtype == torch.float16 else 1e30
    rows = [[big, -big, 0.0], [-big, -big, -big], [torch.nan, 1.0, 2.0], [-torch.inf, 0.0, 0.0]]
    x = torch.tensor(rows, device=device).to(dtype)
    torch.testing.assert_close(
        ScaledSoftmax.apply(x, 1.0), torch.softmax(x.double(), -1).to(dtype), equal_nan=True
    )
    negative = ScaledSoftmax.apply(x, -1.0)
    torch.testing.assert_close(negative, torch.softmax(-x.double(), -1).to(dtype), equal_nan=True)


@pytest.mark.parametrize("columns", [1, 17, 63, 300])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_one_score_that_is_not_finite(value, columns, device):
    x = torch.randn(2, columns, device=device)
    for column in {0, columns // 2, columns - 1}:
        scores = x.clone()
        scores[0, column] = value
        expected = torch.softmax(scores.double(), -1).float()
        torch.testing.assert_close(ScaledSoftmax.apply(scores, 1.0), expected, equal_nan=True)


def test_autocast(device):
    x = scores(torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        y = causal_softmax(x)
        kept = ScaledUpperTriangMaskedSoftmax.apply(x, SCALE)
    assert torch.equal(y, causal_softmax(x.bfloat16()))
    assert torch.equal(kept, causal_softmax(x))


X = torch.ones(2, 3, 4, 4)
MASK = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
BAD = {
    "integers": (TypeError, "inputs must be a float64", (X.int(), MASK)),
    "three dimensions": (ValueError, r"inputs must have shape \[batch, heads", (X[0], MASK)),
    "mask's dtype": (TypeError, "mask must be bool or uint8, got torch.float32", (X, MASK.float())),
    "mask's heads": (ValueError, "mask must have shape", (X, MASK.expand(-1, 3, -1, -1))),
    "mask's batch": (
        ValueError,
        r"mask must have shape \[2 or 1, 1",
        (X[:1].repeat(2, 1, 1, 1), MASK[:0]),
    ),
    "mask's device": (ValueError, "mask must be on cpu", (X, MASK.to("meta"))),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    for function in (scaled_masked_softmax, generic_scaled_masked_softmax):
        with pytest.raises(error, match=f"{function.__name__}: {text}"):
            function(*given, 1.0)


def test_bad_input_without_a_mask():
    name = "scaled_upper_triang_masked_softmax"
    with pytest.raises(ValueError, match=rf"{name}: inputs .* got \[2, 3, 4, 2\]"):
        scaled_upper_triang_masked_softmax(X[..., :2], None, 1.0)
    with pytest.raises(TypeError, match="ScaledSoftmax: inputs must be"):
        ScaledSoftmax.apply(X.long(), 1.0)
    with pytest.raises(ValueError, match=r"ScaledSoftmax: inputs must have shape \[\.\.\., keys\]"):
        ScaledSoftmax.apply(X[0, 0, 0, 0], 1.0)


def test_kernels_check_what_python_did_not():
    for op, given, text in [
        (ops.scaled_softmax_forward, (X.mT, 1.0), "x must be contiguous rows"),
        (ops.scaled_softmax_forward, (X.long(), 1.0), "got int64"),
        (ops.causal_softmax_forward, (X[..., :2].contiguous(), 1.0), "must be squares"),
        (ops.scaled_softmax_backward, (X[:1], X, 1.0), "dy must be contiguous, with 96 elements"),
        (ops.masked_softmax_forward, (X, MASK[:1], 1.0), r"mask must be \[b, 1, sq, sk\]"),
        (ops.masked_softmax_forward, (X, MASK.mT, 1.0), "contiguous but for its first dimension"),
        (ops.masked_softmax_forward, (X, MASK.int(), 1.0), "mask must be bool or uint8"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            op(*given)


def test_classes_of_apex(device):
    x = scores(torch.float32, device)
    mask = random_mask(x)
    square = x.flatten(0, 1)
    assert torch.equal(ScaledUpperTriangMaskedSoftmax.apply(square, SCALE), causal_softmax(square))
    expected = masked_softmax(x, mask)
    assert torch.equal(ScaledMaskedSoftmax.apply(x, mask, SCALE), expected)
    assert torch.equal(GenericScaledMaskedSoftmax.apply(x, mask, SCALE), expected)
    assert torch.equal(scaled_masked_softmax(x, None, SCALE), ScaledSoftmax.apply(x, SCALE))


MODULES = {
    "scaled_softmax_cuda": (ScaledSoftmax, ()),
    "scaled_masked_softmax_cuda": (ScaledMaskedSoftmax, (1,)),
    "generic_scaled_masked_softmax_cuda": (GenericScaledMaskedSoftmax, (1,)),
    "scaled_upper_triang_masked_softmax_cuda": (ScaledUpperTriangMaskedSoftmax, ()),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_apex(name, device):
    module, (function, with_mask) = importlib.import_module(name), MODULES[name]
    x = scores(torch.bfloat16, device)
    x = x.flatten(0, 1) if "triang" in name else x
    x.requires_grad_()
    rest = (random_mask(x),) if with_mask else ()
    y = function.apply(x, *rest, SCALE)
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, dy)
    forward = module.forward(x, *rest, SCALE)
    assert torch.equal(forward, y)
    assert not forward.requires_grad
    before = dy.clone()
    assert torch.equal(module.backward(dy, forward, SCALE), expected)
    assert torch.equal(dy, before)
    with pytest.raises(TypeError, match=f"{name}.forward: inputs must be"):
        module.forward(x.detach().long(), *rest, SCALE)


def test_rows_per_block_of_apex(monkeypatch):
    import scaled_masked_softmax_cuda as module

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [module.get_batch_per_block(1, keys, 1, 1) for keys in (1, 16, 32, 128, 129)] == [
        *(256, 16, 8, 8, 4)
    ]


@pytest.mark.parametrize("name", MODULES)
def test_import_error_where_kernels_cannot_run(name, monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.parallel._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module(name)
