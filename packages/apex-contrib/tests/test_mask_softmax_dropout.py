"""Masked softmax with dropout against float64 PyTorch and an own Philox; what torch asks of it."""

import pytest
import torch

from apex.contrib._shared.native.philox import philox, uniform_rows
from apex.contrib.multihead_attn import fast_mask_softmax_dropout_func, weights
from apex.contrib.multihead_attn import mask_softmax_dropout as ops
from apex.contrib.multihead_attn.mask_softmax_dropout_func import MaskSoftmaxDropout, decompositions
from apex_testkit import FLOATS, LAYOUTS, assert_as_accurate_as, opcheck_samples
from apex_testkit.formulas import CHECKS, Case, check_sharded
from apex_testkit.grids import for_gpus

HEADS = 2
# batch, queries, keys
SHAPES = {
    "empty": (0, 3, 5),
    "one": (1, 1, 1),
    "odd": (2, 7, 33),
    "tail": (1, 3, 1027),
    "vector": (2, 5, 64),
    "tall": (4, 8193, 7),
    **for_gpus(block=(1, 3, 776), wide=(1, 1, 16392)),
}
MASKS = {
    "none": lambda b, t, s: None,
    "bool": lambda b, t, s: hidden_keys(b, s),
    "uint8": lambda b, t, s: hidden_keys(b, s).to(torch.uint8) * 3,
    "added": lambda b, t, s: torch.where(hidden_keys(b, s), -10000.0, torch.rand(b, s)),
}


def hidden_keys(batch, keys):
    hidden = torch.rand(batch, keys) < 0.3
    hidden[:, :1] = False
    return hidden


def random_words(seed, counter):
    """Philox4x32-10 with Python's integers, from the paper's description."""
    words, keys = [counter % 2**32, counter // 2**32, 0, 0], [seed % 2**32, seed // 2**32 % 2**32]
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            divmod(w * m, 2**32) for w, m in ((words[0], 0xD2511F53), (words[2], 0xCD9E8D57))
        )
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return words


def uniform_by_hand(seed, rows, columns):
    per_row = (columns + 3) // 4
    words = [
        random_words(seed, r * per_row + c // 4)[c % 4] for r in range(rows) for c in range(columns)
    ]
    return torch.tensor(words).reshape(rows, columns).double() // 256 / 2**24


def oracle(scores, mask, is_added, heads=HEADS):
    x = scores.unflatten(0, (-1, heads))
    if mask is not None:
        of_heads = mask[:, None, None]
        x = x + of_heads if is_added else x.masked_fill(of_heads != 0, -torch.inf)
    return torch.softmax(x, -1).flatten(0, 1)


def call(scores, mask, is_added, p=0.0):
    return fast_mask_softmax_dropout_func(True, HEADS, scores, mask, is_added, p)


def with_gradients(function, scores, dy):
    scores = scores.detach().requires_grad_()
    y = function(scores)
    return y.detach(), *torch.autograd.grad(y, scores, dy)


def test_known_answers():
    """Of Random123's kat_vectors, and of the same algorithm by hand."""
    ones, pi = 0xFFFFFFFF, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    for counter, key, expected in [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, 0x299F31D0A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]:
        words = philox([torch.tensor([c]) for c in counter], torch.tensor([key]))
        assert [int(w) for w in words] == expected
    assert random_words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("columns", [1, 3, 6, 16, 65, 131])
def test_kernels_draw_these_numbers(columns, device):
    """Bit for bit, whatever the alignment and the thread, and for every dtype."""
    seed = -(2**40) - 12345
    expected = uniform_by_hand(seed % 2**64, 9, columns)
    of_device = torch.tensor([seed], device=device)
    assert torch.equal(uniform_rows(of_device, (9, columns)).double().cpu(), expected)
    for dtype in FLOATS:
        for p in (0.1, 0.5, 0.9):
            x = torch.ones(9, columns, dtype=dtype, device=device)
            y = ops.seeded_dropout(x, of_device, p)
            # p as a float decides, for float64 too
            assert torch.equal(y.cpu() != 0, expected >= float(torch.tensor(p)))
            if dtype == torch.float64:
                assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 6, 33, 131])
def test_numbers_of_a_corner(columns, dtype, device):
    """A sequence alone keeps what it keeps in a padded batch, where it lies behind others."""
    rows, wide, batch = 5, columns + 9, 3
    seed = torch.tensor([2**35 + 7], device=device)
    by_hand = uniform_by_hand(2**35 + 7, batch * HEADS * rows, wide)
    expected = by_hand.view(batch, HEADS, rows, wide)[2, :, :4, :columns] >= 0.5
    scores = torch.randn(1, HEADS, 4, columns, device=device).to(dtype)
    corner = 2 * HEADS, rows, wide
    dropped, softmax = ops.mask_softmax_dropout_forward(scores, None, seed, 0.5, *corner)
    assert torch.equal(dropped[0].cpu() != 0, expected)
    plain, _ = weights.softmax_dropout.reference(scores, None, seed, 0.5, *corner)
    torch.testing.assert_close(dropped, plain)
    torch.testing.assert_close(softmax, torch.softmax(scores, -1))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "misaligned"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, layout, kind, device):
    b, t, s = shape
    x, dy = (
        LAYOUTS[layout]((3 * torch.randn(b * HEADS, t, s)).to(device, dtype)) for _ in range(2)
    )
    mask, is_added = MASKS[kind](b, t, s), kind == "added"
    mask = mask if mask is None else mask.to(device)
    actual = with_gradients(lambda x: call(x, mask, is_added), x, dy)
    reference = lambda x, dy, mask: with_gradients(lambda x: oracle(x, mask, is_added), x, dy)
    # Backward: from the result, which was rounded once; float64 rounds as often as truth.
    assert_as_accurate_as(reference, actual, x, dy, mask, ulps=3.0)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", [(2, 5, 33), (1, 3, 260)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_matches_the_oracle(dtype, shape, kind, device):
    """With the numbers that the seed gives; the gradient passes where something was kept."""
    (b, t, s), p = shape, 0.3
    x, dy = ((3 * torch.randn(b * HEADS, t, s)).to(device, dtype) for _ in range(2))
    mask, is_added = MASKS[kind](b, t, s), kind == "added"
    mask = mask if mask is None else mask.to(device)
    torch.manual_seed(5)
    actual = with_gradients(lambda x: call(x, mask, is_added, p), x, dy)
    torch.manual_seed(5)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    keep = uniform_by_hand(int(seed) % 2**64, b * HEADS * t, s).reshape(x.shape) >= float(
        torch.tensor(p)
    )
    keep = keep.to(device)

    def reference(x, dy, mask):
        of = lambda x: torch.where(keep, oracle(x, mask, is_added) / (1 - p), 0)
        return with_gradients(of, x, dy)

    assert_as_accurate_as(reference, actual, x, dy, mask, ulps=3.0)
    assert torch.equal(actual[0][~keep], torch.zeros_like(actual[0][~keep]))


def arguments(dtype, device, keys=5):
    """Of ``of_formula``."""
    mask = hidden_keys(4, keys).to(device)
    return (2 * torch.randn(4, HEADS, 3, keys, device=device)).to(dtype), mask.unsqueeze(1)


def of_formula(scores, mask):
    return weights.mask_softmax(scores.contiguous(), mask)


def plain(scores, mask):
    hidden = mask.unsqueeze(1) != 0
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


CASE = Case(
    of_formula,
    arguments,
    plain,
    grads=(0,),
    rows=(0, 1),
    operators=(ops.mask_softmax_forward, ops.mask_softmax_backward),
    decompositions=decompositions,
    ulps=3,  # exp, quotient and products
    wide=arguments,
    keeps_output="The gradient of a softmax is made of it, as that of torch.softmax.",
)


def arguments_of_dropout(*given):
    scores, mask = arguments(*given)
    return scores, mask, torch.tensor([77], device=scores.device), 0.25


def arguments_of_rows(*given):
    scores, _, seed, p = arguments_of_dropout(*given)
    return scores, seed, p


def dropped(scores, mask, seed, p):
    return weights.softmax_dropout(scores.contiguous(), mask, seed, p)[0]


def plain_dropped(scores, mask, seed, p):
    keep = uniform_rows(seed, scores.shape) >= p
    return torch.where(keep, plain(scores, mask) / (1 - p), 0)


DROPOUT = Case(
    dropped,
    arguments_of_dropout,
    plain_dropped,
    grads=(0,),
    rows=(0, 1),
    operators=(ops.mask_softmax_dropout_forward, ops.mask_softmax_dropout_backward),
    decompositions=decompositions,
    ulps=3,
    wide=arguments_of_dropout,
    by_place=True,
    keeps_output="What was dropped is read off it.",
)
ROWS = Case(
    lambda x, seed, p: weights.dropout_rows(x.contiguous(), seed, p),
    arguments_of_rows,
    lambda x, seed, p: torch.where(uniform_rows(seed, x.shape) >= p, x / (1 - p), 0),
    grads=(0,),
    rows=(0,),
    operators=(ops.seeded_dropout, ops.seeded_dropout_backward),
    decompositions=decompositions,
    wide=arguments_of_rows,
    by_place=True,
)
CASES = {"mask": CASE, "dropout": DROPOUT, "rows": ROWS}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_formula(case, check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(case, device)


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


@pytest.mark.parametrize("kind", MASKS)
def test_is_a_good_citizen_of_torch(kind, device):
    b, t, s, seed = 2, 3, 5, torch.tensor([9], device=device)
    x = torch.randn(b, HEADS, t, s, device=device)
    mask = MASKS[kind](b, t, s)
    mask = mask if mask is None else mask.to(device).unsqueeze(1)
    opcheck_samples(ops.mask_softmax_forward, [(x, mask), (x[:0], None)])
    opcheck_samples(
        ops.mask_softmax_dropout_forward, [(x, mask, seed, 0.5), (x, mask, seed, 0.5, 1, 4, 9)]
    )
    y = ops.mask_softmax_forward(x, mask)
    opcheck_samples(
        ops.mask_softmax_backward, [(x, y), (x.transpose(0, 1).contiguous().transpose(0, 1), y)]
    )
    opcheck_samples(
        ops.mask_softmax_dropout_backward, [(x, None, y, y, 0.5), (x, x, y, y > 0.1, 0.5)]
    )
    opcheck_samples(ops.seeded_dropout, [(x, seed, 0.5)])
    opcheck_samples(ops.seeded_dropout_backward, [(x, seed, 0.5)])


def test_same_bits_on_any_number_of_threads():
    x = torch.randn(8, HEADS, 64, 131)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(ops.mask_softmax_dropout_forward(x, None, torch.tensor([1]), 0.1))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_statistics(device):
    """Means of what is kept, over rows, columns and seeds, within 5 standard deviations."""
    rows, columns, p = 64, 250, 0.1
    x = torch.ones(rows, columns, device=device)
    seeds = torch.arange(20, device=device)
    kept = torch.stack([ops.seeded_dropout(x, s[None], p) != 0 for s in seeds]).double()
    for dims in ((0, 1), (0, 2), (1, 2), (0, 1, 2)):
        means = kept.mean(dims)
        count = kept.numel() / means.numel()
        assert (means - (1 - p)).abs().max() < 5 * (p * (1 - p) / count) ** 0.5
    # Neighbours know nothing of each other.
    centred = kept - kept.mean()
    for a, b in ((centred[:, :, 1:], centred[:, :, :-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((a * b).mean()) < 5 * p * (1 - p) / a.numel() ** 0.5


def test_follows_the_generator(device):
    x = torch.randn(HEADS, 4, 50, device=device)
    torch.manual_seed(1)
    first, second = call(x, None, False, 0.5), call(x, None, False, 0.5)
    torch.manual_seed(1)
    assert torch.equal(call(x, None, False, 0.5), first)
    assert not torch.equal(first, second)
    evaluated = fast_mask_softmax_dropout_func(False, HEADS, x, None, False, 0.5)
    assert torch.equal(evaluated, call(x, None, False, 0.0))
    assert torch.equal(MaskSoftmaxDropout.apply(False, HEADS, x, None, False, 0.5), evaluated)


def test_compiles_with_dropout(device):
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    x = torch.randn(HEADS, 4, 50, device=device, requires_grad=True)
    torch.manual_seed(1)
    expected = call(x, None, False, 0.5)
    torch.manual_seed(1)
    assert torch.equal(compiled(x, None, False, 0.5), expected)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_ends_of_probability(p, device):
    x = torch.randn(HEADS, 4, 9, device=device, requires_grad=True)
    y = weights.softmax_dropout(
        x.unflatten(0, (1, HEADS)), None, torch.tensor([1], device=device), p
    )[0]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    expected = torch.softmax(x, -1) * (1 - p)
    torch.testing.assert_close(y.flatten(0, 1), expected)
    assert gradient.abs().max() < 1e-6


def test_hidden_rows_and_special_numbers(device):
    """As ``torch.softmax``: a row that is hidden altogether is NaN, and so is one with a NaN."""
    x = torch.zeros(2 * HEADS, 2, 3, device=device)
    x[2, 0, 0], x[2, 1, 1] = torch.nan, -torch.inf
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]], device=device, dtype=torch.bool)
    y = call(x, mask, False)
    torch.testing.assert_close(y, oracle(x, mask, False), equal_nan=True)
    assert y[:2].isnan().all()
    assert y[2, 0].isnan().all()
    assert y[2, 1].tolist() == [0.5, 0.0, 0.5]


X, PAD = torch.ones(2 * HEADS, 3, 5), torch.zeros(2, 5, dtype=torch.bool)
BAD = {
    "integers": (TypeError, "inputs must be a float64", (X.int(), None, False, 0.1)),
    "dims": (ValueError, r"inputs must have shape \[batch", (X[0], None, False, 0.1)),
    "heads": (ValueError, "must be a multiple of heads", (X[:3], None, False, 0.1)),
    "probability": (
        ValueError,
        r"dropout_prob must be in \[0, 1\], got 1.5",
        (X, None, False, 1.5),
    ),
    "mask's shape": (ValueError, r"pad_mask must have shape \[2, 5\]", (X, PAD[:, :4], False, 0.1)),
    "mask's dtype": (TypeError, "pad_mask must be a float64", (X, PAD, True, 0.1)),
    "mask's device": (ValueError, "pad_mask is on meta", (X, PAD.to("meta"), False, 0.1)),
    "no mask": (TypeError, "pad_mask must be a tensor or None, got list", (X, [1], False, 0.1)),
    "mask's gradient": (
        ValueError,
        "pad_mask requires a gradient",
        (X, PAD.float().requires_grad_(), True, 0.1),
    ),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"fast_mask_softmax_dropout_func: .*{text}"):
        call(*given)


def test_kernels_check_what_python_did_not():
    x, seed = torch.ones(2, HEADS, 3, 5), torch.tensor([1])
    for mask, text in [
        (torch.zeros(2, 5), "mask must be"),
        (torch.zeros(2, 2, 5), "mask must be"),
        (torch.zeros(2, 1, 5).double(), "mask must be bool, uint8 or float32"),
        (torch.zeros(2, 1, 10)[..., ::2], "contiguous but for its first"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.mask_softmax_forward(x, mask)
    for given, text in [
        ((x, None, torch.tensor([1, 2]), 0.5), "seed must be"),
        ((x, None, seed.int(), 0.5), "seed must be"),
        ((x, None, seed, -0.5), "p must be in"),
        ((x.transpose(0, 1), None, seed, 0.5), "contiguous rows"),
        ((x, None, seed, 0.5, 0, 2, 5), "at least those of the scores"),
        ((x, None, seed, 0.5, 0, 3, 4), "at least those of the scores"),
        ((x, None, seed, 0.5, -1, 3, 5), "first at least 0"),
        ((x, None, seed, 0.5, 1), "all three 0; got first 1, rows 0"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.mask_softmax_dropout_forward(*given)
    with pytest.raises(RuntimeError, match="keep must be"):
        ops.mask_softmax_dropout_backward(x, None, x, x.double(), 0.5)
    with pytest.raises(RuntimeError, match="dy must be"):
        ops.mask_softmax_backward(x[:1], x)
