"""Changes between whole and divided tensors, with gradients of first and second order."""

import functools

import pytest
import torch
import torch.distributed as dist

from apex.transformer import parallel_state
from apex.transformer.tensor_parallel import mappings, utils
from apex_testkit.model_parallel import model_parallel


def whole(*shape):
    """The same float64 numbers on all ranks."""
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(sum(shape)))


def check_mappings(rank, world, tensor):
    """Against slices and sums of whole tensors, which every rank of a test knows."""
    with model_parallel(tensor):
        me = rank % tensor
        x = whole(2 * tensor, 3, 4 * tensor)  # what is divided
        others = [x.sin() + r for r in range(tensor)]  # of which each rank has another
        mine, total = others[me], sum(others)
        last, first = x.chunk(tensor, -1)[me], x.chunk(tensor, 0)[me]
        total_first = total.chunk(tensor, 0)[me]
        own = functools.partial(
            mappings.gather_from_sequence_parallel_region, to_model_parallel=False
        )
        for function, given, output, grad_output, grad in (
            (mappings.copy_to_tensor_model_parallel_region, x, x, mine, total),
            (mappings.reduce_from_tensor_model_parallel_region, mine, total, x, x),
            (mappings.scatter_to_tensor_model_parallel_region, x, last, last * 2, x * 2),
            (mappings.gather_from_tensor_model_parallel_region, last, x, x * 3, last * 3),
            (mappings.scatter_to_sequence_parallel_region, x, first, first * 2, x * 2),
            (mappings.gather_from_sequence_parallel_region, first, x, mine, total_first),
            (own, first, x, x * 3, first * 3),
            (
                mappings.reduce_scatter_to_sequence_parallel_region,
                *(mine, total_first, first * 2, x * 2),
            ),
        ):
            check_one(function, given, output, grad_output, grad)
            strided = given.transpose(0, 1).contiguous().transpose(0, 1)
            check_one(function, strided, output, grad_output, grad)
        check_sizes(tensor)


def check_one(function, given, output, grad_output, grad):
    given = given.clone(memory_format=torch.preserve_format).requires_grad_()
    before, sent = given.detach().clone(), grad_output.clone()
    actual = function(given)
    torch.testing.assert_close(actual, output, rtol=0, atol=1e-14)
    (actual_grad,) = torch.autograd.grad(actual, given, sent)
    torch.testing.assert_close(actual_grad, grad, rtol=0, atol=1e-13)
    assert torch.equal(given, before), "the input was changed"
    assert torch.equal(sent, grad_output), "the incoming gradient was changed"
    # A gradient is linear in what is sent in: its own gradient is the function again.
    weights = grad_output.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(given), given, weights, create_graph=True)
    (second,) = torch.autograd.grad(grad, weights, before)
    torch.testing.assert_close(second, output, rtol=0, atol=1e-14)


def check_sizes(tensor):
    """Sizes that do not divide are refused on every rank, before anything is sent."""
    if tensor == 1:
        return
    x = torch.zeros(tensor + 1, tensor + 1)
    for name in ("scatter_to_sequence", "reduce_scatter_to_sequence", "scatter_to_tensor_model"):
        with pytest.raises(ValueError, match=f"{tensor + 1} is not divisible by {tensor}"):
            getattr(mappings, f"{name}_parallel_region")(x)


@pytest.mark.parametrize("tensor", [2, 4])
def test_mappings(two_ranks, four_ranks, tensor):
    four_ranks(check_mappings, tensor=tensor)
    if tensor == 2:
        two_ranks(check_mappings, tensor=tensor)


def check_16_bit(rank, world):
    """Sums in 16 bits are off by at most a rounding per rank."""
    with model_parallel(world):
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.stack([torch.randn(64, generator=seeded(r)) for r in range(world)]).to(dtype)
            actual = mappings.reduce_from_tensor_model_parallel_region(x[rank])
            error = (actual.double() - x.double().sum(0)).abs().max()
            assert error <= world * torch.finfo(dtype).eps * x.double().sum(0).abs().max()
            assert actual.dtype == dtype


def seeded(number):
    return torch.Generator().manual_seed(number)


def test_16_bit(four_ranks):
    four_ranks(check_16_bit)


def test_alone_they_return_their_input(alone):
    x = torch.randn(3, 5, requires_grad=True)
    for name in mappings.__all__:
        y = getattr(mappings, name)(x)
        assert y.data_ptr() == x.data_ptr()
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(x))
        assert torch.equal(grad, torch.ones_like(x))
    assert dist.get_world_size(parallel_state.get_tensor_model_parallel_group()) == 1


def test_division():
    x = torch.arange(24).view(2, 12)
    parts = utils.split_tensor_along_last_dim(x, 3)
    assert [part.tolist() for part in parts] == [part.tolist() for part in x.chunk(3, -1)]
    assert not parts[0].is_contiguous()
    assert utils.split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True)[1].is_contiguous()
    with pytest.raises(ValueError, match="12 is not divisible by 5"):
        utils.split_tensor_along_last_dim(x, 5)
    ranges = utils.VocabUtility
    assert ranges.vocab_range_from_per_partition_vocab_size(10, 2, 4) == (20, 30)
    assert ranges.vocab_range_from_global_vocab_size(40, 3, 4) == (30, 40)
    with pytest.raises(ValueError, match="42 is not divisible by 4"):
        ranges.vocab_range_from_global_vocab_size(42, 3, 4)
