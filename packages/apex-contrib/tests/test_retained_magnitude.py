"""What 2:4 pruning keeps of sets of four channels, against sorting in float64."""

from itertools import combinations

import pytest
import torch

from apex.contrib.sparsity.retained_magnitude import retained_magnitude
from apex_testkit import FLOATS, assert_as_accurate_as, opcheck_samples, runs_gpu_kernels


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 64, 1023])
def test_operator(rows, dtype, device):
    magnitudes = torch.rand(12, rows, device=device).to(dtype)
    fours = torch.tensor(list(combinations(range(12), 4)), device=device)

    def oracle(magnitudes):
        two = magnitudes[fours].topk(2, dim=1).values
        return two.sum(1).sum(-1)

    result = retained_magnitude(magnitudes, fours)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if rows:
        assert_as_accurate_as(oracle, result.to(dtype), magnitudes)
    else:
        assert (result == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wide_rows(dtype, device):
    magnitudes = torch.rand(5, 1100, device=device).to(dtype)
    fours = torch.tensor([[0, 1, 2, 3], [4, 1, 0, 2]], device=device)
    oracle = lambda magnitudes: magnitudes[fours].topk(2, dim=1).values.sum(1).sum(-1)
    assert_as_accurate_as(oracle, retained_magnitude(magnitudes, fours).to(dtype), magnitudes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_begin_with_a_pack_and_end_within_one(dtype, device):
    magnitudes = torch.rand(25, 13, device=device).to(dtype)
    fours = torch.tensor([[0, 8, 16, 24], [1, 8, 3, 0]], device=device)
    oracle = lambda magnitudes: magnitudes[fours].topk(2, dim=1).values.sum(1).sum(-1)
    assert_as_accurate_as(oracle, retained_magnitude(magnitudes, fours).to(dtype), magnitudes)


def test_operator_is_a_good_citizen(device):
    fours = torch.tensor([[0, 1, 2, 3], [7, 1, 0, 5]], device=device)
    samples = [(torch.rand(8, 5, device=device), f) for f in (fours, fours[:0])]
    opcheck_samples(retained_magnitude, samples)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_no_such_channel(wrong, device):
    magnitudes = torch.rand(8, 5, device=device)
    fours = torch.tensor([[0, 1, wrong, 3], [0, 1, 2, 3]], device=device)
    if runs_gpu_kernels(device):
        assert retained_magnitude(magnitudes, fours).isnan().tolist() == [True, False]
        return
    with pytest.raises(
        RuntimeError, match=rf"fours\[0, 2\] is {wrong}, expected a channel, 0 to 7"
    ):
        retained_magnitude(magnitudes, fours)


def test_bad_operands(device):
    magnitudes = torch.rand(8, 5, device=device)
    with pytest.raises(RuntimeError, match=r"fours must be \[N, 4\]"):
        retained_magnitude(magnitudes, torch.zeros(2, 3, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match="contiguous"):
        retained_magnitude(magnitudes.t(), torch.zeros(2, 4, dtype=torch.int64, device=device))
