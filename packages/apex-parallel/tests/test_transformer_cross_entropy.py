"""vocab_parallel_cross_entropy against torch's in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from apex.transformer.tensor_parallel import vocab_parallel_cross_entropy
from apex_testkit.accuracy import assert_as_accurate_as
from apex_testkit.model_parallel import model_parallel


def reference(logits, target, smoothing=0.0):
    """torch's smoothing gives the target its share of what it takes away; Megatron's does not."""
    flat, size = logits.flatten(0, -2), logits.shape[-1]
    options = {"reduction": "none", "label_smoothing": smoothing * size / (size - 1)}
    return F.cross_entropy(flat, target.flatten(), **options).view(target.shape)


def gradient(logits, target, dy, smoothing=0.0):
    logits = logits.detach().requires_grad_()
    loss = reference(logits, target, smoothing)
    (grad,) = torch.autograd.grad(loss, logits, dy.to(logits.dtype))
    return grad


def whole(kind, dtype, vocabulary=12):
    """Logits, targets and gradients that all ranks know."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(5, 3, vocabulary, generator=generator, dtype=torch.float64)
    logits = {
        "plain": logits,
        "far": logits + 1e4 if dtype != torch.float16 else logits + 1e3,
        "extreme": logits * (1e3 if dtype == torch.float16 else 1e6),
        "padded": logits.index_fill(-1, torch.tensor([vocabulary - 1]), -torch.inf),
    }[kind]
    target = torch.randint(vocabulary - 1, (5, 3), generator=generator)
    dy = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    return logits.to(dtype), target, dy.to(dtype)


def check_values(rank, world, tensor):
    with model_parallel(tensor):
        for kind in ("plain", "far", "extreme", "padded"):
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                logits, target, dy = whole(kind, dtype)
                mine = logits.chunk(tensor, -1)[rank % tensor].clone().requires_grad_()
                loss = vocab_parallel_cross_entropy(mine, target)
                assert loss.dtype == dtype
                assert_as_accurate_as(lambda x, t=target: reference(x, t), loss.detach(), logits)
                grad, again = (
                    torch.autograd.grad(loss, mine, dy, retain_graph=True)[0] for _ in range(2)
                )
                assert torch.equal(grad, again)
                part = lambda x, dy, t=target: gradient(x, t, dy).chunk(tensor, -1)[rank % tensor]
                assert_as_accurate_as(part, grad, logits, dy)


def check_smoothing(rank, world, tensor):
    """The label is spread over the whole vocabulary, however that is divided."""
    with model_parallel(tensor):
        for kind in ("plain", "far"):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                logits, target, dy = whole(kind, dtype)
                mine = logits.chunk(tensor, -1)[rank % tensor].clone().requires_grad_()
                loss = vocab_parallel_cross_entropy(mine, target, 0.25)
                expected = lambda x, t=target: reference(x, t, 0.25)
                assert_as_accurate_as(expected, loss.detach(), logits)
                (grad,) = torch.autograd.grad(loss, mine, dy)
                part = lambda x, dy, t=target: gradient(x, t, dy, 0.25).chunk(tensor, -1)
                mine_of = lambda x, dy, part=part: part(x, dy)[rank % tensor]
                assert_as_accurate_as(mine_of, grad, logits, dy)


def check_second_order(rank, world, smoothing):
    with model_parallel(world):
        logits, target, dy = whole("plain", torch.float64)
        x = logits.clone().requires_grad_()
        (grad,) = torch.autograd.grad(reference(x, target, smoothing), x, dy, create_graph=True)
        (expected,) = torch.autograd.grad(grad.square().sum(), x)
        mine = logits.chunk(world, -1)[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, target, label_smoothing=smoothing)
        (grad,) = torch.autograd.grad(loss, mine, dy, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), mine)
        torch.testing.assert_close(second, expected.chunk(world, -1)[rank])


def check_ignored_and_communication(rank, world):
    """Targets outside the vocabulary are finite, and nothing if multiplied by 0; two reductions."""
    with model_parallel(world), pytest.MonkeyPatch.context() as patch:
        calls, own = [], dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *a, **k: (calls.append(a), own(*a, **k))[1])
        logits, target, _ = whole("plain", torch.float64)
        target[0], target[1, 0] = -100, 12
        mine = logits.chunk(world, -1)[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, target)
        assert len(calls) == 2
        largest = logits.amax(-1)
        outside = (logits - largest.unsqueeze(-1)).logsumexp(-1)
        is_inside = (target >= 0) & (target < 12)
        expected = reference(logits, target.where(is_inside, 0)).where(is_inside, outside)
        torch.testing.assert_close(loss.detach(), expected)
        (loss * is_inside).sum().backward()
        assert mine.grad[~is_inside].count_nonzero() == 0
        assert len(calls) == 2  # none in the backward


def test_over_ranks(two_ranks, four_ranks):
    two_ranks(check_values, tensor=2)
    four_ranks(check_values, tensor=4)
    four_ranks(check_values, tensor=2)
    four_ranks(check_smoothing, tensor=4)
    two_ranks(check_smoothing, tensor=2)
    four_ranks(check_second_order, smoothing=0.0)
    four_ranks(check_second_order, smoothing=0.25)
    two_ranks(check_ignored_and_communication)


def test_alone(alone):
    logits, target, dy = whole("plain", torch.float64)
    x = logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(x, target)
    torch.testing.assert_close(loss, reference(x, target))
    torch.testing.assert_close(torch.autograd.grad(loss, x, dy)[0], gradient(x, target, dy))
    with pytest.raises(TypeError, match=r"got torch.float64 and torch.int32"):
        vocab_parallel_cross_entropy(x, target.int())
    with pytest.raises(ValueError, match=r"got \[5, 3, 12\] and \[3, 5\]"):
        vocab_parallel_cross_entropy(x, target.t())
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\), got"):
            vocab_parallel_cross_entropy(x, target, smoothing)
    losses = vocab_parallel_cross_entropy(torch.randn(4, 1), torch.zeros(4).long(), 0.1)
    assert losses.tolist() == [0.0] * 4
