"""linear_cross_entropy against logits, and their loss, in float64."""

import copy
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from apex.contrib.linear_cross_entropy.ops import logit_gradients, logit_statistics
from apex.contrib.xentropy import LinearCrossEntropyLoss, linear_cross_entropy
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.devices import runs_gpu_kernels
from apex_testkit.formulas import CHECKS, Case

PADDING = 3
HALVES = torch.float16, torch.bfloat16
OPTIONS = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "z-loss": {"z_loss": 0.05},
    "softcap": {"softcap": 2.0},
    "all": {"smoothing": 0.2, "z_loss": 0.01, "softcap": 5.0},
}


def oracle(hidden, weight, labels, bias=None, padding=PADDING, reduction="mean", **options):
    """The formula, with all logits; in float32 at least behind the product and the cap."""
    logits = F.linear(hidden, weight, bias)
    if cap := options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    s, z = options.get("smoothing", 0.0), options.get("z_loss", 0.0)
    lse = logits.logsumexp(-1)
    counts = labels != padding
    target = logits.gather(-1, labels.where(counts, 0)[..., None])[..., 0]
    losses = (1 - s) * (lse - target) + z * lse.square()
    if s:
        losses = losses + s * (lse - logits.mean(-1))
    losses = losses.masked_fill(~counts, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def operands(dtype, device, tokens=(4, 6), features=16, classes=50, has_bias=True):
    hidden = torch.randn(*tokens, features, device=device).to(dtype)
    weight = torch.randn(classes, features, device=device).to(dtype)
    bias = torch.randn(classes, device=device).to(dtype) if has_bias else None
    labels = torch.randint(classes, tokens, device=device)
    labels.view(-1)[::5] = PADDING
    return hidden, weight, labels, bias


def with_gradients(function, given, seed):
    leaves = [t if t is None or not t.is_floating_point() else t.detach() for t in given]
    wanted = [t.requires_grad_() for t in leaves if t is not None and t.is_floating_point()]
    loss = function(*leaves)
    return loss.detach(), *torch.autograd.grad(loss, wanted, seed.to(loss.dtype))


def assert_as_accurate_as_16_bits(expected, actual, plain, dtype):
    """Errors are at most twice those of a product in 16 bits with a loss in float32, and a unit."""
    for e, a, p in zip(expected, actual, plain, strict=True):
        unit = torch.finfo(dtype).eps * e.abs().max()
        error, allowed = (a.double() - e).abs().max(), (p.double() - e).abs().max()
        assert error <= 2 * allowed + unit, (error, allowed, unit)


def check(dtype, device, reduction, options, how, given=None, ulps=4):
    given = operands(dtype, device) if given is None else given
    function = lambda *g: linear_cross_entropy(
        *g, padding_idx=PADDING, reduction=reduction, **options, **how
    )
    of = lambda *g: oracle(*g, reduction=reduction, **options)
    seed = torch.randn_like(function(*given))
    actual = with_gradients(function, given, seed)
    assert [g.dtype for g in actual[1:]] == [
        t.dtype for t in given if t is not None and t is not given[2]
    ]
    assert actual[0].dtype == torch.promote_types(dtype, torch.float32)
    if dtype in HALVES:
        wide = [t if t is None or t.dtype == torch.int64 else t.double() for t in given]
        truth = with_gradients(of, wide, seed)
        assert_as_accurate_as_16_bits(truth, actual, with_gradients(of, given, seed), dtype)
        return
    # Of the product, of the loss, of the softmax, which is below 1, and of the sums over chunks.
    assert_as_accurate_as(
        lambda seed, *g: with_gradients(of, g, seed), actual, seed, *given, ulps=ulps, scale=1.0
    )


@pytest.mark.parametrize("how", [{}, {"chunk_size": 7}, {"chunk_size": 1}], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, options, how, device):
    for reduction, recompute in itertools.product(("mean", "sum", "none"), (False, True)):
        check(dtype, device, reduction, options, {**how, "recompute": recompute})


@pytest.mark.parametrize("classes", [1, 2, 127, 1000, 20_000])
def test_sizes(classes, device):
    for dtype, tokens in itertools.product((torch.float32, torch.bfloat16), ((9,), (1,), ())):
        hidden, weight, labels, bias = operands(dtype, device, tokens, 8, classes)
        labels = labels.clamp(max=classes - 1)
        given = hidden, weight, labels.where(labels != PADDING, 0), bias
        # torch's products of other sizes add so many classes up in another order.
        ulps = 4 if classes < 1000 else 16
        check(dtype, device, "sum", OPTIONS["all"], {"chunk_size": 4}, given, ulps)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_any_layout(has_bias, device):
    hidden, weight, labels, bias = operands(torch.float32, device, has_bias=has_bias)
    seed = torch.ones((), device=device)
    call = lambda *g: linear_cross_entropy(*g, padding_idx=PADDING, chunk_size=5)
    expected = with_gradients(call, (hidden, weight, labels, bias), seed)
    strided = [
        t if t is None else torch.stack([t, t], -1)[..., 0] for t in (hidden, weight, labels, bias)
    ]
    transposed = hidden.transpose(0, 1).contiguous().transpose(0, 1), weight.t().contiguous().t()
    for laid_out in (strided, (*transposed, labels.t().contiguous().t(), bias)):
        torch.testing.assert_close(with_gradients(call, laid_out, seed), expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_that_do_not_count_are_not_read(recompute, device):
    hidden, weight, labels, bias = operands(torch.float32, device)
    hidden[labels == PADDING] = torch.nan
    given = [t.requires_grad_() for t in (hidden, weight, bias)]
    loss = linear_cross_entropy(
        given[0], given[1], labels, given[2], padding_idx=PADDING, recompute=recompute
    )
    gradients = torch.autograd.grad(loss, given)
    assert all(g.isfinite().all() for g in (loss, *gradients))
    assert not gradients[0][labels == PADDING].any()


def test_no_token_counts(device):
    hidden, weight, labels, bias = operands(torch.float32, device)
    given = [t.requires_grad_() for t in (hidden, weight, bias)]
    for nobody in (torch.full_like(labels, PADDING), labels[:0]):
        some = given[0][: len(nobody)]
        for reduction, recompute in itertools.product(("sum", "mean", "none"), (False, True)):
            loss = linear_cross_entropy(
                some, given[1], nobody, given[2], 0.0, PADDING, reduction, recompute=recompute
            )
            assert loss.isnan().all() if reduction == "mean" else not loss.any()
            if reduction == "sum":
                gradients = torch.autograd.grad(loss, given, allow_unused=True)
                assert all(g is None or not g.any() for g in gradients)


def test_padding_none_counts_all(device):
    hidden, weight, labels, _ = operands(torch.float64, device)
    actual = linear_cross_entropy(hidden, weight, labels, padding_idx=None)
    expected = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_float32_weight_beside_16_bits(half, device):
    """Its gradient is a sum in float32."""
    hidden, weight, labels, _ = operands(half, device, (64,))
    hidden, wide = hidden.requires_grad_(), weight.float().requires_grad_()
    for how in ({}, {"chunk_size": 16}, {"chunk_size": 16, "recompute": True}):
        loss = linear_cross_entropy(hidden, wide, labels, padding_idx=PADDING, **how)
        dhidden, dweight = torch.autograd.grad(loss, (hidden, wide))
        assert dhidden.dtype == half
        assert dweight.dtype == torch.float32
        if how:
            assert not torch.equal(dweight, dweight.to(half).float())
        with torch.enable_grad():
            truth = oracle(hidden.double(), wide.double(), labels)
            expected = torch.autograd.grad(truth, wide)[0]
        torch.testing.assert_close(
            dweight, expected, rtol=0.05, atol=0.02 * expected.abs().max().item()
        )


def test_autocast(device):
    hidden, weight, labels, bias = operands(torch.float32, device)
    given = [t.requires_grad_() for t in (hidden, weight, bias)]
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        loss = linear_cross_entropy(given[0], given[1], labels, given[2], padding_idx=PADDING)
    gradients = torch.autograd.grad(loss, given)
    assert [g.dtype for g in (loss, *gradients)] == [torch.float32] * 4
    expected = oracle(hidden, weight, labels, bias)
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)


def test_backward_twice_and_retained(device):
    """Gradients that the forward made are scaled anew each time."""
    hidden, weight, labels, _ = operands(torch.float32, device)
    given = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*given, labels, padding_idx=PADDING)
    ones = torch.autograd.grad(loss, given, retain_graph=True)
    twice = torch.autograd.grad(loss * 2, given, retain_graph=True)
    again = torch.autograd.grad(loss, given)
    torch.testing.assert_close(twice, tuple(2 * g for g in ones))
    assert all(map(torch.equal, ones, again))


def test_a_gradient_of_the_loss_is_not_rounded_to_16_bits(device):
    """A third in bfloat16 is off by a thousandth, in all gradients alike."""
    hidden, weight, labels, _ = operands(torch.bfloat16, device)
    given = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*given, labels, padding_idx=PADDING)
    whole = torch.autograd.grad(loss, given, retain_graph=True)
    thirds = torch.autograd.grad(loss / 3, given)
    for a, e in zip(thirds, whole, strict=True):
        assert torch.equal(a, (e.float() / 3).to(torch.bfloat16))


def test_float16_with_a_loss_scale(device):
    """Gradients of single logits are below float16's range until the scale comes with them."""
    tokens, classes, scale = 4096, 512, 2.0**16
    hidden = torch.randn(tokens, 8, device=device).half().requires_grad_()
    weight = (1e-2 * torch.randn(classes, 8, device=device)).half().requires_grad_()
    labels = torch.randint(classes, (tokens,), device=device)
    loss = linear_cross_entropy(hidden, weight, labels, padding_idx=PADDING)
    gradients = torch.autograd.grad(loss * scale, (hidden, weight))
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.autograd.grad(oracle(*wide, labels) * scale, wide)
    for a, e in zip(gradients, truth, strict=True):
        assert (a.double() - e).norm() <= 0.01 * e.norm()


def test_module(device):
    hidden, weight, labels, bias = operands(torch.float32, device)
    options = {"z_loss": 0.01, "softcap": 3.0, "chunk_size": 5, "recompute": True}
    loss = LinearCrossEntropyLoss(0.1, PADDING, "sum", **options)
    expected = linear_cross_entropy(hidden, weight, labels, bias, 0.1, PADDING, "sum", **options)
    for module in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(module(hidden, weight, labels, bias), expected)


def losses(hidden, labels, weight, bias):
    return linear_cross_entropy(hidden, weight, labels, bias, 0.1, PADDING, "none", chunk_size=2)


def arguments(dtype, device):
    hidden, weight, labels, bias = operands(dtype, device, (5,), 4, 7)
    return hidden, labels, weight, bias


CASE = Case(
    losses,
    arguments,
    lambda hidden, labels, weight, bias: oracle(
        hidden, weight, labels, bias, reduction="none", smoothing=0.1
    ),
    grads=(0, 2, 3),
    rows=(0, 1),
    operators=(torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    decompositions=dict,
    without={"batch invariance": "torch's matrix products choose by size"},
)
# Accuracy is that of 16-bit products, which is compared above; nothing here decomposes.
SERVED = {n: c for n, c in CHECKS.items() if n not in ("accuracy", "decompositions", "autocast")}


@pytest.mark.parametrize("check", SERVED.values(), ids=SERVED)
def test_composed(check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing."""
    case = CASE
    if check is CHECKS["export"]:
        case = replace(CASE, operators=(torch.ops.aten.linear.default, None))
    check(case, device)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles(reduction, device):
    hidden, weight, labels, bias = operands(torch.float32, device)
    call = lambda *g: linear_cross_entropy(
        *g, 0.1, PADDING, reduction, z_loss=0.01, softcap=4.0, chunk_size=7
    )
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True)
    given = hidden, weight, labels, bias
    seed = torch.randn_like(call(*given))
    torch.testing.assert_close(
        with_gradients(compiled, given, seed), with_gradients(call, given, seed)
    )


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_operators(dtype, softcap, device):
    """By torch's own checks, and of a part of the classes."""
    logits = torch.randn(6, 9, device=device).to(dtype)
    labels = torch.tensor([0, 4, 12, 7, 20, PADDING], device=device)
    numbers = 4, 21, PADDING
    made = logit_statistics(logits.clone(), labels, *numbers, softcap)
    grads = torch.rand_like(made[0])
    torch.library.opcheck(logit_statistics, (logits.clone(), labels, *numbers, softcap))
    torch.library.opcheck(
        logit_gradients,
        (logits.clone(), labels, *made[:3], grads, *numbers, 0.1, 0.01, softcap),
    )
    x = logits.double()
    x = softcap * torch.tanh(x / softcap) if softcap else x
    here = torch.tensor([False, True, True, True, False, False], device=device)
    target = x.gather(1, (labels - 4).where(here, 0)[:, None])[:, 0].where(here, 0)
    expected = [x.amax(1), (x - x.amax(1, True)).exp().sum(1), target, x.sum(1) / 21]
    unit = 0.05 if dtype == torch.bfloat16 and softcap else 8 * torch.finfo(made[0].dtype).eps
    for a, e in zip(made, expected, strict=True):
        torch.testing.assert_close(a[:5].double(), e[:5], rtol=unit, atol=unit)
    assert [m[5].item() for m in made] == [0, 1, 0, 0]


@pytest.mark.parametrize("scale", [1e-4, 0.01, 0.29, 0.31, 1.0, 20.0])
def test_softcap_of_small_and_large_logits(scale, device):
    """tanh keeps its digits near 0, where it is a difference of numbers near 1."""
    logits = scale * torch.linspace(-1, 1, 4001, device=device)[None]
    expected = torch.tanh(logits.double())
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    logit_statistics(logits, labels, 0, 4001, -1, 1.0)
    torch.testing.assert_close(logits.double(), expected, rtol=8 * 2**-24, atol=1e-30)


BAD = {
    "hidden": (TypeError, "hidden must be a float64", lambda h, w, y, b: (h.long(), w, y, b)),
    "weight dtype": (
        TypeError,
        "weight must have the dtype",
        lambda h, w, y, b: (h, w.double(), y, b),
    ),
    "columns": (ValueError, "hidden must have shape", lambda h, w, y, b: (h, w[:, 1:], y, b)),
    "no class": (ValueError, "C > 0", lambda h, w, y, b: (h, w[:0], y, b[:0])),
    "weight shape": (ValueError, r"shape \[C, H\]", lambda h, w, y, b: (h, w[0], y, b)),
    "bias": (ValueError, "bias must have shape", lambda h, w, y, b: (h, w, y, b[1:])),
    "labels dtype": (TypeError, r"use labels.long\(\)", lambda h, w, y, b: (h, w, y.int(), b)),
    "labels": (ValueError, "one label per row", lambda h, w, y, b: (h, w, y[1:], b)),
    "no labels": (TypeError, "got NoneType", lambda h, w, y, b: (h, w, None, b)),
}


@pytest.mark.parametrize(("error", "words", "spoil"), BAD.values(), ids=BAD)
def test_bad_tensors(error, words, spoil, device):
    with pytest.raises(error, match=f"^linear_cross_entropy: .*{words}"):
        linear_cross_entropy(*spoil(*operands(torch.float32, device)))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"smoothing": 1.5}, r"smoothing must be in \[0, 1\], got 1.5"),
        ({"smoothing": float("nan")}, "smoothing must be in"),
        ({"reduction": "avg"}, "reduction must be one of .* got 'avg'"),
        ({"z_loss": -1.0}, "z_loss must be finite and not negative"),
        ({"softcap": 0.0}, "softcap must be finite and above 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
    ids=str,
)
def test_bad_numbers(option, words, device):
    for call in (
        lambda: linear_cross_entropy(*operands(torch.float32, device), **option),
        lambda: LinearCrossEntropyLoss(**option),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_label_without_a_class(device):
    hidden, weight, labels, _ = operands(torch.float32, device)
    labels[1, 1], labels[0, 0] = 50, PADDING
    if not runs_gpu_kernels(device):
        words = r"^linear_cross_entropy: labels.flatten\(\)\[7\] is 50, but there are 50 classes"
        with pytest.raises(RuntimeError, match=words):
            linear_cross_entropy(hidden, weight, labels, padding_idx=PADDING, chunk_size=3)
    else:
        assert linear_cross_entropy(hidden, weight, labels).isnan()


def on_ranks(rank, world_size):
    import torch.distributed as dist

    torch.manual_seed(0)
    whole = operands(torch.float32, "cpu", classes=51)
    parts = [list(t.split([20, 31])) for t in (whole[1], whole[3])]
    options = {"smoothing": 0.1, "z_loss": 0.02, "softcap": 4.0, "chunk_size": 7}
    for reduction, recompute in itertools.product(("mean", "none"), (False, True)):
        how = {"padding_idx": PADDING, "reduction": reduction, "recompute": recompute, **options}
        hidden, weight, bias = (
            t.detach().requires_grad_() for t in (whole[0], parts[0][rank], parts[1][rank])
        )
        loss = linear_cross_entropy(hidden, weight, whole[2], bias, group=dist.group.WORLD, **how)
        seed = torch.linspace(0.5, 1, loss.numel()).reshape(loss.shape)
        actual = loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias), seed)
        given = [t.detach().double() if t.is_floating_point() else t for t in whole]
        of = lambda *g, r=reduction: oracle(*g, reduction=r, **options)
        truth = with_gradients(of, given, seed)
        expected = (
            truth[0],
            truth[1],
            truth[2].split([20, 31])[rank],
            truth[3].split([20, 31])[rank],
        )
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5 * e.abs().max().item())
    with pytest.raises(NotImplementedError, match="group is given"):
        torch.func.grad(
            lambda h: linear_cross_entropy(h, weight, whole[2], group=dist.group.WORLD)
        )(whole[0])


def test_classes_divided_over_ranks(two_ranks):
    two_ranks(on_ranks)
