"""What each permutation of windows of 8 or 12 columns keeps, of all pairs or threes of stripes.

That is the first pass of the search, and what it spends its time in. The peer is the same in plain
NumPy: sets of four columns once each, two of four as the largest of three sums.
"""

from itertools import combinations

import numpy as np
import torch

from apex.contrib.sparsity.permutation_search_kernels.exhaustive_search import (
    generate_all_unique_combinations,
)
from apex.contrib.sparsity.permutation_search_kernels.windows import Moves
from apex_testkit.bench import chosen_device, compare

# Rows and columns: convolutions of a ResNet-18, and a linear layer.
SHAPES = [(576, 64), (1152, 128), (2304, 256), (1024, 256)]
WIDE = (576, 64)  # with windows of 12 columns, 5775 permutations each
AT_ONCE = 64  # windows, in NumPy: their columns stay in the caches


def plain(magnitudes, windows, fours, parts):
    """The same by NumPy alone."""
    kept = np.empty((len(windows), len(fours)), np.float32)
    for begin in range(0, len(windows), AT_ONCE):
        part = slice(begin, begin + AT_ONCE)
        columns = windows[part][:, fours]
        for i, chosen in enumerate(columns):
            a, b, c, d = (magnitudes[chosen[:, j]] for j in range(4))
            high = np.maximum(a, b) + np.maximum(c, d)
            kept[begin + i] = np.maximum(high, np.maximum(a + b, c + d)).sum(1)
    return kept.astype(np.float64)[:, parts].sum(2)


def run(rows: int, columns: int, device: str, width: int = 8) -> None:
    """Measure one matrix."""
    magnitudes = torch.randn(rows, columns, device=device).abs().t().contiguous()
    moves = Moves.of(generate_all_unique_combinations(width, 4)).to(magnitudes.device)
    stripes = torch.arange(columns, device=device).view(-1, 4)
    pairs = torch.tensor(list(combinations(range(columns // 4), width // 4)), device=device)
    windows = stripes[pairs].flatten(1)
    arrays = [t.cpu().numpy() for t in (magnitudes, windows, moves.fours, moves.parts)]
    found, expected = moves.values(magnitudes, windows).cpu().numpy(), plain(*arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    compare(
        "permutation_search",
        f"windows of {width} of {columns} columns, {rows} rows",
        device=device,
        apex=lambda: moves.values(magnitudes, windows),
        numpy=lambda: plain(*arrays),
    )


for shape in SHAPES:
    run(*shape, chosen_device())
run(*WIDE, chosen_device(), width=12)
