"""create_mask against brute force over all patterns, in float64."""

from itertools import combinations, product

import pytest
import torch

from apex.contrib.sparsity import create_mask, sparse_masklib
from apex_testkit import FLOATS

ROWS = [row for row in product([0.0, 1.0], repeat=4) if sum(row) == 2]
BLOCKS = [
    torch.tensor(block)
    for block in product(ROWS, repeat=4)
    if all(sum(column) == 2 for column in zip(*block, strict=True))
]


def matrix_view(weights):
    """The matrix in which weights compete, written anew: rows x input channels."""
    if weights.dim() == 1:
        return weights[None]
    if weights.dim() == 2:
        return weights
    if weights.dim() == 3:
        return torch.stack(
            [weights[k, :, r] for k in range(len(weights)) for r in range(weights.shape[2])]
        )
    places = product(*(range(n) for n in weights.shape[2:]))
    return torch.cat([weights[(slice(None), slice(None), *place)] for place in places])


def kept(weights, mask):
    return float((weights.double().abs() * mask.double()).sum())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(8,), (7,), (3, 16), (5, 10), (4, 8, 3), (4, 8, 2, 3), (2, 5, 1, 2, 2)], ids=str
)
def test_best_two_of_four(shape, dtype, device):
    weights = torch.randn(shape, device=device).to(dtype)
    mask = create_mask(weights, "m4n2_1d")
    assert (mask.shape, mask.dtype, mask.device) == (weights.shape, dtype, weights.device)
    rows, masks = matrix_view(weights.double().cpu()).abs(), matrix_view(mask.double().cpu())
    for row, chosen in zip(rows, masks, strict=True):
        for begin in range(0, len(row), 4):
            run, own = row[begin : begin + 4], chosen[begin : begin + 4]
            assert own.sum() <= 2
            pairs = combinations(run.tolist(), min(2, len(run)))
            assert float((run * own).sum()) == max(map(sum, pairs))


@pytest.mark.parametrize("shape", [(8, 16), (6, 10), (4, 8, 2, 2), (4, 4, 3)], ids=str)
def test_best_block(shape, device):
    weights = torch.randn(shape, device=device)
    mask = create_mask(weights, "m4n2_2d_best")
    rows, masks = (matrix_view(t.double().cpu()) for t in (weights.abs(), mask))
    pad = (0, -rows.shape[1] % 4, 0, -rows.shape[0] % 4)
    rows, masks = (torch.nn.functional.pad(t, pad) for t in (rows, masks))
    for i, j in product(range(0, rows.shape[0], 4), range(0, rows.shape[1], 4)):
        block, own = rows[i : i + 4, j : j + 4], masks[i : i + 4, j : j + 4]
        assert own.sum(0).max() <= 2
        assert own.sum(1).max() <= 2
        best = max(float((block * pattern).sum()) for pattern in BLOCKS)
        assert float((block * own).sum()) == pytest.approx(best, rel=1e-12)


def greedy(block):
    """The greedy rule, written element by element."""
    mask, order = torch.zeros(4, 4), sorted(range(16), key=lambda i: -float(block.flatten()[i]))
    for i, j in (divmod(place, 4) for place in order):
        if mask[i].sum() < 2 and mask[:, j].sum() < 2:
            mask[i, j] = 1
    return mask


def test_greedy_block(device):
    weights = torch.randn(8, 12, device=device)
    mask = create_mask(weights, "m4n2_2d_greedy").cpu()
    for i, j in product(range(0, 8, 4), range(0, 12, 4)):
        expected = greedy(weights[i : i + 4, j : j + 4].abs().cpu())
        assert torch.equal(mask[i : i + 4, j : j + 4], expected)
    assert kept(weights.cpu(), mask) <= kept(
        weights.cpu(), create_mask(weights, "m4n2_2d_best").cpu()
    )


def test_other_patterns_and_their_density():
    weights = torch.randn(8, 16)
    assert sparse_masklib.fill(create_mask(weights, "m4n1_1d", density=0.25)) == 0.25
    assert sparse_masklib.fill(create_mask(weights, "m8n4_1d")) == 0.5
    assert torch.equal(sparse_masklib.m4n2_1d(weights, 0.5), create_mask(weights))
    assert len(sparse_masklib.compute_valid_1d_patterns(4, 2)) == 6
    assert len(sparse_masklib.compute_valid_2d_patterns(4, 2)) == len(BLOCKS) == 90
    runs, shape = sparse_masklib.reshape_1d(torch.ones(3, 6), 4)
    assert runs.shape == (6, 4)
    assert shape == (3, 8)
    assert runs.sum() == 18


def test_equal_and_extreme_magnitudes():
    assert create_mask(torch.ones(1, 8)).sum() == 4
    assert create_mask(torch.zeros(8, 8), "m4n2_2d_best").sum() == 32
    large = torch.tensor([[6e4, 1.0, 5e4, 2.0]], dtype=torch.float16)  # whose sum is inf in fp16
    assert create_mask(large).tolist() == [[1, 0, 1, 0]]
    near = torch.tensor([[1e8, 1.0, 2.0, 0.0]])  # sums differ by less than float32 has digits
    assert create_mask(near).tolist() == [[1, 0, 1, 0]]


@pytest.mark.parametrize("shape", [(0, 8), (8, 0, 3, 3)], ids=str)
def test_empty(shape):
    assert create_mask(torch.zeros(shape)).shape == shape


def test_layout_is_kept():
    weights = torch.randn(8, 16, 3, 3).to(memory_format=torch.channels_last)
    mask = create_mask(weights)
    assert mask.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(mask, create_mask(weights.contiguous()))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.zeros(4, 4), "m4n2"), ValueError, "expected m4n2_1d.* got 'm4n2'"),
        ((torch.zeros(4, 4), "m4n2_1d", 0.4), ValueError, "density: m4n2_1d keeps 0.5 .* got 0.4"),
        ((torch.zeros(4, 4), "m4n5_1d", 1.25), ValueError, "n must be 1 to m"),
        ((torch.zeros(8, 8), "m8n4_2d_best"), ValueError, "use m8n4_2d_greedy"),
        ((torch.zeros(()),), ValueError, "at least one dimension"),
        ((torch.zeros(4, 4, dtype=torch.int64),), TypeError, "got torch.int64"),
        (([1.0],), TypeError, "got list"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        create_mask(*arguments)
