"""The loss of transducers in plain PyTorch, diagonal by diagonal."""

from __future__ import annotations

import torch
from torch import Tensor


def transducer_loss(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank: int,
    max_f_len: int,
) -> tuple[Tensor, ...]:
    """What the operator of this name returns, from the same arguments; see Graves 2012."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if batch_offset is None:
        return _of_grid(x, label, f_len, y_len, blank)
    _batch, width = label.shape[0], label.shape[1] + 1
    stride = y_len + 1
    start = batch_offset - f_len * stride
    t = torch.arange(max_f_len, device=x.device)[None, :, None]
    u = torch.arange(width, device=x.device)
    rows = start[:, None, None] + t * stride[:, None, None] + u
    is_inside = _inside(max_f_len, width, f_len, y_len)
    grid = (
        x[torch.where(is_inside, rows, 0)] if x.shape[0] else x.new_zeros(*rows.shape, x.shape[1])
    )
    loss, *statistics = _of_grid(grid, label, f_len, y_len, blank)
    # Back into packed rows: those of no cell read one that lies outside.
    count = x.shape[0]
    cells = torch.full((count + 1,), 0, dtype=torch.int64, device=x.device)
    numbers = torch.arange(rows.numel(), device=x.device).reshape(rows.shape)
    cells = cells.index_put((torch.where(is_inside, rows, count),), numbers)[:count]
    known = torch.zeros(count + 1, dtype=torch.bool, device=x.device)
    known = known.index_put((torch.where(is_inside, rows, count),), is_inside)[:count]
    packed = []
    for statistic, other in zip(statistics, (0, 1, 0, 0, 0), strict=True):
        own = statistic.flatten(0, 2)
        own = own[cells] if own.shape[0] else own.new_zeros(count, *own.shape[1:])
        packed.append(torch.where(known.reshape(-1, *[1] * (own.dim() - 1)), own, other))
    return loss, *packed


def _inside(frames: int, width: int, f_len: Tensor, y_len: Tensor) -> Tensor:
    """Which cells [B, T, U] are in their samples."""
    t = torch.arange(frames, device=f_len.device)[None, :, None]
    u = torch.arange(width, device=f_len.device)[None, None, :]
    return (t < f_len[:, None, None]) & (u <= y_len[:, None, None])


def _of_grid(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank: int
) -> tuple[Tensor, ...]:
    batch, frames, width, _ = x.shape
    is_inside = _inside(frames, width, f_len, y_len)
    x = torch.where(is_inside[..., None], x, 0)  # whatever is outside
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
