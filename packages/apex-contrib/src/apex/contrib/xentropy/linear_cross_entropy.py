"""A model's head and its loss in chunks of tokens: the logits of all tokens are never stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting
from torch.nn import functional as F

from .._shared.native.composed import Composed
from .._shared.native.half_products import needs_float32
from .._shared.native.operands import check_floating, is_autocast, statistics_dtype
from .._shared.native.plain import plainness
from .._shared.native.transforms import is_transformed
from .ops import logit_gradients, logit_statistics

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]

_NAME = "linear_cross_entropy"
_REDUCTIONS = ("none", "mean", "sum")
_NO_PADDING = -(2**63)  # no label
_FEWEST = 1024  # tokens of a chunk: the weight's gradient is read and written for each chunk
_BLOCK = 1 << 25  # elements of the weight's gradient that are 16 bits wide at a time on a CPU


class _Option(NamedTuple):
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
        self.chunks, self.added, self.is_partial = chunks, 0, chunks > 1
        wide = statistics_dtype(hidden.dtype)
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.dtype = weight.dtype
        # One chunk is rounded once in any dtype.
        self.weight = None
        if wanted[1]:
            dtype = wide if chunks > 1 else hidden.dtype
            self.weight = torch.empty_like(weight, dtype=dtype)
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


def _counted(option: _Option, labels: Tensor) -> Tensor | None:
    """Places of the tokens that count; None: all do, or nobody may ask for their number."""
    if option.padding_idx == _NO_PADDING or not plainness(labels) or labels.is_meta:
        return None
    if labels.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    places = (labels != option.padding_idx).nonzero()[:, 0]
    return None if len(places) == len(labels) else places


def _walk(
    option: _Option,
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
            of_rank = logit_statistics(logits, own, *numbers, option.softcap)
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


def _cut(option: _Option, tokens: int, weight: Tensor) -> tuple[int, int]:
    """How many chunks, and the most tokens of one; their logits are as large as hidden is."""
    most = option.chunk_size or max(_FEWEST, tokens * weight.shape[1] // weight.shape[0])
    chunks = -(-tokens // most)
    return chunks, max(1, -(-tokens // max(1, chunks)))


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _losses(option: _Option, statistics: Tensor, labels: Tensor) -> Tensor:
    maxima, sums_exp, targets, means = statistics
    log = sums_exp.log()
    losses = (maxima - targets) + log
    if option.smoothing:  # 0 * inf is NaN
        losses += option.smoothing * (targets - means)
    if option.z_loss:
        losses += option.z_loss * (maxima + log).square()
    return losses.masked_fill(labels == option.padding_idx, 0)


def _reduced(option: _Option, losses: Tensor, labels: Tensor) -> Tensor:
    if option.reduction == "none":
        return losses
    total = losses.sum()
    return total if option.reduction == "sum" else total * _share(option, losses, labels)


def _share(option: _Option, like: Tensor, labels: Tensor) -> Tensor:
    """What the loss of a token counts in a result of all."""
    if option.reduction == "sum":
        return like.new_ones(())
    return (labels != option.padding_idx).sum().to(like.dtype).reciprocal()


def _forward(option: _Option, *tensors: Any) -> tuple[Any, ...]:
    hidden, labels = tensors[0], tensors[3]
    like = hidden.new_empty(0, dtype=statistics_dtype(hidden.dtype))
    wanted = (False,) * 3 if option.is_late else option.wanted
    share = _share(option, like, labels)
    statistics, gradients = _walk(option, tensors, wanted, share)
    loss = _reduced(option, _losses(option, statistics, labels), labels)
    return loss, *([statistics] if option.is_late else gradients)


def _backward(
    option: _Option, needs: Sequence[bool], dy: Tensor, saved: Sequence[Any]
) -> list[Tensor | None]:
    tensors, kept = saved[:4], saved[4:]
    if option.is_late:
        statistics = kept[0]
        if option.reduction != "none":
            dy = dy * _share(option, statistics, tensors[3])
        grads = dy.to(statistics.dtype)
        return [*_walk(option, tensors, needs[:3], grads, statistics)[1], None]
    return [*(_scaled(gradient, dy) for gradient in kept), None]


def _scaled(gradient: Tensor | None, dy: Tensor) -> Tensor | None:
    """``gradient * dy``: itself where dy is seen to be 1, and nothing is copied."""
    if gradient is None or (dy.is_cpu and not is_compiling() and dy.item() == 1):
        return gradient
    return gradient * dy.to(gradient.dtype)


def _reference(
    option: _Option, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> Tensor:
    """The same in plain PyTorch, with all logits."""
    if option.group is not None:
        raise NotImplementedError(
            f"{_NAME}: group is given, but a transform of torch.func, a tracer, forward mode, a "
            "DTensor or a second derivative asks for plain PyTorch, which knows no group; leave "
            "group out, with the whole weight."
        )
    logits = F.linear(
        hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    )
    if option.softcap:
        logits = option.softcap * torch.tanh(logits / option.softcap)
    logits = logits.to(statistics_dtype(logits.dtype))
    counts = labels != option.padding_idx
    lse = logits.logsumexp(-1)
    target = logits.gather(-1, labels.where(counts, 0)[:, None])[:, 0]
    losses = lse - target
    if option.smoothing:  # 0 * inf is NaN
        losses = losses + option.smoothing * (target - logits.mean(-1))
    if option.z_loss:
        losses = losses + option.z_loss * lse.square()
    losses = losses.where(counts, 0)
    return _reduced(option, losses, labels)


_linear_cross_entropy = Composed(_NAME, _forward, _backward, _reference)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    padding_idx: int | None = -100,
    reduction: str = "mean",
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    recompute: bool = False,
    chunk_size: int | None = None,
    group: Any = None,
) -> Tensor:
    r"""Cross entropy of a linear layer's output, which is never stored.

    .. math::
        x = \mathrm{hidden} \, W^T + b, \qquad
        \mathrm{loss} = (1 - s)\,(\mathrm{lse} - x_\mathrm{label})
                        + s\,(\mathrm{lse} - \mathrm{mean}(x)) + z \, \mathrm{lse}^2

    with ``lse = log(sum(exp(x)))``. The product and the loss of some tokens at a time are computed,
    and at once their gradients, so that memory holds the logits of one chunk. A step of large
    vocabularies needs the memory of ``hidden``, ``weight``, their gradients and one chunk. Where
    ``weight`` has 16 bits and there are several chunks, its gradient is summed in float32 and then
    rounded, which takes 4 bytes an element more until the forward ends.

    Args:
        hidden: ``[..., H]``; float64, float32, float16 or bfloat16. Autocast casts it.
        weight: ``[C, H]``, ``C > 0``, of the same dtype, or float32 beside 16-bit ``hidden``: its
            gradient then is never rounded to 16 bits.
        labels: ``[...]`` int64, each in ``[0, C)`` or ``padding_idx``.
        bias: ``[C]``, of the dtype of ``weight``.
        smoothing: ``s``, in ``[0, 1]``, the share of the target spread evenly over all classes.
        padding_idx: tokens with this label have loss 0 and no gradient. In eager mode they are left
            out of all products. None: all tokens count.
        reduction: "mean" over the tokens that count, "sum", or "none".
        z_loss: ``z``, which pulls ``lse`` to 0; about 1e-4 where it is used.
        softcap: ``cap``, if logits are ``cap * tanh(x / cap)`` as in Gemma 2; > 0.
        recompute: the backward computes the logits again, and makes the gradients then. It takes a
            third longer, and the forward alone takes no memory for gradients. ``reduction="none"``
            always does so, since only the backward knows the gradients of single losses.
        chunk_size: tokens whose logits are in memory at a time; by default so many that they take
            as much as ``hidden``, but at least 1024.
        group: a process group over which the classes are divided, such as the tensor-parallel group
            of ``apex.transformer``: ``weight`` and ``bias`` are this rank's, in the order of ranks;
            ``hidden`` and ``labels`` are the same on all ranks, with labels of the whole
            vocabulary. The gradient of ``hidden`` is summed over the group here.

    Returns:
        A number, or ``[...]`` for "none"; float32, or float64 for float64 ``hidden``. The mean of
        no token is NaN, as of ``F.cross_entropy``.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: a shape, a device or a number does not fit.
        RuntimeError: a label is out of range, on the CPU. On a GPU that gives NaN.
        NotImplementedError: with ``group``, transforms of ``torch.func``, tracers, forward mode,
            DTensors and second derivatives. Without it, plain PyTorch computes these.

    Source:
        Szegedy et al. 2016, section 7 (smoothing); Chowdhery et al. 2022, section 5 (z-loss); Gemma
        Team 2024, section 2 (softcap). Chunks with gradients in the forward: Hsu et al., *Liger
        Kernel*, 2024, section 3.

    Example:
        >>> hidden = torch.randn(32, 16, requires_grad=True)
        >>> weight = torch.randn(1000, 16, requires_grad=True)
        >>> labels = torch.randint(1000, (32,))
        >>> linear_cross_entropy(hidden, weight, labels).backward()
    """
    _check(hidden, weight, labels, bias)
    _check_numbers(smoothing, reduction, z_loss, softcap, chunk_size)
    if is_autocast(hidden) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if needs_float32(hidden, weight):
        hidden = hidden.float()
    wanted = tuple(
        t is not None and t.requires_grad and torch.is_grad_enabled()
        for t in (hidden, weight, bias)
    )
    option = _Option(
        float(smoothing),
        _NO_PADDING if padding_idx is None else int(padding_idx),
        reduction,
        float(z_loss),
        float(softcap or 0),
        chunk_size,
        recompute,
        group,
        wanted,
    )
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    call = _reference if is_transformed() or is_exporting() else _linear_cross_entropy
    loss = call(option, rows, weight, bias, flat)
    return loss.reshape(labels.shape) if reduction == "none" else loss


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    check_floating(_NAME, "hidden", hidden)
    halves = (torch.float16, torch.bfloat16)
    for name, tensor, shape in (("weight", weight, "[C, H]"), ("bias", bias, "[C]")):
        if tensor is None and name == "bias":
            continue
        check_floating(_NAME, name, tensor)
        fits = tensor.dtype == hidden.dtype or is_autocast(hidden)
        if not (fits or (tensor.dtype == torch.float32 and hidden.dtype in halves)):
            raise TypeError(
                f"{_NAME}: {name} must have the dtype of hidden, or float32 beside 16-bit hidden; "
                f"got {tensor.dtype} and {hidden.dtype}."
            )
        if tensor.device != hidden.device:
            raise ValueError(
                f"{_NAME}: hidden is on {hidden.device}, but {name} is on {tensor.device}."
            )
        if tensor.dim() != shape.count(",") + 1:
            raise ValueError(f"{_NAME}: {name} must have shape {shape}, got {list(tensor.shape)}.")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"{_NAME}: hidden must have shape [..., H] and weight [C, H] with C > 0, got "
            f"{list(hidden.shape)} and {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{_NAME}: bias must have shape [{weight.shape[0]}], one number per row of weight, got "
            f"{list(bias.shape)}."
        )
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"{_NAME}: labels must be an int64 tensor, got {got}; use labels.long().")
    if labels.shape != hidden.shape[:-1] or labels.device != hidden.device:
        raise ValueError(
            f"{_NAME}: labels must have shape {list(hidden.shape[:-1])} and be on {hidden.device}, "
            f"one label per row of hidden; got {list(labels.shape)} on {labels.device}."
        )


def _check_numbers(
    smoothing: float,
    reduction: str,
    z_loss: float,
    softcap: float | None,
    chunk_size: int | None,
) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction must be one of {_REDUCTIONS}, got {reduction!r}.")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{_NAME}: smoothing must be in [0, 1], got {smoothing}.")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"{_NAME}: z_loss must be finite and not negative, got {z_loss}.")
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise ValueError(f"{_NAME}: softcap must be finite and above 0, or None, got {softcap}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{_NAME}: chunk_size must be at least 1, got {chunk_size}.")


class LinearCrossEntropyLoss(nn.Module):
    """:func:`linear_cross_entropy` with its options: ``loss(hidden, lm_head.weight, labels)``.

    Args and errors are those of the function.

    Example:
        >>> head, loss = nn.Linear(16, 1000, bias=False), LinearCrossEntropyLoss(z_loss=1e-4)
        >>> loss(torch.randn(32, 16), head.weight, torch.randint(1000, (32,))).backward()
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        padding_idx: int | None = -100,
        reduction: str = "mean",
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        recompute: bool = False,
        chunk_size: int | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        _check_numbers(smoothing, reduction, z_loss, softcap, chunk_size)
        self.smoothing, self.padding_idx, self.reduction = smoothing, padding_idx, reduction
        self.z_loss, self.softcap, self.recompute = z_loss, softcap, recompute
        self.chunk_size, self.group = chunk_size, group

    def forward(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the loss of ``hidden @ weight.T + bias``."""
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias,
            self.smoothing,
            self.padding_idx,
            self.reduction,
            z_loss=self.z_loss,
            softcap=self.softcap,
            recompute=self.recompute,
            chunk_size=self.chunk_size,
            group=self.group,
        )
