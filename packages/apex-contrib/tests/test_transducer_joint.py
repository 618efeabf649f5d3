"""TransducerJoint against float64 PyTorch, over dtypes, shapes, layouts and options."""

import itertools

import pytest
import torch

from apex.contrib.transducer import TransducerJoint, decompositions
from apex.contrib.transducer.transducer import TransducerJointFunc
from apex.contrib.transducer.transducer_joint import ops
from apex_testkit import FLOATS, LAYOUTS, assert_as_accurate_as, assert_same_bits, opcheck_samples
from apex_testkit.devices import runs_gpu_kernels
from apex_testkit.formulas import CHECKS, Case, check_sharded
from apex_testkit.grids import for_gpus


def oracle(f, g, f_len, g_len, relu=False, keep=None, scale=1.0):
    h = f[:, :, None] + g[:, None]
    h = h.relu() if relu else h
    h = h if keep is None else torch.where(keep, h * scale, 0)
    return torch.where(inside(f, g, f_len, g_len)[..., None], h, -1)


def inside(f, g, f_len, g_len):
    t, u = (torch.arange(x.shape[1], device=x.device) for x in (f, g))
    return (t[:, None] < f_len[:, None, None]) & (u < g_len[:, None, None])


def packed(h, f, g, f_len, g_len):
    """Rows of the cells inside."""
    return h[inside(f, g, f_len, g_len)]


def relu_joint(f, g, f_len, g_len):
    return TransducerJoint(relu=True)(f, g, f_len, g_len)


def arguments(dtype, device, columns=4):
    sizes = (2, 3, columns), (2, 2, columns)
    f, g = (torch.randn(s, device=device, dtype=dtype) for s in sizes)
    lengths = (torch.tensor(n, device=device) for n in ([3, 2], [1, 2]))
    return f, g, *lengths


CASE = Case(
    relu_joint,
    arguments,
    lambda *given: oracle(*given, relu=True),
    grads=(0, 1),
    rows=(0, 1, 2, 3),
    operators=(ops.transducer_joint_forward, ops.transducer_joint_backward),
    decompositions=decompositions,
    ulps=2,
    wide=arguments,
)


def sizes(batch, frames, width, columns, device, dtype):
    """Samples of all lengths, none among them."""
    f, g = (
        torch.randn(batch, count, columns, device=device, dtype=dtype) for count in (frames, width)
    )
    lengths = [torch.randint(0, n + 1, (batch,), device=device) for n in (frames, width)]
    for own, most in zip(lengths, (frames, width), strict=True):
        own[0] = most
    return f, g, *lengths


SIZES = {
    "small": (3, 4, 3, 7),
    "one": (1, 1, 1, 1),
    "one label": (2, 5, 1, 64),
    "one frame": (2, 1, 9, 33),
    "odd": (4, 11, 6, 63),
    # A GPU adds up the cells of long frames, and of long labels, in several parts.
    **for_gpus(block=(2, 2, 2, 776), wide=(1, 2, 2, 1027), many=(2, 140, 3, 3)),
    **for_gpus(labels=(2, 3, 267, 5), both=(1, 131, 130, 3)),
}


def with_gradients(function, f, g, seed):
    leaves = [t.detach().requires_grad_() for t in (f, g)]
    h = function(*leaves)
    return h.detach(), *torch.autograd.grad(h, leaves, seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, size, relu, layout, device):
    f, g, *lengths = sizes(*size, device, dtype)
    f, g = LAYOUTS[layout](f), LAYOUTS[layout](g)
    seed = torch.randn(*f.shape[:2], *g.shape[1:], device=device, dtype=dtype)
    seed = LAYOUTS[layout](seed)
    joint = TransducerJoint(relu=relu)
    actual = with_gradients(lambda f, g: joint(f, g, *lengths), f, g, seed)
    reference = lambda f, g, seed: with_gradients(
        lambda f, g: oracle(f, g, *lengths, relu=relu), f, g, seed
    )
    ulps = max(size[1:3]) if dtype == torch.float64 else 1.0
    assert_as_accurate_as(reference, actual, f, g, seed, ulps=ulps)
    # Packed: the same cells in the same bits.
    ends = torch.cumsum(lengths[0] * lengths[1], 0)
    joint = TransducerJoint(pack_output=True, relu=relu)
    of_cells = lambda t: packed(t, f, g, *lengths)
    again = with_gradients(
        lambda f, g: joint(f, g, *lengths, ends, int(ends[-1])), f, g, of_cells(seed)
    )
    assert torch.equal(again[0], of_cells(actual[0]))
    for a, b in zip(again[1:], actual[1:], strict=True):
        torch.testing.assert_close(a, b, atol=2 * torch.finfo(dtype).eps * ulps, rtol=1e-2)


def test_samples_before_have_no_say_in_bits(device):
    f, g, *lengths = sizes(3, 20, 10, 5, device, torch.float32)
    seed = torch.randn(3, 20, 10, 5, device=device)
    run = lambda of: with_gradients(
        lambda f, g: TransducerJoint()(f, g, *(n[of] for n in lengths)), f[of], g[of], seed[of]
    )
    alone = zip(*(run(slice(b, b + 1)) for b in range(3)), strict=True)
    for together, parts in zip(run(slice(None)), alone, strict=True):
        assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_dropout(dtype, is_packed, relu, device):
    """The mask that is probed gives value and gradients; another call has another mask."""
    f, g, *lengths = sizes(3, 8, 5, 33, device, dtype)
    ends = torch.cumsum(lengths[0] * lengths[1], 0)
    joint = TransducerJoint(is_packed, relu, True, dropout_prob=0.25, probe_mask=True)
    given = (*lengths, ends, int(ends[-1])) if is_packed else lengths
    shape = (int(ends[-1]), 33) if is_packed else (3, 8, 5, 33)
    seed = torch.randn(shape, device=device, dtype=dtype)
    actual = with_gradients(lambda f, g: joint(f, g, *given), f, g, seed)
    (mask,) = joint.mask_probe
    assert mask.dtype == torch.bool
    assert mask.shape == shape
    of_cells = lambda t: packed(t, f, g, *lengths) if is_packed else t
    # The probed mask has no cells where the sum is negative, as Apex's: ReLU changes no more.
    keep = mask
    if is_packed:
        keep = torch.zeros(3, 8, 5, 33, dtype=torch.bool, device=device)
        keep[inside(f, g, *lengths)] = mask
    plain = lambda f, g: of_cells(oracle(f, g, *lengths, keep=keep, scale=4 / 3))
    expected = with_gradients(plain, f.double(), g.double(), seed.double())
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, atol=8 * torch.finfo(dtype).eps, rtol=1e-3)
    is_inside = torch.ones_like(mask[..., 0]) if is_packed else inside(f, g, *lengths)
    share = mask[is_inside].double().mean()
    assert (0.3 < share < 0.45) if relu else (0.7 < share < 0.8)
    joint(f, g, *given)
    assert len(joint.mask_probe) == 2
    assert not torch.equal(*joint.mask_probe)
    assert torch.equal(joint.eval()(f, g, *given), TransducerJoint(is_packed, relu)(f, g, *given))


def test_a_seed_gives_the_same_dropout(device):
    f, g, *lengths = arguments(torch.float32, device)
    joint = TransducerJoint(dropout=True, dropout_prob=0.5)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(joint(f, g, *lengths))
    assert torch.equal(*results)


def test_infinities_and_nan(device):
    f = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], device=device).reshape(1, 1, 4)
    g, one = torch.zeros(1, 1, 4, device=device), torch.ones(1, dtype=torch.int64, device=device)
    for relu in (False, True):
        expected = oracle(f, g, one, one, relu=relu)
        h = TransducerJoint(relu=relu)(f, g, one, one)
        torch.testing.assert_close(h, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 3, 2, 5), (2, 0, 1, 5), (2, 3, 0, 5), (2, 3, 2, 0)], ids=str)
def test_empty(shape, device):
    batch, frames, width, columns = shape
    f, g = (torch.ones(batch, n, columns, device=device) for n in (frames, width))
    lengths = [torch.full((batch,), n, device=device) for n in (frames, width)]
    seed = torch.ones(shape, device=device)
    h, df, dg = with_gradients(lambda f, g: TransducerJoint()(f, g, *lengths), f, g, seed)
    assert h.shape == shape
    assert torch.equal(df, torch.full_like(f, width))
    assert torch.equal(dg, torch.full_like(g, frames))


def test_rows_without_samples(device):
    """None of the packed rows belongs to a sample."""
    f, g = torch.ones(0, 3, 4, device=device), torch.ones(0, 2, 4, device=device)
    none = torch.ones(0, dtype=torch.int64, device=device)
    h = ops.transducer_joint_forward(*raw(f, g, none, none, None, none, 5))
    assert torch.equal(h, torch.full((5, 4), -1.0, device=device))
    df, dg = ops.transducer_joint_backward(h, *raw(f, g, none, none, None, none, 5))
    assert (df.shape, dg.shape) == (f.shape, g.shape)


def test_many_rows(device):
    f, g, *lengths = sizes(7, 150, 70, 3, device, torch.float32)
    seed = torch.randn(7, 150, 70, 3, device=device)
    assert seed.numel() // 3 > 65536
    actual = with_gradients(lambda f, g: relu_joint(f, g, *lengths), f, g, seed)
    plain = lambda f, g, seed: with_gradients(
        lambda f, g: oracle(f, g, *lengths, relu=True), f, g, seed
    )
    assert_as_accurate_as(plain, actual, f, g, seed)


def test_same_bits(device):
    f, g, *lengths = sizes(4, 30, 20, 33, device, torch.float32)
    seed = torch.randn(4, 30, 20, 33, device=device)
    assert_same_bits(lambda: with_gradients(lambda f, g: relu_joint(f, g, *lengths), f, g, seed))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASE, device)


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_derivatives_of_packed_and_dropped_output(device):
    f, g, *lengths = arguments(torch.float64, device)
    ends = torch.cumsum(lengths[0] * lengths[1], 0)
    keep = torch.rand(int(ends[-1]), 4, device=device) > 0.3

    def joint(f, g):
        from apex.contrib.transducer.joint import _joint

        return _joint(f, g, *lengths, keep, ends, len(keep), False, 1.5)

    leaves = [t.requires_grad_() for t in (f, g)]
    assert torch.autograd.gradcheck(joint, leaves)
    assert torch.autograd.gradgradcheck(joint, leaves)


def raw(f, g, f_len, g_len, keep=None, ends=None, rows=0, relu=True, scale=1.0):
    return f, g, f_len, g_len, keep, ends, rows, relu, scale


def test_is_a_good_citizen_of_torch(device):
    given = arguments(torch.float32, device)
    ends = torch.cumsum(given[2] * given[3], 0)
    keep = torch.ones(2, 3, 2, 4, dtype=torch.bool, device=device)
    samples = [
        raw(*given),
        raw(*given, keep, relu=False),
        raw(*given, None, ends, 7),
        raw(*(t[:0] for t in given)),
    ]
    opcheck_samples(ops.transducer_joint_forward, samples)
    backward = []
    for sample in samples:
        h = ops.transducer_joint_forward(*sample)
        backward.append((torch.ones_like(h), *sample))
    opcheck_samples(ops.transducer_joint_backward, backward)


def test_lengths_out_of_range(device):
    """A CPU says which; on a GPU such a sample is outside, and nothing is read out of bounds."""
    f, g, f_len, g_len = arguments(torch.float32, device)
    for text, lengths in {
        r"f_len\[1\] is 4: expected 0 to 3, the frames of f": (torch.tensor([3, 4]), g_len),
        r"f_len\[0\] is -1: expected 0 to 3": (torch.tensor([-1, 2]), g_len),
        r"g_len\[0\] is 3: expected 0 to 2, the rows of g": (f_len, torch.tensor([3, 1])),
    }.items():
        if not runs_gpu_kernels(device):
            with pytest.raises(RuntimeError, match=text):
                TransducerJoint()(f, g, *lengths)
            continue
        h = ops.transducer_joint_forward(*raw(f, g, *(n.to(device) for n in lengths)))
        assert (h == -1).flatten(1).all(1).sum() == 1
    ends = torch.cumsum(f_len * g_len, 0)
    if runs_gpu_kernels(device):
        h = ops.transducer_joint_forward(*raw(f, g, f_len, g_len, None, ends + 1, 7))
        assert h.shape == (7, 4)
        return
    with pytest.raises(RuntimeError, match=r"batch_offset\[0\] is 4: expected 3, the sum of f_len"):
        TransducerJoint(pack_output=True)(f, g, f_len, g_len, ends + 1, 8)
    with pytest.raises(RuntimeError, match=r"batch_offset\[1\] is 7: expected 7, .* at most"):
        TransducerJoint(pack_output=True)(f, g, f_len, g_len, ends, 6)


def test_extension_module_of_apex(device):
    import transducer_joint_cuda as legacy

    f, g, *lengths = arguments(torch.float32, device)
    ends = torch.cumsum(lengths[0] * lengths[1], 0)
    rows = int(ends[-1])
    for is_packed, relu, dropout in itertools.product((False, True), repeat=3):
        h, *mask = legacy.forward(f, g, *lengths, ends, rows, 1, is_packed, relu, dropout, 0.25, 4)
        assert len(mask) == (relu or dropout)
        seed = torch.randn_like(h)
        scale = 4 / 3 if dropout else 1.0
        df, dg = legacy.backward([seed, *mask], *lengths, ends, 3, 2, is_packed, scale)
        keep = mask[0] if mask else None
        if mask and is_packed:
            keep = torch.zeros(2, 3, 2, 4, dtype=torch.bool, device=device)
            keep[inside(f, g, *lengths)] = mask[0]
        of_cells = lambda t, is_packed=is_packed: packed(t, f, g, *lengths) if is_packed else t
        plain = lambda f, g, k=keep, s=scale, c=of_cells: c(oracle(f, g, *lengths, keep=k, scale=s))
        expected = with_gradients(plain, f, g, seed)
        torch.testing.assert_close((h, df, dg), expected)


def test_class_and_reference_of_apex(device):
    from apex.contrib.transducer._transducer_ref import transducer_joint_reference

    f, g, *lengths = arguments(torch.float64, device)
    expected = oracle(f, g, *lengths, relu=True)
    options = (False, True, False, None, 0, 1, 4, 0.0, None)
    assert torch.equal(TransducerJointFunc.apply(f, g, *lengths, *options), expected)
    assert torch.equal(TransducerJointFunc.forward(None, f, g, *lengths, *options), expected)
    short = [n.int() for n in lengths]
    seed = torch.randn_like(expected)
    results = transducer_joint_reference(f, g, seed, *short, False, True, False)
    wanted = with_gradients(lambda f, g: oracle(f, g, *lengths, relu=True), f, g, seed)
    torch.testing.assert_close(results, wanted)
    cells = lambda t: packed(t, f, g, *lengths)
    results = transducer_joint_reference(f, g, seed, *short, True, True, False)
    torch.testing.assert_close(results, (cells(wanted[0]), *wanted[1:]))
    mask = torch.rand_like(seed) > 0.5
    results = transducer_joint_reference(f, g, seed, *short, True, True, True, 0.5, mask)
    of_mask = lambda f, g: oracle(f, g, *lengths, relu=True, keep=mask, scale=2.0)
    wanted = with_gradients(of_mask, f, g, seed)
    torch.testing.assert_close(results, (cells(wanted[0]), *wanted[1:]))
    with pytest.raises(NotImplementedError, match="dropout=True needs its mask"):
        transducer_joint_reference(f, g, seed, *lengths, False, False, True, 0.5)


X, Y, N = torch.ones(2, 3, 4), torch.ones(2, 2, 4), torch.tensor([2, 1])
BAD = {
    "integers": (TypeError, "f must be a float64", (X.int(), Y, N, N)),
    "dtypes": (TypeError, "g is torch.float16, but f is torch.float32", (X, Y.half(), N, N)),
    "dimensions": (ValueError, r"f must have shape \[B, T, H\]", (X[0], Y, N, N)),
    "columns": (ValueError, r"g must have shape \[2, U, 4\]", (X, Y[..., :3], N, N)),
    "batch": (ValueError, r"g must have shape \[2, U, 4\]", (X, Y[:1], N, N)),
    "lengths": (ValueError, r"g_len must have shape \[2\]", (X, Y, N, N[:1])),
    "floats": (TypeError, "f_len must be an int32 or int64", (X, Y, N.float(), N)),
    "devices": (ValueError, "g is on meta, but f on cpu", (X, Y.to("meta"), N, N)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"TransducerJoint: {text}"):
        TransducerJoint()(*given)


def test_bad_options():
    for probability in (-0.1, 1.0, 2.0):
        with pytest.raises(ValueError, match=r"dropout_prob must be in \[0, 1\), got"):
            TransducerJoint(dropout=True, dropout_prob=probability)
    with pytest.raises(ValueError, match="pack_output=True needs batch_offset"):
        TransducerJoint(pack_output=True)(X, Y, N, N)
    for rows in (-1, 2**64 - 1):
        with pytest.raises(ValueError, match=f"needs batch_offset.*and {rows}"):
            TransducerJoint(pack_output=True)(X, Y, N, N, torch.cumsum(N * N, 0), rows)
    with pytest.raises(ValueError, match=r"batch_offset must have shape \[2\]"):
        TransducerJoint(pack_output=True)(X, Y, N, N, N[:1], 3)


TOO_MANY = r"result would have more than 2\^63 elements"


def test_kernels_check_what_python_did_not():
    for given, text in [
        (raw(X.transpose(0, 1), Y, N, N), "f must be contiguous"),
        (raw(X, Y[:1], N, N), r"g must be \[2, U, 4\]"),
        (raw(X, Y.double(), N, N), "g must be contiguous, with 16 elements of float32"),
        (raw(X, Y, N[:1], N), "f_len must be contiguous, with 2 elements"),
        (raw(X, Y, N, N.int()), "g_len must be contiguous, with 2 elements of int64"),
        (raw(X, Y, N, N, X > 0), "keep must be contiguous, with 48 elements of bool"),
        (raw(X, Y, N, N, None, N[:1], 5), "batch_offset must be contiguous, with 2 elements"),
        (raw(X, Y, N, N, None, N, -1), "packed_batch must not be negative, got -1"),
        (
            raw(X, Y, N, N, None, N, 2**62),
            TOO_MANY,
        ),
        (raw(X, Y, N, N, None, N, 2**61 + 1), TOO_MANY),
        (raw(X, Y, N, N, None, N, 2**63 - 1), TOO_MANY),
        (raw(X.long(), Y.long(), N, N), "got int64"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.transducer_joint_forward(*given)
    h = ops.transducer_joint_forward(*raw(X, Y, N, N))
    with pytest.raises(RuntimeError, match="dh must be contiguous, with 48 elements"):
        ops.transducer_joint_backward(h[:1], *raw(X, Y, N, N))
    with pytest.raises(RuntimeError, match=r"dh must be .* elements of float32 in shape"):
        ops.transducer_joint_backward(h.view(-1, 4), *raw(X, Y, N, N))


def test_sizes_beside_zero_do_not_overflow():
    """Once B * T * U of an operator's arguments wrapped around 2**64."""
    none, one = torch.zeros(1, 2**62, 0), torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=TOO_MANY):
        ops.transducer_joint_forward(*raw(none, none, one, one))


@pytest.mark.parametrize("relu", [True, False])
def test_nothing_is_scaled_without_a_mask(relu):
    """``scale`` belongs to dropout, also in the backward."""
    lengths = torch.full_like(N, X.shape[1]), torch.full_like(N, Y.shape[1])
    given = (X, Y, *lengths, None, None, 0, relu)
    h = ops.transducer_joint_forward(*given, 2.0)
    dh = torch.ones_like(h)
    assert torch.equal(h, ops.transducer_joint_forward(*given, 1.0))
    actual, wanted = (ops.transducer_joint_backward(dh, *given, s) for s in (2.0, 1.0))
    for grad, expected in zip(actual, wanted, strict=True):
        assert torch.equal(grad, expected)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("p", [0.0, 0.5], ids=["all", "dropout"])
@pytest.mark.parametrize("relu", [False, True])
def test_a_relu_in_place_may_follow(relu, p, is_packed, device):
    """MLPerf's RNN-T puts one behind the joint, whose gradient does not need the joint."""
    f, g, *lengths = arguments(torch.float32, device)
    joint = TransducerJoint(is_packed, relu, dropout=p > 0, dropout_prob=p)
    ends = torch.cumsum(lengths[0] * lengths[1], 0)
    more = (ends, int(ends[-1])) if is_packed else ()
    found = []
    for relu in (torch.relu_, torch.relu):
        torch.manual_seed(3)
        leaves = f.detach().requires_grad_(), g.detach().requires_grad_()
        found.append(torch.autograd.grad(relu(joint(*leaves, *lengths, *more)).sum(), leaves))
    torch.testing.assert_close(*found)
    assert found[0][0].abs().sum() > 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_gradient_passes_where_the_result_is_positive(dtype, device):
    """The backward adds again: its sums are positive where the forward's were, also tiny ones."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest number
    values = torch.tensor([0.0, 1.0, 1 + torch.finfo(dtype).eps, torch.finfo(dtype).max, torch.inf])
    values = torch.cat([values.to(device, dtype), torch.tensor([tiny], device=device, dtype=dtype)])
    values = torch.cat([values, -values])
    f, g = (t.reshape(1, 1, -1) for t in torch.meshgrid(values, values, indexing="ij"))
    one = torch.ones(1, dtype=torch.int64, device=device)
    f, g = f.clone().requires_grad_(), g.clone().requires_grad_()
    h = relu_joint(f, g, one, one)
    df, dg = torch.autograd.grad(h, (f, g), torch.ones_like(h))
    assert torch.equal(df, dg)
    assert torch.equal(df[0], (h[0, 0] > 0).to(dtype))
