"""A pytest plugin that runs a few cases of every test function instead of all.

pytest -p ci.sampling --cases-per-test 4
pytest -p ci.sampling --cases-per-test 1 --share 1/2
pytest -p ci.sampling --cases-per-test 2 --whole tests/test_changed.py
pytest -p ci.sampling --cases-per-test 3 --every-shape 0

For runs that repeat on another torch or Python what was tested in full on one: there, another
dtype or shape of the same test tells nothing new, but a function that is left out would. Tests
marked `slow` are left out. Where there are many such runs, each can take a share of the functions:
1/2 and 2/2 have none in common, and together they have all. Only tests marked `every_torch`, which
reach into parts of torch that change, are in each share.

With --every-shape, a function that is tested over shapes keeps a case of every shape, however many
there are: which way a GPU kernel goes depends on the shape alone, and what cases have in common by
their place among all (float64 and empty, say) takes none of these ways. Cases of neighbouring
shapes are in float32 and bfloat16 by turns; another number begins with the other dtype.
"""

import random
import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

# Parameters of tests that are shapes, and the dtypes that their cases are in.
SHAPES = ("shape", "shapes", "size", "sizes", "numel", "rows", "columns", "width")
DTYPES = ("float32", "bfloat16")


def pytest_addoption(parser):
    parser.addoption(
        "--cases-per-test",
        type=int,
        metavar="N",
        help="run at most N of a test function's parametrized cases, spread over all of them",
    )
    parser.addoption("--sample-seed", metavar="TEXT", help="draw the cases by lot, with this seed")
    parser.addoption(
        "--every-shape",
        type=int,
        metavar="TURN",
        help="keep a case of every shape, even beyond --cases-per-test; 0 or 1: which dtype begins",
    )
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares of the functions")
    parser.addoption(
        "--whole",
        action="append",
        default=[],
        metavar="FILE",
        help="run all tests of FILE, and draw from the other files' alone; repeat for several",
    )


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
    seed, turn = config.getoption("--sample-seed"), config.getoption("--every-shape")
    drawn = (
        spread(group, limit) if seed is None else draw(group, limit, f"{seed} {function}")
        for function, group in cases.items()
    )
    if turn is not None:
        drawn = (of_every_shape(group, turn) or spread(group, limit) for group in cases.values())
    whole = {Path(file).resolve() for file in config.getoption("--whole")}
    kept = {item for group in drawn for item in group}
    kept |= {item for item in items if item.path in whole}
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


def of_every_shape(group: list, turn: int) -> list:
    """Return cases of a function that have each of its shapes; none if it has no shapes.

    The other parameters take their values by turns, so that two turns show each shape in two
    dtypes, with a bias and without, in two layouts and so on.
    """
    values: dict[str, dict[int, int]] = {}  # of each parameter: the number of each object
    for item in group:
        for name, value in _params(item).items():
            of_name = values.setdefault(name, {})
            of_name.setdefault(id(value), len(of_name))
    shapes = [(name, value) for name in values if name in SHAPES for value in values[name]]
    chosen, seen = [], set()
    for number, shape in enumerate(shapes):
        if shape in seen:
            continue

        def fits(item, shape=shape, number=number) -> tuple:
            pairs = {name: id(value) for name, value in _params(item).items()}
            place = number // 2 + turn
            others = [values[n][v] == place % len(values[n]) for n, v in pairs.items()]
            dtype = DTYPES[(number + turn) % len(DTYPES)]
            return shape in pairs.items(), _dtype(item) == dtype, sum(others)

        best = max(group, key=fits)
        chosen.append(best)
        seen |= {(name, id(value)) for name, value in _params(best).items()}
    return [item for item in group if item in chosen]


def _params(item) -> dict:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def _dtype(item) -> str | None:
    """Return the first dtype that the name of the case tells."""
    found = re.search(r"\bb?float\d+", item.name)
    return found and found[0]


def draw(group: list, limit: int, seed: str) -> list:
    """Return at most ``limit`` of the group's items by lot: the same ones for the same seed."""
    return random.Random(seed).sample(group, min(limit, len(group)))
