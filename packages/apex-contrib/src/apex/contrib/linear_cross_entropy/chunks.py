"""Statistics of a head's logits and the gradients that follow from them, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._shared.native.operands import statistics_dtype
from .._shared.native.plain import plainness
from .ops import logit_gradients, logit_statistics

NO_PADDING = -(2**63)  # no label
_FEWEST = 1024  # tokens of a chunk: the weight's gradient is read and written for each chunk
# Chunks whose shares of a 16-bit gradient are added in 16 bits: each is rounded once.
_FEW_CHUNKS = 4
_BLOCK = 1 << 25  # elements of the weight's gradient that are 16 bits wide at a time on a CPU


class Option(NamedTuple):
    """All arguments that are no tensors; ``wanted``: gradients that the forward makes."""

    smoothing: float
    padding_idx: int
    reduction: str
    z_loss: float
    softcap: float
    chunk_size: int | None
    recompute: bool
    group: Any
    wanted: tuple[bool, ...]

    @property
    def is_late(self) -> bool:
        """Whether the backward makes the gradients: only it knows those of single losses."""
        return self.recompute or self.reduction == "none"


class _Gradients:
    """Gradients of hidden, weight and bias, to which each chunk of tokens adds; None: unwanted."""

    def __init__(self, tensors: Sequence[Any], wanted: Sequence[bool], chunks: int) -> None:
        hidden, weight, bias, _ = tensors
        self.added = 0
        wide = statistics_dtype(hidden.dtype)
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.dtype = weight.dtype
        self.weight = None
        if wanted[1]:
            dtype = wide if chunks > _FEW_CHUNKS else weight.dtype
            self.weight = weight.new_empty(weight.shape, dtype=dtype)
            if chunks == 0:
                self.weight.zero_()
        self.bias = torch.zeros_like(bias, dtype=wide) if wanted[2] else None

    def add(self, dlogits: Tensor, rows: Tensor, place: Any, weight: Tensor) -> None:
        """Add a chunk's, given the gradients of its logits and its rows of hidden."""
        if self.hidden is not None:
            self.hidden[place] = dlogits.mm(weight)
        if self.weight is not None:
            _add_product(self.weight, dlogits.t(), rows, is_first=self.added == 0)
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)
        self.added += 1

    def results(self, group: Any) -> list[Tensor | None]:
        if self.hidden is not None and group is not None:
            dist.all_reduce(self.hidden, group=group)
        narrow = lambda sums: sums if sums is None else sums.to(self.dtype)
        return [self.hidden, narrow(self.weight), narrow(self.bias)]


def _add_product(sums: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """``sums += a @ b``, or its first value; sums of 16-bit products are taken in float32."""
    beta = 0 if is_first else 1
    if sums.dtype == b.dtype:
        sums.addmm_(a, b, beta=beta)
    elif b.is_cuda:
        torch.addmm(sums, a, b, beta=beta, out_dtype=sums.dtype, out=sums)
    else:
        rows = max(1, _BLOCK // sums.shape[1])
        for some, of_a in zip(sums.split(rows), a.split(rows), strict=True):
            some.copy_(of_a.mm(b)) if is_first else some.add_(of_a.mm(b))


def _classes(weight: Tensor, group: Any) -> tuple[int, int]:
    """This rank's first class, and how many all ranks have."""
    if group is None:
        return 0, weight.shape[0]
    own = torch.tensor([weight.shape[0]], device=weight.device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    sizes = torch.cat(parts).tolist()
    return sum(sizes[: dist.get_rank(group)]), sum(sizes)


def _statistics(
    logits: Tensor, own: Tensor, labels: Tensor, numbers: tuple[int, int, int], softcap: float
) -> Sequence[Tensor]:
    """Statistics of a chunk; its operator counts a wrong label from the chunk's first token."""
    try:
        return logit_statistics(logits, own, *numbers, softcap)
    except RuntimeError as error:
        _, classes, padding_idx = numbers
        wrong = ((labels < 0) | (labels >= classes)) & (labels != padding_idx)
        if not wrong.any():
            raise
        place = int(wrong.nonzero()[0])
        raise RuntimeError(
            f"linear_cross_entropy: labels.flatten()[{place}] is {int(labels[place])}, but there "
            f"are {classes} classes: expected 0 to {classes - 1}, or padding_idx."
        ) from error


def _over_ranks(statistics: Sequence[Tensor], group: Any) -> Tensor:
    """Statistics of a chunk, ``[4, rows]``: of the whole vocabulary, where ranks divide it."""
    maxima, sums_exp, targets, means = statistics
    if group is None:
        return torch.stack((maxima, sums_exp, targets, means))
    largest = maxima.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = torch.stack((sums_exp * (maxima - largest).exp(), targets, means))
    dist.all_reduce(sums, group=group)
    return torch.cat((largest[None], sums))


def _counted(option: Option, labels: Tensor) -> Tensor | None:
    """Places of the tokens that count; None: all do, or nobody may ask for their number."""
    if option.padding_idx == NO_PADDING or not plainness(labels) or labels.is_meta:
        return None
    if labels.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    places = (labels != option.padding_idx).nonzero()[:, 0]
    return None if len(places) == len(labels) else places


def walk(
    option: Option,
    tensors: Sequence[Any],
    wanted: Sequence[bool],
    grad_losses: Tensor,
    statistics: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Statistics ``[4, N]`` of the tokens, unless they are given, and the gradients.

    ``grad_losses`` is ``[N]``, or of all tokens.
    """
    hidden, weight, bias, labels = tensors
    narrow = weight.to(hidden.dtype)
    narrow_bias = None if bias is None else bias.to(hidden.dtype)
    first, classes = _classes(weight, option.group)
    numbers = first, classes, option.padding_idx
    places = _counted(option, labels)
    tokens = len(labels) if places is None else len(places)
    chunks, rows = _cut(option, tokens, weight)
    known = statistics is not None
    if not known:
        dtype = statistics_dtype(hidden.dtype)
        statistics = hidden.new_zeros(4, len(labels), dtype=dtype)
    gradients = _Gradients(tensors, wanted, chunks)
    buffer = hidden.new_empty(min(rows, tokens), weight.shape[0])
    for begin in range(0, tokens, rows):
        end = min(begin + rows, tokens)
        place: Any = slice(begin, end) if places is None else places[begin:end]
        some, own, logits = hidden[place], labels[place], buffer[: end - begin]
        _product(some, narrow, narrow_bias, logits)
        if not known:
            of_rank = _statistics(logits, own, labels, numbers, option.softcap)
            statistics[:, place] = _over_ranks(of_rank, option.group)
        elif option.softcap:
            logit_statistics(logits, own, *numbers, option.softcap)
        if not any(wanted):
            continue
        maxima, sums_exp, targets, _ = statistics[:, place]
        grads = grad_losses[place] if grad_losses.dim() else grad_losses.expand(end - begin)
        shape = option.smoothing, option.z_loss, option.softcap
        logit_gradients(logits, own, maxima, sums_exp, targets, grads, *numbers, *shape)
        gradients.add(logits, some, place, narrow)
    del buffer
    return statistics, gradients.results(option.group)


def _cut(option: Option, tokens: int, weight: Tensor) -> tuple[int, int]:
    """How many chunks, and the most tokens of one.

    Their logits are as large as ``hidden``, or, where that is more, take a quarter of the tokens
    and so less memory than sums in float32 beside a gradient of 16 bits would.
    """
    classes, features = weight.shape
    most = max(_FEWEST, tokens * features // classes)
    if weight.element_size() == 2 and tokens <= 8 * features:
        most = max(most, -(-tokens // _FEW_CHUNKS))
    most = option.chunk_size or most
    chunks = -(-tokens // most)
    return chunks, max(1, -(-tokens // max(1, chunks)))


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def losses_of(option: Option, statistics: Tensor, labels: Tensor) -> Tensor:
    maxima, sums_exp, targets, means = statistics
    log = sums_exp.log()
    losses = (maxima - targets) + log
    if option.smoothing:  # 0 * inf is NaN
        losses += option.smoothing * (targets - means)
    if option.z_loss:
        losses += option.z_loss * (maxima + log).square()
    return losses.masked_fill(labels == option.padding_idx, 0)
