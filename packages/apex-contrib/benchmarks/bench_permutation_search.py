"""Searches for orders of channels, and what each permutation of windows of columns keeps.

The latter, of all pairs or threes of stripes, is the first pass of a search, and what it spends its
time in. The peers are the same in plain NumPy (sets of four columns once each, two of four as the
largest of three sums), and the published search made of it, which must not keep more than ours.
"""

import time
from itertools import combinations

import numpy as np
import torch

from apex.contrib.sparsity.permutation_search_kernels import (
    accelerated_search_for_good_permutation,
)
from apex.contrib.sparsity.permutation_search_kernels.exhaustive_search import (
    generate_all_unique_combinations,
)
from apex.contrib.sparsity.permutation_search_kernels.windows import Moves
from apex_testkit.bench import chosen_device, compare, record_samples
from apex_testkit.channel_search import published, retained
from apex_testkit.load import LoadMeter

# Rows and columns: convolutions of a ResNet-18, and a linear layer.
SHAPES = [(576, 64), (1152, 128), (2304, 256), (1024, 256)]
WIDE = (576, 64)  # with windows of 12 columns, 5775 permutations each
# Rows and input channels of weights, and escapes of their searches, of which ASP has 100.
SEARCHED = {
    "resnet50 3x3": (576, 64, 100),
    "resnet50 1x1": (64, 256, 100),
    "resnet50 3x3 wide": (1152, 128, 100),
    "bert attention": (768, 768, 2),
}
SEARCHES = 3  # of ours, and one of NumPy's
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


def search(name: str, rows: int, columns: int, escapes: int) -> None:
    """Record seconds of whole searches; raise if the published one keeps more."""
    rng = np.random.default_rng(0)
    scales = np.exp(0.5 * rng.standard_normal(columns))  # channels differ, as trained ones do
    matrix = (rng.standard_normal((rows, columns)) * scales).astype(np.float32)
    options = {"escape_attempts": escapes}
    accelerated_search_for_good_permutation(matrix[:, :16], options)
    meter, samples = LoadMeter(), {"apex": [], "numpy": []}
    for _ in range(SEARCHES):
        begun = time.perf_counter()
        order = accelerated_search_for_good_permutation(matrix, options)
        samples["apex"].append((time.perf_counter() - begun) * 1e6)
    begun = time.perf_counter()
    most, _ = published(matrix, escapes)
    samples["numpy"].append((time.perf_counter() - begun) * 1e6)
    load, kept = meter.read(), retained(matrix[:, order])
    case = f"{name}, {rows} x {columns}, {escapes} escapes"
    record_samples("permutation_search_whole", case, samples, load)
    whole = np.abs(matrix).sum(dtype=np.float64)
    before = retained(matrix)
    print(f"  keeps {kept / whole:.4%}, NumPy {most / whole:.4%}, unpermuted {before / whole:.4%}")
    if kept < most * (1 - 1e-6):
        raise AssertionError(f"{case}: keeps {kept}, and the published search {most}")


for shape in SHAPES:
    run(*shape, chosen_device())
run(*WIDE, chosen_device(), width=12)
if chosen_device() == "cpu":
    for name, sizes in SEARCHED.items():
        search(name, *sizes)
