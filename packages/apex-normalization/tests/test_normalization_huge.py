"""A matrix of more than 2^31 elements; what the operator returns is memory of its own, 4 GB."""

import os

import pytest
import torch

from apex.normalization.fused_layer_norm import ops
from apex_testkit.huge import huge_zeros, needs_linux

COLUMNS = 4096
TAIL = 3  # rows that are not zero, beyond element 2^31
ROWS = 2**31 // COLUMNS + TAIL
NEEDED_BYTES = 6 << 30
EPS = 1e-5


def free_bytes():
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


pytestmark = [
    pytest.mark.slow,
    needs_linux,
    pytest.mark.skipif(free_bytes() < NEEDED_BYTES, reason="needs 6 GB of free memory"),
]


def huge(tail):
    """A matrix of zeros whose last rows are ``tail``."""
    matrix = huge_zeros(ROWS * COLUMNS, tail.dtype).view(ROWS, COLUMNS)
    matrix[-TAIL:] = tail
    return matrix


def forward(kind, x, weight, bias):
    """Return y and the statistics."""
    if kind == "layer":
        return ops.layer_norm_forward(x, weight, bias, COLUMNS, EPS)
    return ops.rms_norm_forward(x, weight, COLUMNS, EPS)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_forward(kind):
    """Rows that begin beyond element 2^31, and the zeros before them, which come out as bias."""
    x = torch.randn(TAIL, COLUMNS, dtype=torch.bfloat16)
    weight, bias = torch.randn(2, COLUMNS, dtype=torch.bfloat16)
    expected = forward(kind, x, weight, bias)
    actual = forward(kind, huge(x), weight, bias)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a[-TAIL:], e)
    assert torch.equal(actual[0][-TAIL - 1], bias if kind == "layer" else torch.zeros_like(bias))


def test_layer_norm_backward():
    """Both gradients of rows that begin beyond element 2^31; each touched page costs time."""
    x = torch.randn(TAIL, COLUMNS, dtype=torch.bfloat16)
    weight = torch.randn(COLUMNS, dtype=torch.bfloat16)
    _, mean, rstd = ops.layer_norm_forward(x, weight, None, COLUMNS, EPS)
    expected = ops.layer_norm_backward(x, x, weight, mean, rstd, COLUMNS, True)
    rows = huge(x)
    means, rstds = torch.zeros(ROWS), torch.ones(ROWS)
    means[-TAIL:], rstds[-TAIL:] = mean, rstd
    actual = ops.layer_norm_backward(rows, rows, weight, means, rstds, COLUMNS, True)
    assert torch.equal(actual[0][-TAIL:], expected[0])
    assert actual[0][-TAIL - 1].eq(0).all()
    for a, e in zip(
        actual[1:], expected[1:], strict=True
    ):  # of blocks of rows that begin elsewhere
        torch.testing.assert_close(a, e, rtol=2**-8, atol=2**-20)
