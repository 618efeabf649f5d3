"""TransducerLoss against float64 PyTorch, diagonal by diagonal, over dtypes, shapes and layouts."""

import importlib
import itertools
import sys

import pytest
import torch

from apex.contrib.transducer import TransducerLoss, decompositions
from apex.contrib.transducer.loss import arguments_of
from apex.contrib.transducer.transducer import TransducerLossFunc
from apex.contrib.transducer.transducer_loss import ops
from apex_testkit import FLOATS, LAYOUTS, assert_as_accurate_as, assert_same_bits, opcheck_samples
from apex_testkit.devices import runs_gpu_kernels
from apex_testkit.formulas import CHECKS, Case, check_sharded
from apex_testkit.grids import for_gpus

BLANK = 2


def oracle(x, label, f_len, y_len, blank=BLANK, softmax=True):
    """Cell by cell, forward only: slow and plain."""
    logs = x if x.dtype == torch.float64 else x.float()
    logs = logs.log_softmax(-1) if softmax else logs
    losses = []
    for sample, labels, f, y in zip(
        logs, label.tolist(), f_len.tolist(), y_len.tolist(), strict=True
    ):
        ways = {(0, 0): sample.new_zeros(())}
        for t, u in itertools.product(range(f), range(y + 1)):
            into = []
            if t:
                into.append(ways[t - 1, u] + sample[t - 1, u, blank])
            if u:
                into.append(ways[t, u - 1] + sample[t, u - 1, labels[u - 1]])
            if into:
                ways[t, u] = torch.logaddexp(*into) if len(into) == 2 else into[0]
        losses.append(-(ways[f - 1, y] + sample[f - 1, y, blank]))
    return torch.stack(losses)


def loss_of(x, label, f_len, y_len, blank=BLANK):
    return TransducerLoss()(x, label, f_len, y_len, blank)


def arguments(dtype, device, columns=5):
    x = torch.randn(2, 3, 3, columns, device=device, dtype=dtype)
    numbers = ([[1, 4], [3, 0]], [3, 2], [2, 1])
    return x, *(torch.tensor(n, device=device) for n in numbers)


CASE = Case(
    loss_of,
    arguments,
    oracle,
    grads=(0,),
    rows=(0, 1, 2, 3),
    operators=(ops.transducer_loss_forward, ops.transducer_loss_backward),
    decompositions=decompositions,
    ulps=4,  # every cell rounds
    wide=arguments,
)


def with_gradient(function, x, *given):
    x = x.detach().requires_grad_()
    loss = function(x, *given)
    return loss.detach(), torch.autograd.grad(loss, x, torch.linspace(0.5, 2, len(loss)).to(loss))[
        0
    ]


def sizes(batch, frames, labels, classes, device, dtype, seed=0):
    """Samples of all lengths from one frame and no label to all of them."""
    torch.manual_seed(seed)
    x = torch.randn(batch, frames, labels + 1, classes, device=device, dtype=dtype)
    label = torch.randint(0, classes, (batch, labels), device=device)
    f_len = torch.randint(1, frames + 1, (batch,), device=device)
    y_len = torch.randint(0, labels + 1, (batch,), device=device)
    f_len[0], y_len[0] = frames, labels
    return x, label, f_len, y_len


SIZES = {
    "small": (3, 4, 3, 7),
    "one": (1, 1, 0, 3),
    "no labels": (2, 5, 0, 9),
    "one frame": (2, 1, 4, 9),
    "long": (2, 40, 9, 33),
    "odd classes": (2, 6, 5, 63),
    **for_gpus(block=(2, 2, 2, 776), wide=(1, 2, 2, 1027)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, size, layout, device):
    x, *given = sizes(*size, device, dtype)
    x = LAYOUTS[layout](x)
    actual = with_gradient(loss_of, x, *given)
    reference = lambda x: with_gradient(oracle, x, *given)
    # Truth is of the same dtype there, and every step rounds numbers as large as the loss.
    steps = size[1] + size[2]
    assert_as_accurate_as(reference, actual, x, ulps=2.0 * steps if dtype == torch.float64 else 1.0)
    inside = (torch.arange(x.shape[1], device=device)[:, None] < given[1][:, None, None]) & (
        torch.arange(x.shape[2], device=device) <= given[2][:, None, None]
    )
    assert not actual[1][~inside].any()


def packed(x, label, f_len, y_len):
    """The same samples, without the cells outside of their lengths."""
    lengths = zip(x, f_len.tolist(), y_len.tolist(), strict=True)
    rows = [sample[:f, : y + 1].flatten(0, 1) for sample, f, y in lengths]
    return torch.cat(rows), torch.cumsum(f_len * (y_len + 1), 0)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_packed_input_has_the_same_bits(dtype, size, device):
    x, *given = sizes(*size, device, dtype)
    loss, gradient = with_gradient(loss_of, x, *given)
    rows, ends = packed(x, *given)
    expected, _ = packed(gradient, *given)

    def of_packed(rows):
        return TransducerLoss(packed_input=True)(rows, *given, BLANK, ends, x.shape[1])

    actual = with_gradient(of_packed, rows)
    assert torch.equal(actual[0], loss)
    assert torch.equal(actual[1], expected)


def test_derivatives_of_packed_input(device):
    x, *given = sizes(2, 3, 2, 4, device, torch.float64)
    rows, ends = packed(x, *given)

    def of_packed(rows):
        return TransducerLoss(packed_input=True)(rows, *given, BLANK, ends, 3)

    rows.requires_grad_()
    assert torch.autograd.gradcheck(of_packed, rows)
    assert torch.autograd.gradgradcheck(of_packed, rows)
    expected = torch.stack([of_packed(rows * s) for s in (1, 2)])
    batch = torch.stack((rows, 2 * rows))
    torch.testing.assert_close(torch.func.vmap(of_packed)(batch), expected)
    program = torch.export.export(Packed(given, ends), (rows.detach(),))
    torch.testing.assert_close(program.module()(rows), of_packed(rows))
    program = program.run_decompositions(decompositions())
    torch.testing.assert_close(program.module()(rows), of_packed(rows))


class Packed(torch.nn.Module):
    def __init__(self, given, ends):
        super().__init__()
        self.given, self.ends = given, ends

    def forward(self, rows):
        return TransducerLoss(packed_input=True)(rows, *self.given, BLANK, self.ends, 3)


def test_samples_without_frames(device):
    """Nothing to emit it with: the empty text is certain, any other impossible."""
    x, label, f_len, y_len = sizes(3, 4, 2, 5, device, torch.float32)
    f_len[1:], y_len[1:] = 0, torch.tensor([0, 2], device=device)
    x[1:] = torch.nan  # is not read
    loss, gradient = with_gradient(loss_of, x, label, f_len, y_len)
    assert loss[0].isfinite()
    assert loss[1:].tolist() == [0, torch.inf]
    assert gradient[0].any()
    assert not gradient[1:].any()
    rows, ends = packed(x, label, f_len, y_len)
    of_packed = lambda rows: TransducerLoss(packed_input=True)(
        rows, label, f_len, y_len, BLANK, ends, 4
    )
    again, gradient = with_gradient(of_packed, rows)
    assert torch.equal(again, loss)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3, 2, 5), (2, 0, 1, 5), (2, 0, 3, 5)], ids=str)
def test_empty(shape, device):
    batch, _, width, _ = shape
    x = torch.ones(shape, device=device, requires_grad=True)
    label = torch.zeros(batch, width - 1, dtype=torch.int64, device=device)
    f_len = torch.zeros(batch, dtype=torch.int64, device=device)
    loss = loss_of(x, label, f_len, f_len)
    assert loss.tolist() == [0] * batch
    loss.sum().backward()
    assert x.grad.shape == shape


def test_rows_without_samples(device):
    """None of the packed rows belongs to a sample."""
    x, label = torch.ones(5, 4, device=device), torch.ones(0, 2, device=device).long()
    none = torch.ones(0, dtype=torch.int64, device=device)
    loss = ops.transducer_loss_forward(*raw(x, label, none, none, none, 3))[0]
    assert loss.shape == (0,)


def test_large_offsets_and_certain_steps(device):
    """Gradients keep their digits where logits share an offset, and where a step is certain."""
    x, *given = sizes(2, 5, 3, 8, device, torch.float64)
    label = given[0]
    for u in range(3):
        for b in range(2):
            x[b, :, u, label[b, u]] += 30
    x = (x + 1000).float()
    actual = with_gradient(loss_of, x, *given)
    assert_as_accurate_as(lambda x: with_gradient(oracle, x, *given), actual, x)


def test_the_label_may_be_the_blank(device):
    x, label, f_len, y_len = arguments(torch.float64, device)
    label[:] = BLANK
    actual = with_gradient(loss_of, x, label, f_len, y_len)
    torch.testing.assert_close(actual, with_gradient(oracle, x, label, f_len, y_len))


def test_impossible_classes(device):
    """A class that is masked by -inf leaves the ways without it."""
    x, *given = sizes(2, 4, 2, 6, device, torch.float32)
    other = next(c for c in range(6) if c != BLANK and c not in given[0].flatten().tolist())
    x[..., other] = -torch.inf
    actual = with_gradient(loss_of, x, *given)
    torch.testing.assert_close(actual[0], oracle(x, *given))
    assert actual[1].isfinite().all()
    assert not actual[1][..., other].any()


def test_many_rows(device):
    x, *given = sizes(9, 150, 60, 3, device, torch.float32)
    assert x.numel() // 3 > 65536
    again = [t.repeat(1, *[1] * (t.dim() - 1)) for t in (x, *given)]
    assert torch.equal(loss_of(x, *given), loss_of(*again))
    few = slice(0, 1)
    torch.testing.assert_close(
        loss_of(x, *given)[few], oracle(x[few].double(), *(g[few] for g in given)).float()
    )


def test_same_bits(device):
    x, *given = sizes(4, 9, 5, 33, device, torch.float32)
    assert_same_bits(lambda: with_gradient(loss_of, x, *given))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASE, device)


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def raw(x, label, f_len, y_len, ends=None, frames=0):
    return x, label, f_len, y_len, ends, BLANK, frames, True


def test_is_a_good_citizen_of_torch(device):
    x, *given = arguments(torch.float32, device)
    rows, ends = packed(x, *given)
    samples = [raw(x, *given), raw(rows, *given, ends, 3), raw(x[:0], *(g[:0] for g in given))]
    opcheck_samples(ops.transducer_loss_forward, samples)
    backward = []
    for sample in samples:
        loss, *saved = ops.transducer_loss_forward(*sample)
        backward.append((torch.ones_like(loss), sample[0], *saved, *sample[1:]))
    opcheck_samples(ops.transducer_loss_backward, backward)


def test_numbers_out_of_range(device):
    """A CPU says which; a GPU gives NaN for that sample, and reads nothing out of bounds."""
    x, label, f_len, y_len = arguments(torch.float32, device)
    wrong = {
        r"label\[0, 1\] is 5, but x has 5 classes": (label.clone(), 0, (0, 1), 5),
        r"label\[0, 0\] is -1, but x has 5 classes": (label.clone(), 0, (0, 0), -1),
        r"f_len\[1\] is 4: expected 0 to 3": (f_len.clone(), 1, 1, 4),
        r"f_len\[1\] is -1: expected 0 to 3": (f_len.clone(), 1, 1, -1),
        r"y_len\[0\] is 3: expected 0 to 2": (y_len.clone(), 2, 0, 3),
    }
    for text, (numbers, which, place, value) in wrong.items():
        numbers[place] = value
        given = [label, f_len, y_len]
        given[which] = numbers
        sample = place[0] if isinstance(place, tuple) else place
        if not runs_gpu_kernels(device):
            with pytest.raises(RuntimeError, match=text):
                loss_of(x, *given)
            continue
        loss = ops.transducer_loss_forward(*raw(x, *given))[0]
        assert loss[sample].isnan()
        assert loss[1 - sample].isfinite()


@pytest.mark.parametrize("first", [14, -1, -(2**63), 2**63 - 1])
def test_offsets_out_of_range(first, device):
    """Also those from which a sample's size cannot be taken away: it would be inside again."""
    x, *given = arguments(torch.float32, device)
    rows, ends = packed(x, *given)
    ends[0] = first
    if runs_gpu_kernels(device):
        loss = ops.transducer_loss_forward(*raw(rows, *given, ends, 3))[0]
        assert loss.isnan().any()
        return
    with pytest.raises(
        RuntimeError, match=rf"batch_offset\[0\] is {first}: expected 9, the sum of f_len"
    ):
        TransducerLoss(packed_input=True)(rows, *given, BLANK, ends, 3)


def test_debug_list(device):
    x, *given = arguments(torch.float64, device)
    seen, kept = [], [None]
    loss = TransducerLoss()(x, *given, BLANK, debug_list=seen)
    TransducerLoss()(x, *given, BLANK, debug_list=kept)
    assert kept == [None]
    alpha, beta = seen
    assert alpha.shape == beta.shape == x.shape[:3]
    torch.testing.assert_close(-beta[:, 0, 0], loss)
    logs = x.log_softmax(-1)
    last = torch.stack(
        [logs[b, f - 1, y, BLANK] for b, (f, y) in enumerate(zip(*given[1:], strict=True))]
    )
    ends = torch.stack(
        [alpha[b, f - 1, y] for b, (f, y) in enumerate(zip(*given[1:], strict=True))]
    )
    torch.testing.assert_close(-(ends + last), loss)


def test_class_of_apex(device):
    x, *given = arguments(torch.float32, device)
    expected = loss_of(x, *given)
    for fuse in (False, True):
        x.requires_grad_().grad = None
        loss = TransducerLossFunc.apply(x, *given, None, None, BLANK, fuse, None, 1, False)
        assert torch.equal(loss, expected)
        loss.sum().backward()
        assert x.grad.any()
    assert torch.equal(TransducerLossFunc.forward(None, x, *given, None, None, BLANK), expected)
    lengths = [g.int() for g in given]
    assert torch.equal(loss_of(x, *lengths), expected)


X = torch.ones(2, 3, 3, 5)
L, F, Y = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([3, 2]), torch.tensor([2, 1])
BAD = {
    "integers": (TypeError, "x must be a float64", (X.int(), L, F, Y)),
    "label": (TypeError, "label must be an int32 or int64 tensor, got torch.float32", (X, X, F, Y)),
    "list": (TypeError, "f_len must be an int32 or int64 tensor, got list", (X, L, [3, 2], Y)),
    "label's shape": (ValueError, r"label must have shape \[B, U - 1\]", (X, F, F, Y)),
    "dimensions": (ValueError, r"x must have shape \[2, T, 3, V\], for", (X[0], L, F, Y)),
    "width": (ValueError, r"x must have shape \[2, T, 3, V\], for", (X[:, :, :2], L, F, Y)),
    "no classes": (ValueError, r"x must have shape", (X[..., :0], L, F, Y)),
    "lengths": (ValueError, r"y_len must have shape \[2\]", (X, L, F, Y[:1])),
    "devices": (ValueError, "f_len is on meta, but x on cpu", (X, L, F.to("meta"), Y)),
    "blank": (ValueError, "blank_idx must be a class of x .* 0 to 4, got 5", (X, L, F, Y, 5)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"TransducerLoss: {text}"):
        loss_of(*given)


def test_bad_packed_input():
    rows, ends = packed(X, L, F, Y)
    module = TransducerLoss(packed_input=True)
    for given in ((None, 3), (ends, None)):
        with pytest.raises(ValueError, match="packed_input=True needs batch_offset"):
            module(rows, L, F, Y, BLANK, *given)
    with pytest.raises(ValueError, match=r"x must have shape \[rows, V\], because packed_input"):
        module(X, L, F, Y, BLANK, ends, 3)
    with pytest.raises(ValueError, match=r"batch_offset must have shape \[2\]"):
        module(rows, L, F, Y, BLANK, ends[:1], 3)
    with pytest.raises(TypeError, match="batch_offset must be an int32 or int64 tensor"):
        module(rows, L, F, Y, BLANK, rows[0], 3)


def test_kernels_check_what_python_did_not():
    rows, ends = packed(X, L, F, Y)
    for given, text in [
        (raw(X.transpose(0, 1), L, F, Y), "x must be contiguous"),
        (raw(rows, L, F, Y), r"x must be contiguous, \[B, T, U, V\]"),
        (raw(X, L[:1], F, Y), r"x must be \[1, T, 3, V\]"),
        (raw(X, L.int(), F, Y), "label must be contiguous, with 4 elements of int64"),
        (raw(X, L, F[:1], Y), "f_len must be contiguous, with 2 elements"),
        (raw(rows, L, F, Y, ends[:1], 3), "batch_offset must be contiguous, with 2 elements"),
        (raw(X.long(), L, F, Y), "got int64"),
        ((X, L, F, Y, None, 7, 0, True), "blank must be a class of x, 0 to 4, got 7"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.transducer_loss_forward(*given)
    loss, *saved = ops.transducer_loss_forward(*raw(X, L, F, Y))
    with pytest.raises(RuntimeError, match="grad_loss must be contiguous, with 2 elements"):
        ops.transducer_loss_backward(loss[:1], X, *saved, *raw(X, L, F, Y)[1:])


@pytest.mark.parametrize("is_packed", [False, True])
def test_extension_module_of_apex(is_packed, device):
    """It takes logarithms of probabilities, and gives the gradient of them or of the logits."""
    import transducer_loss_cuda as legacy

    x, *given = arguments(torch.float64, device)
    rows, ends = packed(x, *given)
    logits = rows if is_packed else x
    offset = ends if is_packed else None
    options = (offset, 3, BLANK, 1)
    logs = logits.log_softmax(-1).requires_grad_()
    alpha, beta, loss = legacy.forward(logs, *given, *options, is_packed)
    torch.testing.assert_close(loss, loss_of(x, *given))
    assert alpha.shape == beta.shape == logits.shape[:-1]
    label, f_len, y_len = given
    grad = torch.linspace(0.5, 2, len(loss), dtype=torch.float64, device=device)
    for fused, leaf in ((True, logits.clone()), (False, logs)):
        leaf = leaf.detach().requires_grad_()
        plain = _plain(leaf if not fused else leaf.log_softmax(-1), *given, offset)
        (expected,) = torch.autograd.grad(plain, leaf, grad)
        back = legacy.backward(
            logs, grad, alpha, beta, f_len, y_len, label, *options, fused, is_packed
        )
        torch.testing.assert_close(back, expected)
    with pytest.raises(ValueError, match="transducer_loss_cuda: beta must have shape"):
        legacy.backward(logs, grad, alpha, beta[:1], *given[1:], label, *options, True, is_packed)


def _plain(logs, label, f_len, y_len, ends):
    """The oracle's loss of logarithms of probabilities."""
    if ends is not None:
        starts = (ends - f_len * (y_len + 1)).tolist()
        grid = logs.new_full((len(label), 3, 3, logs.shape[-1]), 0.0)
        lengths = zip(starts, f_len.tolist(), y_len.tolist(), strict=True)
        for b, (start, f, y) in enumerate(lengths):
            own = logs[start : start + f * (y + 1)].reshape(f, y + 1, -1)
            grid[b, :f, : y + 1] = own
        logs = grid
    return oracle(logs, label, f_len, y_len, softmax=False)


@pytest.mark.parametrize("module", ["transducer_loss_cuda", "transducer_joint_cuda"])
def test_import_error_where_kernels_cannot_run(module, monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.contrib._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module(module)


def test_reference_function_of_apex():
    from apex.contrib.transducer._transducer_ref import transducer_loss_reference

    x, *given = arguments(torch.float64, "cpu")
    grad = torch.tensor([1.0, 0.5], dtype=torch.float64)
    alpha, beta, gradient, loss = transducer_loss_reference(x, *given, BLANK, grad)
    expected = ops.transducer_loss_forward(*arguments_of(x, *given, BLANK, None))
    torch.testing.assert_close((alpha, beta), expected[-2:])
    torch.testing.assert_close(loss, oracle(x, *given))
    leaf = x.requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(oracle(leaf, *given), leaf, grad)[0])
    assert alpha.shape == x.shape[:3]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_loss_has_the_dtype_of_the_logits(dtype):
    x, *given = arguments(dtype, "cpu")
    for options in ({}, {"fuse_softmax_backward": False}):
        loss = TransducerLoss(**options)(x.requires_grad_(), *given, BLANK)
        assert loss.dtype == dtype
        loss.sum().backward()
        assert x.grad.dtype == dtype
