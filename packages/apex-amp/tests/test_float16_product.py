"""float16_product against float64: shapes, layouts, batches, what is added, refusals."""

import pytest
import torch

from apex.amp.casting import cpu_float16
from apex.amp.casting.cpu_float16 import float16_through_float32
from apex.amp.casting.float16_product import float16_product
from apex_testkit import assert_as_accurate_as
from apex_testkit.devices import runs_gpu_kernels

half = torch.float16
# Rows, terms of a sum, columns: a number, parts of a group of 16, few rows of long sums, no terms.
SIZES = [(1, 1, 1), (4, 8, 8), (5, 7, 3), (17, 33, 18), (32, 16, 16), (1, 256, 40), (3, 130, 17)]
SIZES += [(40, 256, 1), (16, 40, 1), (33, 5, 40), (3, 0, 4), (0, 3, 4), (2, 3, 0)]
LAYOUTS = {
    "contiguous": lambda *shape: torch.randn(shape).to(half),
    "transposed": lambda *shape: torch.randn(shape).to(half).mT.contiguous().mT,
    "strided": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1]).to(half)[..., ::2],
    "expanded": lambda *shape: torch.randn(*shape[:-1], 1).to(half).expand(shape),
}
ADDED = {
    "nothing": None,
    "vector": lambda rows, columns: (columns,),
    "column": lambda rows, columns: (rows, 1),
    "matrix": lambda rows, columns: (rows, columns),
    "number": lambda rows, columns: (),
}


@pytest.fixture(autouse=True)
def _on_the_cpu():
    if runs_gpu_kernels(torch.device("cpu")):
        pytest.skip("CPUs alone have this kernel")


def reference(added, a, b, beta=1.0, alpha=1.0):
    return alpha * (a @ b) + (0 if added is None or beta == 0 else beta * added)


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_matches_float64(left, right, added, batch):
    torch.manual_seed(0)
    for rows, terms, columns in SIZES:
        a, b = LAYOUTS[left](*batch, rows, terms), LAYOUTS[right](*batch, terms, columns)
        if added == "nothing":
            y = float16_product(None, a, b)
            expected = reference(None, a.double(), b.double())
        else:
            addend = torch.randn(ADDED[added](rows, columns)).to(half)
            y = float16_product(addend, a, b, 0.5, 2.0)
            expected = reference(addend.double(), a.double(), b.double(), 0.5, 2.0)
        assert y.is_contiguous()
        assert y.shape == expected.shape
        assert y.dtype is half
        if y.numel():
            assert_as_accurate_as(lambda expected: expected, y, expected)


def test_added_is_not_read_without_a_factor():
    added = torch.full((3,), torch.nan).to(half)
    a, b = LAYOUTS["contiguous"](2, 4), LAYOUTS["contiguous"](4, 3)
    assert torch.equal(float16_product(added, a, b, 0.0), float16_product(None, a, b))


def test_infinities_and_nans_stay_in_their_rows():
    a, b = LAYOUTS["contiguous"](6, 20), torch.eye(20).to(half)
    a[1, 3], a[4, 5] = torch.inf, torch.nan
    y = float16_product(None, a, b)
    assert y[[0, 2, 3, 5]].isfinite().all()
    assert not y[1].isfinite().all()
    assert y[4].isnan().all()


WRONG_SHAPES = "cannot be multiplied; a and b must be"
WRONG_DTYPE = "must be float16; one of them is .*float32"
MATRIX = torch.ones(2, 3, dtype=half)
REFUSALS = {
    "terms": (WRONG_SHAPES, (None, MATRIX, MATRIX)),
    "dimensions": (WRONG_SHAPES, (None, MATRIX, MATRIX[0])),
    "batches": (WRONG_SHAPES, (None, MATRIX.expand(2, 2, 3), MATRIX.mT.expand(3, 3, 2))),
    "dtype": (WRONG_DTYPE, (None, MATRIX, MATRIX.mT.float())),
    "dtype of what is added": (WRONG_DTYPE, (MATRIX[0, :2].float(), MATRIX, MATRIX.mT)),
    "shape of what is added": ("added must be expandable", (MATRIX[0], MATRIX, MATRIX.mT)),
    "dimensions of what is added": ("added must be expandable", (MATRIX[None], MATRIX, MATRIX.mT)),
}


@pytest.mark.parametrize(("text", "arguments"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(text, arguments):
    with pytest.raises(RuntimeError, match=text):
        float16_product(*arguments)


@pytest.mark.skipif("mm" not in cpu_float16._slow_ops(), reason="this CPU multiplies float16")
def test_small_products_alone_come_here(monkeypatch):
    calls = []
    spy = lambda *args: calls.append(args) or float16_product(*args)
    monkeypatch.setattr("apex.amp.casting.float16_product.float16_product", spy)
    size = round(cpu_float16._FEW ** (1 / 3))
    matrix = LAYOUTS["contiguous"](size, size)
    with float16_through_float32():
        for multiply in (torch.mm, lambda a, b: torch.addmm(a[0], a, b)):
            calls.clear()
            multiply(matrix, matrix)
            assert len(calls) == 1
            multiply(torch.cat([matrix, matrix[:1]]), matrix)
            multiply(matrix.float(), matrix.float())
            assert len(calls) == 1


def test_is_a_good_citizen_of_torch():
    a, b = LAYOUTS["contiguous"](5, 7), LAYOUTS["contiguous"](7, 3)
    for arguments in ((None, a, b), (a[:3, 0], a, b, 0.5, 2.0)):
        torch.library.opcheck(float16_product, arguments)
