"""A pytest plugin that runs a few cases of every test function instead of all.

pytest -p ci.sampling --cases-per-test 4

For runs that repeat on another torch or Python what was tested in full on one: there, another
dtype or shape of the same test tells nothing new, but a function that is left out would. Tests
marked `slow` are left out.
"""

from collections import defaultdict


def pytest_addoption(parser):
    parser.addoption(
        "--cases-per-test",
        type=int,
        metavar="N",
        help="run at most N of a test function's parametrized cases, spread over all of them",
    )


def pytest_collection_modifyitems(config, items):
    limit = config.getoption("--cases-per-test")
    if limit is None:
        return
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    kept = {item for group in cases.values() for item in spread(group, limit)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


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
