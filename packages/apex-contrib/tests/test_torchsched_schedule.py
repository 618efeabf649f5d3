"""Schedules on streams: every dependency is kept, with no event too many."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from apex.contrib.torchsched.schedule import ENTRANCE, longest_path, runs, schedule


def order_of(found, without=None):
    """Whatever streams and events keep in order: for each node, the set of those done before it.

    ``"end"`` is where the caller's stream goes on; ``without`` is a wait that is left out.
    """
    count = len(found.streams)
    done, before_on_stream = {ENTRANCE: frozenset()}, {0: ENTRANCE}
    for node in [*range(count), "end"]:
        stream = 0 if node == "end" else found.streams[node]
        waits = found.final_waits if node == "end" else found.waits[node]
        behind = [w for w in waits if (node, w) != without]
        if stream in before_on_stream:
            behind.append(before_on_stream[stream])
        done[node] = frozenset().union(*({b} | done[b] for b in behind))
        before_on_stream[stream] = node
    return done


def is_kept(done, dependencies):
    """Whether each node follows those it needs and the entrance, and the end follows all."""
    return done["end"] >= set(range(len(dependencies))) and all(
        done[node] >= {ENTRANCE, *needed} for node, needed in enumerate(dependencies)
    )


def paths(dependencies):
    """All paths that end nowhere earlier than they must."""
    ways = {}
    for node, needed in enumerate(dependencies):
        ways[node] = [[*way, node] for d in needed for way in ways[d]] or [[node]]
    return [way for found in ways.values() for way in found]


def check(costs, dependencies, num_streams, least_cost=0.0):
    found = schedule(costs, dependencies, num_streams, least_cost)
    assert len(found.streams) == len(found.waits) == len(costs)
    assert all(0 <= stream < num_streams for stream in found.streams)
    # A GPU does not wait for an event that was not recorded yet, so each is launched before.
    assert all(w < node for node, waits in enumerate(found.waits) for w in waits)
    assert is_kept(order_of(found), dependencies)
    waits = [(node, w) for node, some in enumerate(found.waits) for w in some]
    for wait in [*waits, *(("end", w) for w in found.final_waits)]:
        assert not is_kept(order_of(found, without=wait), dependencies), f"{wait} is one too many"
    if costs:
        path = longest_path(costs, dependencies)
        assert {found.streams[node] for node in path} == {0}
        most = max(sum(costs[node] for node in way) for way in paths(dependencies))
        assert sum(costs[node] for node in path) == pytest.approx(most)
        assert all(a in dependencies[b] for a, b in itertools.pairwise(path))
    check_runs(found, dependencies)
    return found


def check_runs(found, dependencies):
    """Runs hold all nodes once, and a device that launches them whole does everything in order."""
    launches = runs(found)
    assert sorted(n for run in launches for n in run.nodes) == list(range(len(dependencies)))
    for run in launches:
        assert {found.streams[node] for node in run.nodes} == {run.stream}
        assert run.waits == found.waits[run.nodes[0]]
        assert not any(found.waits[node] for node in run.nodes[1:])
        assert not found.recorded.intersection(run.nodes[:-1])
    launched = {ENTRANCE}
    for run in launches:
        assert launched.issuperset(run.waits)
        for node in run.nodes:
            assert launched.issuperset(dependencies[node])
            launched.add(node)


def graphs(nodes):
    pairs = list(itertools.combinations(range(nodes), 2))
    for chosen in itertools.product([False, True], repeat=len(pairs)):
        edges = [pair for pair, is_there in zip(pairs, chosen, strict=True) if is_there]
        yield [[a for a, b in edges if b == node] for node in range(nodes)]


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_all_graphs_of_up_to_four_nodes(num_streams):
    for nodes in range(5):
        for dependencies in graphs(nodes):
            for costs in itertools.product([1, 3], repeat=nodes):
                check(costs, dependencies, num_streams)


def test_all_graphs_of_five_nodes():
    for dependencies in graphs(5):
        check([2, 1, 3, 1, 2], dependencies, 4)
        check([2, 1, 3, 1, 2], dependencies, 3, least_cost=2)


@st.composite
def random_graphs(draw):
    nodes = draw(st.integers(0, 14))
    dependencies = []
    for node in range(nodes):
        earlier = st.integers(0, node - 1) if node else st.nothing()
        dependencies.append(draw(st.lists(earlier, max_size=min(node, 3))))
    costs = draw(st.lists(st.integers(0, 20), min_size=nodes, max_size=nodes))
    return costs, dependencies


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(random_graphs(), st.integers(1, 6), st.sampled_from([0, 5]))
def test_random_graphs(graph, num_streams, least_cost):
    check(*graph, num_streams, least_cost)


def test_one_stream_has_no_events():
    found = schedule([1, 1, 1], [[], [], [0, 1]], 1)
    assert found.streams == (0, 0, 0)
    assert not found.recorded
    assert len(runs(found)) == 1


def test_independent_nodes_share_the_side_streams():
    found = schedule([9, 2, 2, 2, 2], [[]] * 5, 3)
    assert found.streams == (0, 1, 2, 1, 2)
    assert found.waits == ((), (ENTRANCE,), (ENTRANCE,), (), ())
    assert found.final_waits == (3, 4)


def test_a_chain_follows_its_stream():
    found = schedule([9, 9, 1, 1, 1], [[], [0], [0], [2], [3]], 4)
    assert found.streams == (0, 0, 1, 1, 1)
    assert found.waits == ((), (), (0,), (), ())
    assert found.final_waits == (4,)
    assert [run.nodes for run in runs(found)] == [(0,), (1,), (2, 3, 4)]


def test_cheap_nodes_stay_where_they_are_needed():
    dependencies = [[], [0], [0], [1, 2]]
    assert schedule([1, 5, 2, 1], dependencies, 2).streams == (0, 0, 1, 0)
    assert schedule([1, 5, 2, 1], dependencies, 2, least_cost=3).streams == (0, 0, 0, 0)


def test_the_path_is_the_first_of_equal_ones():
    assert longest_path([1, 1, 1, 1], [[], [0], [0], [1, 2]]) == [0, 1, 3]
    assert longest_path([], []) == []


@pytest.mark.parametrize(
    ("costs", "dependencies", "num_streams", "text"),
    [
        ([1], [[]], 0, "num_streams must be at least 1, got 0"),
        ([1, 1], [[]], 2, "costs has 2 nodes and dependencies 1"),
        ([-1], [[]], 2, r"costs\[0\] must be at least 0, got -1"),
        ([float("nan")], [[]], 2, r"costs\[0\] must be at least 0, got nan"),
        ([1, 1], [[1], []], 2, r"dependencies\[0\] must be earlier nodes, got \[1\]"),
        ([1], [[0]], 2, r"dependencies\[0\] must be earlier nodes, got \[0\]"),
        ([1], [[-1]], 2, r"dependencies\[0\] must be earlier nodes, got \[-1\]"),
    ],
)
def test_refuses(costs, dependencies, num_streams, text):
    with pytest.raises(ValueError, match=text):
        schedule(costs, dependencies, num_streams)
