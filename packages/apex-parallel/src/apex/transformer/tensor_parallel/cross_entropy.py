"""Cross entropy of logits whose vocabulary is divided over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import parallel_state
from .collectives import all_reduce
from .mappings import reduce_from_tensor_model_parallel_region
from .utils import VocabUtility

__all__ = ["vocab_parallel_cross_entropy"]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Two all-reduces: the largest logit; then the sum of exponentials beside the target's logit.

    Logits are saved as they are, with two numbers per token, and the softmax is computed again in
    the backward: a softmax kept in float32 would take three times the memory of 16-bit logits.
    """

    @staticmethod
    def forward(
        ctx: Any, vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
    ) -> Tensor:
        logits = vocab_parallel_logits
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        world = parallel_state.get_tensor_model_parallel_world_size()
        first, last = VocabUtility.vocab_range_from_per_partition_vocab_size(
            logits.shape[-1], parallel_state.get_tensor_model_parallel_rank(), world
        )
        # What the target distribution gives to every token, and to the target beyond that.
        ctx.others = label_smoothing / max(world * logits.shape[-1] - 1, 1)
        ctx.target = 1.0 - label_smoothing - ctx.others
        largest = _largest(logits, dtype)
        is_here = (target >= first) & (target < last)
        local = torch.where(is_here, target - first, 0)
        below = logits - largest.unsqueeze(-1)
        labelled = _labelled(ctx, below, local, is_here)
        sums = torch.stack((below.exp_().sum(-1), labelled))
        sums = _over_ranks(sums, dist.ReduceOp.SUM)
        total = sums[0].log()
        ctx.save_for_backward(logits, local, is_here, largest, total)
        return (total - sums[1]).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, local, is_here, largest, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            loss = _differentiable_loss(ctx, logits, local, is_here, largest)
            return *torch.autograd.grad(loss, logits, grad_output, create_graph=True), None, None
        # Twice a difference: largest + total would round small totals away.
        grad = (logits - largest.unsqueeze(-1)).sub_(total.unsqueeze(-1)).exp_()
        if ctx.others:
            grad.sub_(ctx.others)
        labels = is_here.unsqueeze(-1).to(grad.dtype).mul_(-ctx.target)
        grad.scatter_add_(-1, local.unsqueeze(-1), labels)
        return grad.mul_(grad_output.unsqueeze(-1)).to(logits.dtype), None, None


def _largest(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest logit per token, over all ranks.

    The same all-reduce compares the ranks' parts of the vocabulary: with parts of different sizes
    the ids of a rank would not be those of its logits. On a GPU nobody waits for the answer.
    """
    largest, part = logits.amax(dim=-1).to(dtype), logits.shape[-1]
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return largest
    ends = (largest.new_full((1,), float(part)), largest.new_full((1,), -float(part)))
    reduced = _over_ranks(torch.cat((largest.reshape(-1), *ends)), dist.ReduceOp.MAX)
    most, least = reduced[-2], -reduced[-1]
    remedy = (
        "vocab_parallel_cross_entropy: vocab_parallel_logits: the last dimension differs between "
        "tensor-parallel ranks. Pad the vocabulary to a multiple of their number, and give every "
        "rank the same part"
    )
    if not largest.is_cpu:
        torch._assert_async(most == least, remedy)
    elif most != least:
        raise ValueError(f"{remedy}: here it is {part}, and {int(least)} to {int(most)} elsewhere.")
    return reduced[:-2].view(largest.shape)


def _differentiable_loss(
    ctx: Any, logits: Tensor, local: Tensor, is_here: Tensor, largest: Tensor
) -> Tensor:
    """The loss in differentiable steps; the largest logit cancels out of its gradients."""
    below = logits - largest.unsqueeze(-1)
    sums = torch.stack((below.exp().sum(-1), _labelled(ctx, below, local, is_here)))
    sums = reduce_from_tensor_model_parallel_region(sums)
    return (sums[0].log() - sums[1]).to(logits.dtype)


def _labelled(ctx: Any, below: Tensor, local: Tensor, is_here: Tensor) -> Tensor:
    """This rank's part of the sum over the vocabulary of label times logit."""
    labelled = below.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(is_here, 0) * ctx.target
    return labelled + below.sum(-1) * ctx.others if ctx.others else labelled


def _over_ranks(x: Tensor, op: Any) -> Tensor:
    """``x`` reduced over the tensor-parallel ranks, in place."""
    is_alone = parallel_state.get_tensor_model_parallel_world_size() == 1
    return x if is_alone else all_reduce(x, op).wait()


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    r"""Cross entropy per token, with the vocabulary divided over the tensor-parallel ranks.

    .. math::
        \ell = \log \sum_j e^{x_j - m} - \sum_j q_j (x_j - m), \qquad m = \max_j x_j

    where the label :math:`q` is 1 for the target, or :math:`1 - \alpha` with
    :math:`\alpha / (V - 1)` for each other one of :math:`V` ids.

    Args:
        vocab_parallel_logits: ``[*, vocabulary / ranks]``, this rank's part; floating point.
        target: ``[*]`` int64, ids of the whole vocabulary, the same on all ranks. For an id outside
            the vocabulary, such as -100, the loss has no meaning: multiply it by 0.
        label_smoothing: :math:`\alpha`, in ``[0, 1)``. Megatron's: torch's, which gives the target
            a share too, is ``alpha * (V - 1) / V`` here.

    Returns:
        ``[*]``, in the logits' dtype, the same on all ranks. 16-bit logits are computed in float32.

    Raises:
        TypeError: ``target`` is not int64, or logits are not floating point.
        ValueError: the shapes do not fit, ``label_smoothing`` is out of range, or the ranks' parts
            of the vocabulary differ in size. That last one is a device assertion on a GPU.
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
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1), got {label_smoothing}.")
    return _VocabParallelCrossEntropy.apply(logits, target, label_smoothing)
