"""The loss of transducers in plain PyTorch, diagonal by diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cells import inside, rows_of_cells


def transducer_loss(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank: int,
    max_f_len: int,
    softmax: bool,
) -> tuple[Tensor, ...]:
    """What the operator of this name returns, from the same arguments; see Graves 2012."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if batch_offset is None:
        return _of_grid(x, label, f_len, y_len, blank, softmax)
    stride, count = y_len + 1, x.shape[0]
    is_inside = inside(max_f_len, label.shape[1] + 1, f_len, stride)
    rows = rows_of_cells(is_inside, batch_offset - f_len * stride, stride, count)
    grid = torch.cat((x, x.new_zeros(1, x.shape[1])))[rows]
    loss, *statistics = _of_grid(grid, label, f_len, y_len, blank, softmax)
    # Back into packed rows.
    numbers = torch.arange(rows.numel(), device=x.device).reshape(rows.shape)
    cells = numbers.new_zeros(count + 1).index_put((rows,), numbers)[:count]
    known = is_inside.new_zeros(count + 1).index_put((rows,), is_inside)[:count]
    packed = []
    for statistic, other in zip(statistics, (0, 1, 0, 0, 0), strict=True):
        own = statistic.flatten(0, 2)
        own = own[cells] if own.shape[0] else own.new_zeros(count, *own.shape[1:])
        packed.append(torch.where(known.reshape(-1, *[1] * (own.dim() - 1)), own, other))
    return loss, *packed


def _of_grid(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank: int, softmax: bool
) -> tuple[Tensor, ...]:
    batch, frames, width, _ = x.shape
    is_inside = inside(frames, width, f_len, y_len + 1)
    x = torch.where(is_inside[..., None], x, 0)  # whatever is outside
    maxima, sums_exp, logs = x.new_zeros(x.shape[:-1]), x.new_ones(x.shape[:-1]), x
    if softmax:
        maxima = x.detach().amax(-1)
        sums_exp = (x.detach() - maxima[..., None]).exp().sum(-1)
        logs = x.log_softmax(-1)
    blanks = logs[..., blank]
    u = torch.arange(width, device=x.device)
    has_label = is_inside & (u < y_len[:, None])[:, None, :]
    next_label = torch.nn.functional.pad(label, (0, 1))[:, None, :].expand(batch, frames, width)
    labels = logs.gather(-1, torch.where(has_label, next_label, 0)[..., None])[..., 0]
    blanks, labels = (
        torch.where(is_one, score, 0)
        for is_one, score in ((is_inside, blanks), (has_label, labels))
    )
    alpha, beta = _ways(blanks, labels, is_inside, f_len, y_len)
    loss = -beta[:, 0, 0] if frames else x.sum((1, 2, 3))
    empty = torch.where(y_len == 0, 0.0, torch.inf).to(loss.dtype)
    loss = torch.where(f_len > 0, loss, empty)
    cells = (torch.where(is_inside, maxima, 0), torch.where(is_inside, sums_exp, 1))
    scores = torch.stack((blanks, labels), -1)
    return loss, *cells, scores, alpha.double(), beta.double()


def _log_add(a: Tensor, b: Tensor) -> Tensor:
    """As torch.logaddexp, whose second derivative is NaN where one is much larger."""
    return torch.stack((a, b)).logsumexp(0)


def _ways(
    blanks: Tensor, labels: Tensor, is_inside: Tensor, f_len: Tensor, y_len: Tensor
) -> tuple[Tensor, Tensor]:
    """Logarithms of the sums over all ways to a cell, and from it; 0 outside."""
    _, frames, width = blanks.shape
    if not frames:
        return blanks, blanks
    count = frames + width - 1
    u = torch.arange(width, device=blanks.device)
    t = torch.arange(count, device=blanks.device)[:, None] - u  # of diagonal d = t + u
    is_one = (t >= 0) & (t < frames)
    skewed = lambda cells: cells[:, t.clamp(0, frames - 1), u]
    blanks, labels, inside = skewed(blanks), skewed(labels), skewed(is_inside) & is_one
    low = torch.finfo(blanks.dtype).min / 4  # -inf has no derivatives
    shift = lambda row, by: torch.nn.functional.pad(row, (by, -by), value=low)

    ways = torch.where(u == 0, 0.0, blanks.new_full((blanks.shape[0], width), low))
    alphas = [ways]
    for d in range(1, count):
        stay, move = ways + blanks[:, d - 1], shift(ways + labels[:, d - 1], 1)
        ways = torch.where(inside[:, d], _log_add(stay, move), low)
        alphas.append(ways)

    last = (f_len - 1 + y_len)[:, None]  # diagonal of the last cell, which has u = y_len
    betas = [torch.full_like(ways, low)]
    for d in reversed(range(count)):
        stay, move = betas[-1] + blanks[:, d], shift(betas[-1], -1) + labels[:, d]
        ways = torch.where((last == d) & (u == y_len[:, None]), blanks[:, d], _log_add(stay, move))
        betas.append(torch.where(inside[:, d], ways, low))

    # Back to [B, T, U].
    frame = torch.arange(frames, device=blanks.device)[:, None]
    straight = lambda rows: torch.where(is_inside, torch.stack(rows, 1)[:, frame + u, u], 0)
    return straight(alphas), straight(betas[:0:-1])
