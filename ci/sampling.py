"""A pytest plugin that runs a few cases of every test function instead of all.

pytest -p ci.sampling --cases-per-test 4
pytest -p ci.sampling --cases-per-test 1 --share 1/2

For runs that repeat on another torch or Python what was tested in full on one: there, another
dtype or shape of the same test tells nothing new, but a function that is left out would. Tests
marked `slow` are left out. Where there are many such runs, each can take a share of the functions:
1/2 and 2/2 have none in common, and together they have all. Only tests marked `every_torch`, which
reach into parts of torch that change, are in each share.
"""

import random
import zlib
from collections import defaultdict

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--cases-per-test",
        type=int,
        metavar="N",
        help="run at most N of a test function's parametrized cases, spread over all of them",
    )
    parser.addoption("--sample-seed", metavar="TEXT", help="draw the cases by lot, with this seed")
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares of the functions")


def pytest_collection_modifyitems(config, items):
    limit, wanted = config.getoption("--cases-per-test"), config.getoption("--share")
    if limit is None:
        if wanted is not None:
            raise pytest.UsageError("--share: needs --cases-per-test, which was not given")
        return
    share = parse_share("1/1" if wanted is None else wanted)
    cases = defaultdict(list)
    for item in items:
        function = item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow") is not None:
            continue
        if item.get_closest_marker("every_torch") is not None or is_in_share(function, *share):
            cases[function].append(item)
    seed = config.getoption("--sample-seed")
    drawn = (
        spread(group, limit) if seed is None else draw(group, limit, f"{seed} {function}")
        for function, group in cases.items()
    )
    kept = {item for group in drawn for item in group}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def parse_share(text: str) -> tuple[int, int]:
    """``"2/3"`` as (2, 3)."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share: expected K/N with 1 <= K <= N, got {text}")
    return int(number), int(count)


def is_in_share(function: str, number: int, count: int) -> bool:
    """Whether a function is in the share ``number`` of ``count``, in this and every other run."""
    return zlib.crc32(function.encode()) % count == number - 1


def spread(group: list, limit: int) -> list:
    """Return ``limit`` of the group's items at equal distances, the first and last included.

    Of one, the middle: the first is often a corner (float64, an empty shape).
    """
    if limit < 1:
        raise ValueError(f"--cases-per-test must be at least 1, got {limit}")
    if len(group) <= limit:
        return group
    if limit == 1:
        return [group[len(group) // 2]]
    step = (len(group) - 1) / (limit - 1)
    return [group[round(i * step)] for i in range(limit)]


def draw(group: list, limit: int, seed: str) -> list:
    """Return at most ``limit`` of the group's items by lot: the same ones for the same seed."""
    return random.Random(seed).sample(group, min(limit, len(group)))
