"""index_mul_2d against float64 PyTorch, over dtypes, shapes and layouts, and what torch asks."""

import importlib
import sys

import pytest
import torch

from apex.contrib.index_mul_2d import decompositions, index_mul_2d, ops
from apex.contrib.index_mul_2d.index_mul_2d import (
    IndexMul2d_,
    IndexMul2dBackward_,
    index_mul_2d_backward,
)
from apex_testkit import (
    FLOATS,
    LAYOUTS,
    SHAPES,
    assert_as_accurate_as,
    assert_same_bits,
    opcheck_samples,
)
from apex_testkit.devices import runs_gpu_kernels
from apex_testkit.formulas import CHECKS, Case, check_sharded


def oracle(in1, in2, idx1):
    return in1[idx1] * in2


def arguments(dtype, device, columns=9):
    sizes = (5, columns), (4, columns)
    in1, in2 = (torch.randn(s, device=device, dtype=dtype) for s in sizes)
    return in1, in2, torch.tensor([4, 0, -1, 0], device=device)


CASE = Case(
    index_mul_2d,
    arguments,
    oracle,
    grads=(0, 1),
    rows=(1, 2),
    operators=(ops.index_mul_2d_forward, ops.index_mul_2d_backward),
    decompositions=decompositions,
    ulps=2,  # truth rounds the two products of a sum as well
    wide=arguments,
)


def with_gradients(function, in1, in2, idx1, dy):
    inputs = [t.detach().requires_grad_() for t in (in1, in2)]
    y = function(*inputs, idx1)
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def check(in1, in2, idx1, dy, ulps=1.0):
    actual = with_gradients(index_mul_2d, in1, in2, idx1, dy)
    reference = lambda in1, in2, dy: with_gradients(oracle, in1, in2, idx1, dy)
    assert_as_accurate_as(reference, actual, in1, in2, dy, ulps=ulps)


# How many rows in1 has, as a share of in2's: none twice in the mean, many of each, one.
SHARES = {"twice": lambda n: 2 * n, "tenth": lambda n: n // 10 + 1, "one": lambda n: 1}


ARRANGED = [("contiguous", share) for share in SHARES] + [
    (layout, "tenth") for layout in LAYOUTS if layout != "contiguous"
]


@pytest.mark.parametrize(("layout", "share"), ARRANGED, ids=map("-".join, ARRANGED))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, layout, share, device):
    (rows, columns), layout = shape, LAYOUTS[layout]
    picked = SHARES[share](rows)
    in1, in2, dy = (
        layout(torch.randn(n, columns, device=device, dtype=dtype)) for n in (picked, rows, rows)
    )
    idx1 = layout(torch.randint(-picked, picked, (rows,), device=device)) if picked else in1[:, 0]
    # Sums of float64: truth, too, adds one row after the other.
    ulps = max(2.0, rows / max(picked, 1)) ** 0.5 if dtype == torch.float64 else 1.0
    check(in1, in2, idx1.long(), dy, ulps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_some_indices_are_many(dtype, device):
    """A few indices have nearly all rows, and several tiles of the engine; most have none."""
    rows, columns = 3000, 20
    in2, dy = (torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(2))
    in1 = torch.randn(50, columns, device=device, dtype=dtype)
    idx1 = torch.randint(0, 3, (rows,), device=device) * 20
    idx1[::100] = 49
    check(in1, in2, idx1, dy)


# (rows of in1, of in2): what a GPU sorts in other ways than the shapes above.
SORTED = {"fewer rows than in1 has": (17_000, 1000), "many rows": (700, 4500)}


@pytest.mark.parametrize(("picked", "rows"), SORTED.values(), ids=SORTED.keys())
def test_sorts(picked, rows, device):
    in1, in2, dy = (torch.randn(n, 1, device=device) for n in (picked, rows, rows))
    check(in1, in2, torch.randint(picked, (rows,), device=device), dy)


@pytest.mark.parametrize("shapes", [(0, 0, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(shapes, device):
    picked, rows, columns = shapes
    in1, in2 = (torch.randn(n, columns, device=device) for n in (picked, rows))
    idx1 = torch.zeros(rows, dtype=torch.int64, device=device)
    y, din1, din2 = with_gradients(index_mul_2d, in1, in2, idx1, torch.ones_like(in2))
    assert y.shape == din2.shape == in2.shape
    assert torch.equal(din1, torch.zeros_like(in1))


def test_same_bits(device):
    """Of every run and number of threads."""
    in1, in2, dy = (torch.randn(n, 16, device=device) for n in (7, 4000, 4000))
    idx1 = torch.randint(0, 7, (4000,), device=device)
    assert_same_bits(lambda: with_gradients(index_mul_2d, in1, in2, idx1, dy))


def test_inf_and_nan_stay_in_their_columns(device):
    in1 = torch.tensor([[torch.inf, 1.0, 2.0]], device=device)
    in2 = torch.tensor([[1.0, torch.nan, 3.0], [1.0, 1.0, 1.0]], device=device)
    y, din1, _ = with_gradients(
        index_mul_2d, in1, in2, torch.zeros(2, dtype=torch.int64, device=device), in2
    )
    assert y.isinf().tolist() == [[True, False, False]] * 2
    assert y.isnan().tolist() == [[False, True, False], [False] * 3]
    assert din1.isnan().tolist() == [[False, True, False]]
    assert din1[0, [0, 2]].tolist() == [2.0, 10.0]


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASE, device)


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_is_a_good_citizen_of_torch(device):
    in1, in2, idx1 = arguments(torch.float32, device)
    samples = [(in1, in2, idx1), (in1[:0], in2[:0], idx1[:0])]
    opcheck_samples(ops.index_mul_2d_forward, samples)
    given = [(in2[:, :1].expand(4, 9), *samples[0]), (in2[:0], *samples[1])]
    opcheck_samples(ops.index_mul_2d_backward, [(*g, b) for g in given for b in (False, True)])


def test_rows_that_in1_does_not_have(device):
    """A CPU says which; a GPU gives NaN in that row, and reads and writes nothing else."""
    in1, in2, _ = arguments(torch.float32, device)
    for bad in (5, -6, 2**62):
        idx1 = torch.tensor([4, 0, bad, 0], device=device)
        leaves = [t.detach().requires_grad_() for t in (in1, in2)]
        if not runs_gpu_kernels(device):
            text = rf"idx1\[2\] is {bad}, but in1 has 5 rows: expected -5 to 4\."
            with pytest.raises(RuntimeError, match=text):
                index_mul_2d(*leaves, idx1)
            with pytest.raises(RuntimeError, match=text):
                ops.index_mul_2d_backward(in2, in1, in2, idx1, True)
            continue
        y, good = index_mul_2d(*leaves, idx1), [0, 1, 3]
        y.backward(in2)
        assert y[2].isnan().all()
        assert leaves[1].grad[2].isnan().all()
        assert torch.equal(y[good], in1[idx1[good]] * in2[good])
        expected = torch.zeros_like(in1).index_add(0, idx1[good], in2[good] ** 2)
        torch.testing.assert_close(leaves[0].grad, expected)


X, I = torch.ones(4, 6), torch.arange(4)
BAD = {
    "integers": (TypeError, "in1 must be a float64", (X.int(), X, I)),
    "no tensor": (TypeError, "in2 must be a float64.* got float", (X, 0.5, I)),
    "dtypes": (TypeError, "in2 is torch.float16, but in1 is torch.float32", (X, X.half(), I)),
    "int32": (TypeError, r"idx1 must be an int64 tensor, got torch.int32; use", (X, X, I.int())),
    "list": (TypeError, "idx1 must be an int64 tensor, got list", (X, X, [0, 1, 2, 3])),
    "one dimension": (ValueError, r"in1 must have shape \[M, H\]", (X[0], X, I)),
    "columns": (ValueError, r"in2 must have shape \[N, 6\]", (X, X[:, :5], I)),
    "rows": (ValueError, r"idx1 must have shape \[4\]", (X, X, I[:3])),
    "nothing to pick": (ValueError, r"in1 \[0, 6\] has no rows to pick", (X[:0], X, I)),
    "devices": (ValueError, "in1 is on cpu, but in2 is on meta", (X, X.to("meta"), I)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"index_mul_2d: {text}"):
        index_mul_2d(*given)


def test_kernels_check_what_python_did_not():
    for given, text in [
        ((X.t(), X, I), "in1 must be contiguous"),
        ((X, X[:, :5], I), r"in2 must be \[N, 6\]"),
        ((X, X.double(), I), "in2 must be contiguous, with 24 elements of float32"),
        ((X, X, I[:3]), "idx1 must be contiguous, with 4 elements"),
        ((X, X, I.int()), "idx1 must be contiguous, with 4 elements of int64"),
        ((X[:0], X, I), "in1 has no rows to pick"),
        ((X.long(), X.long(), I), "got int64"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.index_mul_2d_forward(*given)
    with pytest.raises(RuntimeError, match="dy must be contiguous, with 24 elements"):
        ops.index_mul_2d_backward(X[:3], X, X, I, True)


def second_derivative(dtype, device):
    """Arguments of the op and of its backward, and what autograd of the plain formula gives."""
    in1, in2, idx1 = arguments(dtype, device)
    leaves = [t.requires_grad_() for t in (torch.randn_like(in2), in1, in2)]
    y = oracle(in1, in2, idx1)
    gradients = torch.autograd.grad(y, (in1, in2), leaves[0], create_graph=True)
    seeds = [torch.randn_like(g) for g in gradients]
    second = torch.autograd.grad(gradients, leaves, seeds)
    return (in1, in2, idx1), leaves, seeds, y, gradients, second


def assert_close(actual, expected):
    unit = 4 * torch.finfo(expected[0].dtype).eps
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.detach(), rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_classes_of_apex(dtype, device):
    given, leaves, seeds, y, gradients, second = second_derivative(dtype, device)
    assert_close([IndexMul2d_.apply(*given)], [y])
    ours = IndexMul2dBackward_.apply(*given, leaves[0])
    assert_close(ours, gradients)
    assert_close(torch.autograd.grad(ours, leaves, seeds), second)
    with torch.no_grad():
        assert_close(index_mul_2d_backward(*given, leaves[0]), gradients)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extension_module_of_apex(dtype, device):
    """It writes to what it is given, whatever that held, with gaps between rows."""
    import fused_index_mul_2d as legacy

    prefix = "half" if dtype in (torch.float16, torch.bfloat16) else "float"
    names = ("forward", "backward", "backward_backward")
    forward, backward, again = (getattr(legacy, f"{prefix}_{name}") for name in names)
    given, (dy, in1, in2), seeds, y, gradients, second = second_derivative(dtype, device)
    like = lambda t: torch.full((t.shape[0], 12), 7.0, dtype=dtype, device=device)[:, 2:11]
    out, of_in1, of_in2 = like(in2), like(in1), like(in2)
    assert forward(out, *given) is None
    assert_close([out], [y])
    assert backward(of_in1, of_in2, dy, *given) is None
    assert_close((of_in1, of_in2), gradients)
    results = like(in2), like(in1), like(in2)
    assert again(*results, dy, *seeds, *given) is None
    assert_close(results, second)
    before = out.clone()
    with pytest.raises(ValueError, match=r"fused_index_mul_2d: out must be .* \[4, 9\] on"):
        forward(out[:3], *given)
    with pytest.raises(ValueError, match=r"grad_in1 must be .* \[5, 9\] on"):
        backward(of_in2, out, dy, *given)
    assert torch.equal(out, before)


def test_backward_of_apex_checks_its_gradient():
    with pytest.raises(ValueError, match=r"index_mul_2d_backward: grad_out must be as in2"):
        IndexMul2dBackward_.apply(X, X, I, X[:3])


def test_import_error_where_kernels_cannot_run(monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.contrib._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, "fused_index_mul_2d", raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module("fused_index_mul_2d")
