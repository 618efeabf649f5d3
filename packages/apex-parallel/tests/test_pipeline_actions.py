"""Schedules of pipelines, checked without processes: no deadlock, no message astray, little memory.

A simulation carries out the actions of all ranks. Its sends are the strictest there are: they end
when the receive has begun. torch's own tables of the same schedules are the second opinion.
"""

import itertools
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from apex.transformer.pipeline_parallel.schedules.actions import Action, Kind, actions

DURATION = {Kind.FORWARD: 1, Kind.BACKWARD: 2}


def sizes(pps=range(1, 9), chunks=range(1, 5), microbatches=range(1, 33)):
    for pp, c, m in itertools.product(pps, chunks, microbatches):
        if c == 1 or (pp > 1 and m % pp == 0):
            yield pp, c, m


def plans_of(pp, chunks, microbatches, forward_only=False):
    return [list(actions(r, pp, chunks, microbatches, forward_only)) for r in range(pp)]


def part(action, rank, pp):
    return action.chunk * pp + rank


def crosses(send, sender, recv, receiver, pp):
    """Whether a receive is the one that a send is meant for."""
    step = 1 if send.what is Kind.FORWARD else -1
    is_same = (send.what, send.microbatch) == (recv.what, recv.microbatch)
    return is_same and part(send, sender, pp) + step == part(recv, receiver, pp)


def batches_of(plan, is_batched):
    """Transfers that begin together: all between two computations, or each alone."""
    if not is_batched:
        return [[action] for action in plan]
    groups = itertools.groupby(plan, lambda a: a.peer is not None)
    return [b for t, g in groups for b in ([list(g)] if t else [[action] for action in g])]


def simulate(plans, pp, is_batched):
    """Carry out all plans; returns when the last rank ends. AssertionError: they cannot be."""
    ahead = [deque(batches_of(plan, is_batched)) for plan in plans]
    waiting = [None] * pp  # how many of a rank's transfers have not met their other side
    clock = [0] * pp
    lines = defaultdict(deque)  # (sender, receiver) -> transfers of one side, in order
    met = defaultdict(list)  # rank -> times at which its transfers met
    moved = True
    while moved:
        moved = False
        for rank in range(pp):
            while ahead[rank]:
                batch = ahead[rank][0]
                if batch[0].peer is None:
                    clock[rank] += DURATION[batch[0].kind]
                elif waiting[rank] is None:
                    waiting[rank], moved = len(batch), True
                    for action in batch:
                        meet(action, rank, clock, lines, waiting, met, pp)
                if batch[0].peer is not None:
                    if waiting[rank]:
                        break
                    clock[rank] = max(clock[rank], *met.pop(rank))
                    waiting[rank] = None
                ahead[rank].popleft()
                moved = True
    stuck = {rank: batches[0] for rank, batches in enumerate(ahead) if batches}
    assert not stuck, f"ranks wait for each other: {stuck}"
    assert not any(lines.values())
    return max(clock)


def meet(action, rank, clock, lines, waiting, met, pp):
    is_send = action.kind is Kind.SEND
    line = lines[(rank, action.peer) if is_send else (action.peer, rank)]
    if not line or (line[0][0].kind is Kind.SEND) == is_send:
        line.append((action, rank, clock[rank]))
        return
    other, other_rank, since = line.popleft()
    mine, theirs = (action, rank), (other, other_rank)
    assert crosses(*(mine + theirs if is_send else theirs + mine), pp), (action, other)
    for either in (rank, other_rank):
        waiting[either] -= 1
        met[either].append(max(since, clock[rank]))


def check_order(plan, rank, pp, chunks, microbatches, forward_only):
    """Each computation once, its input there, forward before backward, outputs sent afterwards."""
    done, there, sent = set(), set(), set()
    kinds = [Kind.FORWARD] if forward_only else [Kind.FORWARD, Kind.BACKWARD]
    for action in plan:
        what = action.what, action.microbatch, action.chunk
        if action.kind is Kind.RECV:
            there.add(what)
        elif action.kind is Kind.SEND:
            assert what in done
            assert what not in sent
            sent.add(what)
        else:
            ends = {Kind.FORWARD: 0, Kind.BACKWARD: pp * chunks - 1}
            assert part(action, rank, pp) == ends[action.what] or what in there
            assert action.what is Kind.FORWARD or (Kind.FORWARD, *what[1:]) in done
            assert what not in done
            done.add(what)
    assert done == set(itertools.product(kinds, range(microbatches), range(chunks)))


def most_kept(plan):
    kept = most = 0
    for action in plan:
        kept += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
        most = max(most, kept)
    return most


@pytest.mark.parametrize("pp", range(1, 9))
def test_every_schedule(pp):
    for _, chunks, microbatches in sizes([pp]):
        plans = plans_of(pp, chunks, microbatches)
        for rank, plan in enumerate(plans):
            check_order(plan, rank, pp, chunks, microbatches, False)
            bound = pp - rank if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp + 1
            assert most_kept(plan) <= min(bound, chunks * microbatches)
        simulate(plans, pp, is_batched=False)
        time = simulate(plans, pp, is_batched=True)
        if microbatches >= pp:  # the first rank's last backward ends then at the earliest
            shortest = 3 * (chunks * microbatches + pp - 1)
            assert shortest <= time <= shortest + (2 if chunks > 1 else 0)  # 2: five stages


def test_forward_only():
    for pp, chunks, microbatches in sizes(microbatches=[1, 2, 3, 4, 6, 8, 20, 32]):
        plans = plans_of(pp, chunks, microbatches, True)
        for rank, plan in enumerate(plans):
            check_order(plan, rank, pp, chunks, microbatches, True)
        simulate(plans, pp, is_batched=False)


def swapped(plan, kind):
    """The first two actions of a kind change places."""
    i, j = [i for i, action in enumerate(plan) if action.kind is kind][:2]
    plan[i], plan[j] = plan[j], plan[i]


def blocking(plan):
    """A receive waits for the computation behind it, so that it begins after the next send."""
    i = next(i for i, a in enumerate(plan) if a.kind is Kind.RECV and a.what is Kind.BACKWARD)
    j = next(j for j in range(i, len(plan)) if plan[j].kind is Kind.SEND)
    plan.insert(j + 1, plan.pop(i))


FAULTS = {
    "sends swapped": lambda plans: swapped(plans[0], Kind.SEND),
    "receives swapped": lambda plans: swapped(plans[1], Kind.RECV),
    "a send is missing": lambda plans: plans[0].remove(
        next(a for a in plans[0] if a.kind is Kind.SEND)
    ),
    "a receive comes too late": lambda plans: blocking(plans[0]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_simulation_finds_faults(fault, chunks):
    plans = plans_of(4, chunks, 8)
    fault(plans)
    with pytest.raises(AssertionError):  # noqa: PT012  (either check may find it)
        simulate(plans, 4, is_batched=False)
        for rank, plan in enumerate(plans):
            check_order(plan, rank, 4, chunks, 8, False)


def computed(plan, rank, pp):
    return [(a.kind.value, part(a, rank, pp), a.microbatch) for a in plan if a.peer is None]


def torch_computed(table):
    names = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    rows = [(a.computation_type.name, a.stage_index, a.microbatch_index) for a in table if a]
    return [(names[name], *where) for name, *where in rows if name in names]  # no REDUCE_GRAD


def test_computations_are_those_of_torch():
    for pp, chunks, microbatches in sizes(range(2, 9), microbatches=range(1, 33)):
        if chunks == 1:
            if microbatches < pp:
                continue  # torch's table has no such schedule
            schedule = SimpleNamespace(
                _stage=SimpleNamespace(), _num_stages=pp, _n_microbatches=microbatches
            )
            tables = torch_schedules.Schedule1F1B._get_pipeline_order(schedule)
            del tables[pp - 1]  # torch 2.13 counts the last stage's micro-batches from 1
        else:
            schedule = SimpleNamespace(
                n_local_stages=chunks,
                pp_group_size=pp,
                microbatches_per_round=pp,
                _n_microbatches=microbatches,
            )
            one = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
            tables = {rank: one(schedule, rank) for rank in range(pp)}
        plans = plans_of(pp, chunks, microbatches)
        for rank, table in tables.items():
            assert computed(plans[rank], rank, pp) == torch_computed(table), (pp, chunks, rank)


def test_refused():
    for arguments in [(0, 1, 2, 4), (0, 4, 2, 6), (4, 4, 1, 4), (0, 4, 1, 0)]:
        with pytest.raises(RuntimeError, match=r"micro-?batches"):
            list(actions(*arguments))
    assert Action(*next(actions(0, 1, 1, 1))).kind is Kind.FORWARD
