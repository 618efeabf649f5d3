"""Searches for orders of channels, against brute force, and against the published algorithm."""

import importlib
import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from apex.contrib.sparsity.permutation_search_kernels import (
    accelerated_search_for_good_permutation,
    sum_after_2_to_4,
)
from apex.contrib.sparsity.permutation_search_kernels import channel_swap as swap
from apex.contrib.sparsity.permutation_search_kernels import exhaustive_search as search
from apex.contrib.sparsity.permutation_search_kernels import permutation_utilities as utilities
from apex_testkit.channel_search import partitions, published, retained


def matrix_of(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("columns", [4, 8, 12])
def test_all_orders_of_few_columns(columns):
    matrix = matrix_of(9, columns)
    best = max(retained(matrix[:, order]) for order in partitions(list(range(columns))))
    permuted, _, order = search.Exhaustive_Search(matrix)
    assert np.array_equal(permuted, matrix[:, order])
    assert sorted(order) == list(range(columns))
    assert retained(permuted) == pytest.approx(best, rel=1e-6)
    assert search.search_matrix(matrix, 4)[2] == order


@pytest.mark.parametrize(("rows", "columns", "seed"), [(16, 16, 0), (24, 32, 1), (64, 24, 2)])
def test_keeps_no_less_than_the_published_algorithm(rows, columns, seed):
    matrix = matrix_of(rows, columns, seed)
    expected, _ = published(matrix, escapes=20, seed=seed)
    options = {"escape_attempts": 100, "seed": seed}
    order = accelerated_search_for_good_permutation(matrix, options)
    found = retained(matrix[:, order])
    assert found >= expected * (1 - 1e-6)
    assert retained(matrix) < found <= utilities.magnitude_after_pruning_rows(matrix)


# A weight's rows and input channels: convolutions of ResNet-50, and a dense layer of BERT-mini.
WEIGHTS = {"3x3": (576, 64), "1x1": (64, 256), "1x1 wide": (128, 512), "bert": (1024, 256)}


@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS)
def test_keeps_no_less_of_weights_of_networks(shape):
    """With as many escapes. bench_permutation_search.py compares BERT-base's and what 100 keep."""
    rng = np.random.default_rng(5)
    matrix = rng.standard_normal(shape) * np.exp(0.5 * rng.standard_normal(shape[1]))
    matrix = matrix.astype(np.float32)
    expected, _ = published(matrix, escapes=1)
    order = accelerated_search_for_good_permutation(matrix, {"escape_attempts": 1})
    assert sorted(order) == list(range(shape[1]))
    assert retained(matrix[:, order]) >= expected * (1 - 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"escape_attempts": 10},
        {"stripe_group_size": 12, "escape_attempts": 2},
        {"strategy": "progressive channel swap"},
    ],
    ids=str,
)
def test_equal_seeds_find_equal_orders_at_any_number_of_threads(options):
    matrix, found = matrix_of(200, 32), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(accelerated_search_for_good_permutation(matrix, {**options, "seed": 3}))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
    assert sorted(found[0]) == list(range(32))
    assert retained(matrix[:, found[0]]) > retained(matrix) * 1.01
    tensor = torch.from_numpy(matrix).double()
    assert retained(matrix[:, accelerated_search_for_good_permutation(tensor, options)]) > retained(
        matrix
    )


def test_swaps_end_where_no_swap_gains():
    matrix = matrix_of(30, 24)
    order = accelerated_search_for_good_permutation(
        matrix, {"strategy": "progressive channel swap"}
    )
    for result in (matrix[:, order], swap.Channel_Swap(matrix)[0]):
        gains = [utilities.try_swap(result, a, b) for a, b in combinations(range(24), 2)]
        assert max(gains) < 1e-4
        values, pairs = swap.compute_swap_map(result, [])
        assert values.max() < 1e-4
        assert len(pairs) == 15


def test_swaps_by_maps():
    """By hand what Channel_Swap does: maps of gains, the best swaps, and escapes."""
    matrix = matrix_of(20, 24)
    gains, pairs = swap.build_swap_map(matrix)
    for pair, row in zip(pairs, gains, strict=True):
        for index, gain in enumerate(row):
            columns = swap.stripes_and_swap_idx_to_columns(*map(int, pair), index)
            assert gain == pytest.approx(utilities.try_swap(matrix, *columns), abs=1e-4)
    moved, order, escapes = matrix, list(range(24)), 0
    while True:
        given = (moved, gains, pairs, 1e-4, escapes, 3, order)
        result, used, gain, order, now = swap.use_swap_map(*given)
        assert np.array_equal(result, matrix[:, order])
        assert retained(result) - retained(moved) == pytest.approx(gain, abs=1e-3)
        if not used:
            break
        assert (now > escapes) == (gains.max() <= 1e-4)
        moved, escapes = result, now
        gains, pairs = swap.build_swap_map(moved, gains, pairs, used)
        np.testing.assert_allclose(gains, swap.build_swap_map(moved)[0], atol=1e-5)
    assert escapes == 3
    assert gains.max() <= 1e-4
    assert retained(moved) > retained(matrix) * 1.02


def test_wide_matrices_are_halved_first(monkeypatch):
    monkeypatch.setattr(search, "_HALVED_ABOVE", 24)
    matrix = matrix_of(5, 32)
    _, _, order = search.Exhaustive_Search(matrix, 12, permutation=range(31, -1, -1))
    assert sorted(order) == list(range(32))
    assert retained(matrix[:, order]) > retained(matrix) * 1.05


def test_unique_combinations():
    for columns in (4, 8, 12):
        found = search.generate_all_unique_combinations(columns, 4)
        assert found.tolist() == list(partitions(list(range(columns))))
        assert len(found) == search.predict_unique_combinations(columns, 4)
    assert len(search.generate_all_unique_combinations(12, 4, must_use_all_groups=True)) < 5775
    assert search.predict_unique_combinations(16, 4) == math.factorial(16) // (24**4 * 24)
    assert search.is_canonical([0, 1, 2, 3], 4)
    assert not search.is_canonical([0, 1, 3], 2)
    assert not search.is_canonical([], 1)


def test_maps_of_stripes():
    matrix = matrix_of(20, 16)
    gains, stripes, permutations = search.build_stripe_map(matrix, 4, 2)
    assert stripes.tolist() == [list(pair) for pair in combinations(range(4), 2)]
    for gain, group, permutation in zip(gains, stripes, permutations, strict=True):
        part = search.collect_stripes(matrix, group, 4)
        assert retained(part[:, permutation]) - retained(part) == pytest.approx(gain, rel=1e-4)
    moved, used, gain, order = search.use_stripe_map(
        matrix, 4, gains, stripes, permutations, list(range(16))
    )
    assert np.array_equal(moved, matrix[:, order])
    assert retained(moved) - retained(matrix) == pytest.approx(gain, rel=1e-4)
    again = search.build_stripe_map(moved, 4, 2, gains, stripes, permutations, used)
    fresh = search.build_stripe_map(moved, 4, 2)
    assert np.array_equal(again[0], fresh[0])


def test_utilities():
    matrix = matrix_of(6, 8)
    pruned = utilities.apply_2_to_4(matrix)
    assert np.count_nonzero(pruned) == 24
    assert np.abs(pruned).sum(dtype=np.float64) == pytest.approx(retained(matrix), rel=1e-12)
    assert sum_after_2_to_4(matrix) == pytest.approx(retained(matrix), rel=1e-12)
    assert np.count_nonzero(utilities.unstructured_prune(matrix, 0.25)) == 36
    swapped = matrix[:, [0, 5, 2, 3, 4, 1, 6, 7]]
    assert utilities.try_swap(matrix, 1, 5) == pytest.approx(retained(swapped) - retained(matrix))
    assert utilities.find_permutation(matrix, swapped) == [0, 5, 2, 3, 4, 1, 6, 7]
    with pytest.raises(ValueError, match="column 0 of B"):
        utilities.find_permutation(matrix, matrix + 1)
    assert utilities.efficacy(1, 3, 2) == 0.5
    gain, best = utilities.try_permutations_on_matrix(matrix, [range(8), [0, 5, 2, 3, 4, 1, 6, 7]])
    assert gain == max(0, utilities.try_swap(matrix, 1, 5))
    assert sorted(best) == list(range(8))


def test_distance_of_permutations():
    a = list(range(12))
    assert utilities.permutation_distance(a, [7, 6, 5, 4, 0, 3, 2, 1, *a[8:]]) == 0
    b = [4, 1, 2, 3, 0, 5, 6, 7, *a[8:]]
    assert utilities.permutation_distance(a, b) == 1
    assert utilities.common_groups(a, b) == [(8, 9, 10, 11)]
    assert utilities.remove_common_groups(a, b) == (a[:8], b[:8])
    c = np.random.default_rng(0).permutation(12).tolist()
    assert utilities.dictify(utilities.group_differences(a, b)) == {0: [4], 1: [0]}
    assert utilities.swap_and_correct(b, 0, 4) == a
    assert utilities.swap_and_correct(a, 0, 1) == a
    matrix = matrix_of(6, 12)
    own, other = retained(matrix[:, a]), retained(matrix[:, b])
    targets = [min(own, other) - 1, own, own + 100]
    count, reached = utilities.permutation_distance(a, b, matrix, targets)
    assert (count, reached) == (1, [0, 0 if other >= own else 1, None])
    steps, count = c, utilities.permutation_distance(a, c)
    for _ in range(count):
        steps = utilities.move_permutation_towards(steps, a)
    assert set(utilities.make_grouped(steps)) == set(utilities.make_grouped(a))


@pytest.fixture
def extension():
    return importlib.import_module("permutation_search_cuda")


def test_extension_module(extension):
    matrix, out = matrix_of(20, 16), np.zeros(1, np.float32)
    extension.sum_after_2_to_4(matrix, 20, 16, 4, 12, 1, 1, out)
    assert out[0] == pytest.approx(retained(matrix[:, 4:12]), rel=1e-5)

    groups = np.array(list(combinations(range(4), 2)), np.uint32)
    moves = search.generate_all_unique_combinations(8, 4)
    gains, best = np.zeros(6, np.float32), np.zeros(6, np.uint32)
    extension.build_permute_map(matrix.ravel(), 20, 16, groups, 6, 2, moves, 8, gains, best)
    for group, gain, index in zip(groups, gains, best, strict=True):
        part = search.collect_stripes(matrix, group, 4)
        kept = [retained(part[:, move]) for move in moves]
        assert kept[index] == pytest.approx(max(kept), rel=1e-6)
        assert gain == pytest.approx(max(kept) - kept[0], abs=1e-4)
    others = np.zeros(6, np.float32), np.zeros(6, np.uint32)
    extension.check_permutations(matrix, 20, 16, groups, 2, 6, moves, 35, *others)
    assert np.array_equal(gains, others[0])
    assert np.array_equal(best, others[1])

    swaps = np.zeros((6, 16), np.float32)
    extension.build_swap_map(matrix, 20, 16, groups, swaps)
    for pair, row in zip(groups, swaps, strict=True):
        for index, gain in enumerate(row):
            columns = swap.stripes_and_swap_idx_to_columns(*map(int, pair), index)
            assert swap.columns_to_stripes_and_swap_idx(*columns) == (*pair, index)
            assert gain == pytest.approx(utilities.try_swap(matrix, *columns), abs=1e-4)


def test_extension_module_refuses(extension):
    matrix, out = matrix_of(4, 8), np.zeros(16, np.float32)
    with pytest.raises(ValueError, match="multiples of 4, 0 to 8, got 2 and 8"):
        extension.sum_after_2_to_4(matrix, 4, 8, 2, 8, 1, 1, out)
    with pytest.raises(ValueError, match=r"matrix must be \[5, 8\], got \[4, 8\]"):
        extension.sum_after_2_to_4(matrix, 5, 8, 0, 8, 1, 1, out)
    with pytest.raises(ValueError, match="not a stripe, 0 to 1"):
        extension.build_swap_map(matrix, 4, 8, np.array([[0, 2]]), out)
    wrong = np.zeros((1, 8), np.uint32)
    with pytest.raises(ValueError, match="a row lacks some of 0 to 7"):
        extension.build_permute_map(matrix, 4, 8, [[0, 1]], 1, 2, wrong, 8, out, out)
    with pytest.raises(ValueError, match="perm_length must be"):
        extension.build_permute_map(matrix, 4, 8, [[0, 1]], 1, 2, wrong, 4, out, out)


def test_extension_module_without_kernels(monkeypatch):
    from apex.contrib._ops import library

    def refuse(folder, who, device_type="cpu"):
        raise RuntimeError(f"{who}: no kernels")

    monkeypatch.setattr(library, "require", refuse)
    monkeypatch.delitem(sys.modules, "permutation_search_cuda", raising=False)
    with pytest.raises(ImportError, match="permutation_search_cuda: no kernels"):
        importlib.import_module("permutation_search_cuda")


@pytest.mark.parametrize(
    ("matrix", "options", "text"),
    [
        (matrix_of(4, 8), {"strategy": "none"}, "strategy must be one of exhaustive.* got 'none'"),
        (matrix_of(4, 8), {"attempts": 3}, "exhaustive has no attempts, but stripe_group_size"),
        (matrix_of(4, 8), {"stripe_group_size": 16}, "must be 4, 8, 12 or -1, got 16"),
        (matrix_of(4, 6), {}, r"multiple of 4 columns, got \[4, 6\]"),
    ],
)
def test_bad_arguments(matrix, options, text):
    with pytest.raises(ValueError, match=text):
        accelerated_search_for_good_permutation(matrix, options)
    assert accelerated_search_for_good_permutation(matrix, {"strategy": "user defined"}) == list(
        range(matrix.shape[1])
    )


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="expected at most 12"):
        search.search_matrix(matrix_of(2, 16), 4)
    with pytest.raises(ValueError, match="each of 0 to 7"):
        search.Exhaustive_Search(matrix_of(2, 8), permutation=[0] * 8)
    with pytest.raises(ValueError, match="multiple of M, got C=6 and M=4"):
        search.generate_all_unique_combinations(6, 4)
    with pytest.raises(ValueError, match="group_width must be 4"):
        search.build_stripe_map(matrix_of(2, 8), 2, 2)


TOP_LEVEL = """
import sys
{first}
sys.path.append({folder!r})
import permutation_search_kernels.channel_swap as swap
from permutation_search_kernels import accelerated_search_for_good_permutation as search
from permutation_search_kernels.exhaustive_search import Exhaustive_Search
import permutation_search_kernels as top
from apex.contrib.sparsity import permutation_search_kernels as own
from apex.contrib.sparsity.permutation_search_kernels import channel_swap, exhaustive_search

assert top is own and swap is channel_swap and search is own.accelerated_search_for_good_permutation
assert Exhaustive_Search is exhaustive_search.Exhaustive_Search
files = [module.__file__ for module in set(sys.modules.values()) if "search_kernels" in str(module)]
assert len(files) == len(set(files)) == 6, files
"""


@pytest.mark.parametrize("first", ["", "import apex.contrib.sparsity.permutation_lib"])
def test_top_level_package_is_the_same(first):
    """Apex's scripts put sparsity/ on sys.path; the operator must not be defined twice then."""
    folder = str(Path(search.__file__).parent.parent)
    code = TOP_LEVEL.format(first=first, folder=folder)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
