"""Masks that keep n of every m weights, those with the largest magnitudes."""

from __future__ import annotations

import re
from functools import cache
from itertools import permutations, product

import torch
from torch import Tensor

_PATTERN = re.compile(r"m(\d+)n(\d+)_(1d|2d_best|2d_greedy)")
_MOST_2D_PATTERNS = 1 << 17  # 8x8 blocks have hundreds of millions


def fill(x: Tensor) -> float:
    """The share of elements that are not 0."""
    return float(x.count_nonzero()) / x.numel()


def reshape_1d(matrix: Tensor, m: int) -> tuple[Tensor, torch.Size]:
    """Runs of ``m`` columns ``[N, m]``, and the shape of the matrix after zeros are appended.

    Columns are padded with zeros to a multiple of ``m``.
    """
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % m))
    return padded.reshape(-1, m), padded.shape


@cache
def compute_valid_1d_patterns(m: int, n: int) -> Tensor:
    """All ways to keep ``n`` of ``m``: float32 ``[P, m]`` of 0 and 1. Do not write to it."""
    _check_sizes(m, n)
    ones = [1.0] * n + [0.0] * (m - n)
    return torch.tensor(sorted(set(permutations(ones)), reverse=True))


@cache
def compute_valid_2d_patterns(m: int, n: int) -> Tensor:
    """All blocks that keep ``n`` per row and per column: ``[P, m, m]``. Do not write to it.

    90 for 4 and 2. Blocks that keep fewer in some column would keep fewer in all, which is not
    half.
    """
    rows = compute_valid_1d_patterns(m, n)
    if len(rows) ** m > _MOST_2D_PATTERNS:
        raise ValueError(
            f"m={m}, n={n}: too many blocks to try them all; use m{m}n{n}_2d_greedy instead."
        )
    blocks = torch.stack([torch.stack(chosen) for chosen in product(rows, repeat=m)])
    return blocks[(blocks.sum(1) == n).all(1)]


def mn_1d_best(matrix: Tensor, m: int, n: int) -> Tensor:
    """Keep ``n`` of each ``m`` consecutive columns, with the largest sum of magnitudes.

    Args:
        matrix: ``[rows, columns]``, floating point; columns that are no multiple of ``m`` count as
            if zeros followed.

    Returns:
        0 and 1, with shape, dtype and device of ``matrix``. Of equal magnitudes the first stay.
    """
    runs, padded = reshape_1d(_magnitudes(matrix), m)
    patterns = compute_valid_1d_patterns(m, n).to(runs)
    kept = patterns[(runs @ patterns.t()).argmax(1)]
    return kept.view(padded)[:, : matrix.shape[1]].to(matrix.dtype).contiguous()


def mn_2d_best(matrix: Tensor, m: int, n: int) -> Tensor:
    """Keep ``n`` per row and column of each block of ``m`` by ``m``, the best of all patterns.

    Such a mask also suits the transposed matrix, which the backward pass multiplies with. Arguments
    and result are those of :func:`mn_1d_best`.
    """
    blocks = _blocks(_magnitudes(matrix), m)
    patterns = compute_valid_2d_patterns(m, n).flatten(1).to(blocks)
    return _from_blocks(patterns[(blocks @ patterns.t()).argmax(1)], matrix, m)


def mn_2d_greedy(matrix: Tensor, m: int, n: int) -> Tensor:
    """Go through each block of ``m`` by ``m`` from the largest magnitude to the smallest.

    An element stays if its row and its column have fewer than ``n`` yet. A block may keep less than
    :func:`mn_2d_best` would, and some rows fewer than ``n``. Arguments and result are those of
    :func:`mn_1d_best`.
    """
    _check_sizes(m, n)
    blocks = _blocks(_magnitudes(matrix), m)
    ranked = blocks.argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(blocks)
    rows, columns = (blocks.new_zeros(len(blocks), m) for _ in range(2))
    for place in ranked.unbind(1):
        row, column, place = (place // m)[:, None], (place % m)[:, None], place[:, None]
        stays = (rows.gather(1, row) < n) & (columns.gather(1, column) < n)
        for counts, index in ((rows, row), (columns, column), (mask, place)):
            counts.scatter_add_(1, index, stays.to(counts))
    return _from_blocks(mask, matrix, m)


def m4n2_1d(mat: Tensor, density: float) -> Tensor:
    """``mn_1d_best(mat, 4, 2)``; ``density`` must be 0.5."""
    return _calculated("m4n2_1d", mat, density)


def m4n2_2d_best(mat: Tensor, density: float) -> Tensor:
    """``mn_2d_best(mat, 4, 2)``; ``density`` must be 0.5."""
    return _calculated("m4n2_2d_best", mat, density)


def m4n2_2d_greedy(mat: Tensor, density: float) -> Tensor:
    """``mn_2d_greedy(mat, 4, 2)``; ``density`` must be 0.5."""
    return _calculated("m4n2_2d_greedy", mat, density)


def create_mask(tensor: Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> Tensor:
    """Say which weights stay: 1, or 0 for those to prune.

    Args:
        tensor: weights of 1 dimension or more, floating point; of a linear layer ``[K, C]``, of a
            convolution ``[K, C, ...]``. Weights compete along ``C``, the input channels.
        pattern: ``"m4n2_1d"``: the best two of every four channels. ``"m4n2_2d_best"`` and
            ``"m4n2_2d_greedy"``: two per row and column of blocks of 4x4, in the matrix whose rows
            are output channels (for each place of a 2-D or 3-D kernel). Other numbers than 4 and 2
            work too.
        density: the share that stays; it must be that of the pattern.

    Returns:
        0 and 1, with shape, dtype and device of ``tensor``.

    Raises:
        TypeError: ``tensor`` is not floating point.
        ValueError: an unknown pattern, another density, or a tensor without dimensions. (Apex
            ignores the density, and returns None for tensors of more than 4 dimensions.)
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"create_mask: tensor must be a floating-point tensor, got {got}.")
    if tensor.dim() == 0:
        raise ValueError("create_mask: tensor must have at least one dimension, got a scalar.")
    weights = tensor.detach()
    if weights.numel() == 0:
        _calculated(pattern, weights.new_zeros(0, 1), density)  # raises for what is wrong
        return torch.empty_like(weights)
    if weights.dim() <= 2:
        return _calculated(pattern, weights.view(-1, weights.shape[-1]), density).view_as(weights)
    # Rows are [K, R] of a 1-D kernel, and places of the kernel first, then K, of others.
    to_last = [0, 2, 1] if weights.dim() == 3 else [*range(2, weights.dim()), 0, 1]
    view = weights.permute(to_last)
    mask = _calculated(pattern, view.reshape(-1, view.shape[-1]), density).view(view.shape)
    back = [to_last.index(dim) for dim in range(weights.dim())]
    return torch.empty_like(weights).copy_(mask.permute(back))


def _calculated(pattern: str, matrix: Tensor, density: float) -> Tensor:
    match = _PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    if match is None:
        raise ValueError(
            f"pattern: expected m4n2_1d, m4n2_2d_best or m4n2_2d_greedy, got {pattern!r}."
        )
    m, n = int(match[1]), int(match[2])
    if density != n / m:
        raise ValueError(f"density: {pattern} keeps {n / m} of the weights, got {density}.")
    calculator = {"1d": mn_1d_best, "2d_best": mn_2d_best, "2d_greedy": mn_2d_greedy}[match[3]]
    return calculator(matrix, m, n)


def _check_sizes(m: int, n: int) -> None:
    if not 0 < n <= m:
        raise ValueError(f"n must be 1 to m, got m={m} and n={n}.")


def _magnitudes(matrix: Tensor) -> Tensor:
    """In a dtype in which sums of a few do not overflow, or round what differs to what is equal."""
    dtype = torch.float64 if matrix.dtype in (torch.float32, torch.float64) else torch.float32
    return matrix.detach().abs().to(dtype)


def _blocks(matrix: Tensor, m: int) -> Tensor:
    """Blocks ``[N, m * m]`` of a matrix that is padded with zeros."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % m, 0, -rows % m))
    across = padded.shape[1] // m
    return padded.view(-1, m, across, m).transpose(1, 2).reshape(-1, m * m)


def _from_blocks(blocks: Tensor, like: Tensor, m: int) -> Tensor:
    rows, columns = like.shape
    across = -(-columns // m)
    whole = blocks.view(-1, across, m, m).transpose(1, 2).reshape(-1, across * m)
    return whole[:rows, :columns].to(like.dtype).contiguous()
