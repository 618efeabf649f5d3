"""The legacy module ``apex_C``: joins tensors and splits them, as scripts for Apex call it."""

import apex_C
import pytest
import torch
import torch.distributed as dist

from apex.parallel import distributed


def mixed(dtype, device):
    """Scalars, gaps, another memory format, nothing: in their logical order 0, 1, 2, ..."""
    image = torch.arange(1, 25).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    column = torch.stack([torch.arange(25, 28)] * 2, dim=1)[:, 0]
    return [t.to(device, dtype) for t in (torch.tensor(0), image, torch.empty(0, 3), column)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64], ids=str)
def test_round_trip(dtype, device):
    tensors = mixed(dtype, device)
    flat = apex_C.flatten(tensors)
    assert flat.dtype == dtype
    assert flat.device == tensors[0].device
    assert flat.tolist() == [*range(28)]
    assert all(flat.data_ptr() != t.data_ptr() for t in tensors)
    views = apex_C.unflatten(flat, tensors)
    assert isinstance(views, list)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor)
        assert view.shape == tensor.shape


def test_views_share_memory(device):
    """A collective on the flat tensor must be seen in the views, as they are in it."""
    tensors = mixed(torch.float32, device)
    flat = apex_C.flatten(tensors)
    views = apex_C.unflatten(flat, tensors)
    flat.mul_(2)
    assert apex_C.flatten(views).tolist() == [2.0 * i for i in range(28)]
    views[1].zero_()
    assert flat.tolist() == [0.0] * 25 + [50.0, 52.0, 54.0]
    longer = apex_C.unflatten(torch.arange(9.0), [torch.empty(2, 2)])
    assert longer[0].tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_one_tensor_is_copied():
    tensor = torch.ones(3)
    apex_C.flatten((tensor,)).zero_()
    assert tensor.tolist() == [1.0] * 3


def test_gradients_flow():
    """As through torch's own pair; ``apex.parallel.distributed.flatten`` is for collectives."""
    weights = [torch.ones(2, requires_grad=True), torch.ones(1, 3, requires_grad=True)]
    flat = apex_C.flatten(weights)
    first, second = apex_C.unflatten(flat, weights)
    (2 * first.sum() + 3 * second.sum()).backward()
    assert [w.grad.unique().item() for w in weights] == [2.0, 3.0]
    assert not distributed.flatten(weights).requires_grad


def test_bad_lists():
    assert apex_C.unflatten(torch.zeros(3), []) == []
    with pytest.raises(ValueError, match="flatten: bucket is empty"):
        apex_C.flatten([])
    with pytest.raises(TypeError, match=r"bucket\[1\] is torch.float16, but bucket\[0\] is .*32"):
        apex_C.flatten([torch.zeros(1), torch.zeros(1).half()])
    with pytest.raises(RuntimeError, match="meta"):
        apex_C.flatten([torch.zeros(1), torch.zeros(1, device="meta")])
    for flat, shape in ((torch.zeros(2), r"\[2\]"), (torch.zeros(3, 1), r"\[3, 1\]")):
        with pytest.raises(ValueError, match=f"unflatten: coalesced has shape {shape}, but bucket"):
            apex_C.unflatten(flat, [torch.zeros(3)])


def check_one_reduction(rank, world):
    """What BERT's and SSD's training do with gradients: one all_reduce for all of them."""
    grads = [torch.full((2, 3), float(rank)), torch.full((4,), 2.0 * rank)]
    flat = apex_C.flatten(grads)
    dist.all_reduce(flat.div_(world))
    for grad, reduced in zip(grads, apex_C.unflatten(flat, grads), strict=True):
        grad.copy_(reduced)
    assert [g.unique().item() for g in grads] == [(world - 1) / 2, world - 1.0]


def test_one_reduction(two_ranks):
    two_ranks(check_one_reduction)
