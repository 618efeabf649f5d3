"""Cross entropy of logits whose vocabulary is divided over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import parallel_state
from .mappings import reduce_from_tensor_model_parallel_region
from .utils import VocabUtility

__all__ = ["vocab_parallel_cross_entropy"]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Two all-reduces: the largest logit; then the sum of exponentials beside the target's logit.

    Logits are saved as they are, with two numbers per token, and the softmax is computed again in
    the backward: a softmax kept in float32 would take three times the memory of 16-bit logits.
    """

    @staticmethod
    def forward(ctx: Any, vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
        logits = vocab_parallel_logits
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        first, last = VocabUtility.vocab_range_from_per_partition_vocab_size(
            logits.shape[-1],
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        largest = _over_ranks(logits.amax(dim=-1).to(dtype), dist.ReduceOp.MAX)
        is_here = (target >= first) & (target < last)
        local = torch.where(is_here, target - first, 0)
        of_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) - largest
        exponentials = (logits - largest.unsqueeze(-1)).exp_()
        sums = torch.stack((exponentials.sum(-1), of_target.where(is_here, 0)))
        sums = _over_ranks(sums, dist.ReduceOp.SUM)
        total = sums[0].log()
        ctx.save_for_backward(logits, local, is_here, largest, total)
        return (total - sums[1]).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        logits, local, is_here, largest, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            loss = _differentiable_loss(logits, local, is_here, largest)
            return *torch.autograd.grad(loss, logits, grad_output, create_graph=True), None
        # Twice a difference: largest + total would round small totals away.
        grad = (logits - largest.unsqueeze(-1)).sub_(total.unsqueeze(-1)).exp_()
        grad.scatter_add_(-1, local.unsqueeze(-1), -is_here.unsqueeze(-1).to(grad.dtype))
        return grad.mul_(grad_output.unsqueeze(-1)).to(logits.dtype), None


def _differentiable_loss(logits: Tensor, local: Tensor, is_here: Tensor, largest: Tensor) -> Tensor:
    """The loss in differentiable steps; the largest logit cancels out of its gradients."""
    below = logits - largest.unsqueeze(-1)
    of_target = below.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(is_here, 0)
    sums = reduce_from_tensor_model_parallel_region(torch.stack((below.exp().sum(-1), of_target)))
    return (sums[0].log() - sums[1]).to(logits.dtype)


def _over_ranks(x: Tensor, op: Any) -> Tensor:
    """``x`` reduced over the tensor-parallel ranks, in place."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(x, op, group=parallel_state.get_tensor_model_parallel_group())
    return x


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    r"""Cross entropy per token, with the vocabulary divided over the tensor-parallel ranks.

    .. math::
        \ell = \log \sum_j e^{x_j - m} - (x_t - m), \qquad m = \max_j x_j

    Args:
        vocab_parallel_logits: ``[*, vocabulary / ranks]``, this rank's part; floating point.
        target: ``[*]`` int64, ids of the whole vocabulary, the same on all ranks. For an id outside
            the vocabulary, such as -100, the loss is ``log sum exp(x - m)``: multiply it by 0.

    Returns:
        ``[*]``, in the logits' dtype, the same on all ranks. 16-bit logits are computed in float32.

    Raises:
        TypeError: ``target`` is not int64, or logits are not floating point.
        ValueError: the shapes do not fit.
    """
    name, logits = "vocab_parallel_cross_entropy", vocab_parallel_logits
    if target.dtype != torch.int64 or not logits.is_floating_point():
        raise TypeError(
            f"{name}: expected floating-point logits and an int64 target, "
            f"got {logits.dtype} and {target.dtype}."
        )
    if logits.dim() == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{name}: expected logits [*, vocabulary] and a target [*], "
            f"got {list(logits.shape)} and {list(target.shape)}."
        )
    return _VocabParallelCrossEntropy.apply(logits, target)
