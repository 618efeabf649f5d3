"""Random sequences of what users do with DistributedDataParallel, against a plain model of it.

Hypothesis draws a sequence in this process; two ranks execute it and compare all gradients with
the model after each operation. All numbers are small integers and halves, so all sums are exact in
every dtype: what differs is wrong. ``APEX_EXAMPLES`` sets the number of sequences.
"""

import os

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from apex_testkit.ddp_sequence import SHAPES, check_sequence, inputs

RANKS = range(2)
LIMIT = 16.0  # eighths below 32 have an exact bfloat16; gradients are zeroed before they need more


class Plain:
    """The gradients that one wrapper must have on both ranks, in float64, and what it may do."""

    def __init__(self, spec):
        self.shapes, self.disabled = [SHAPES[s] for _, s in spec["params"]], False
        options = spec["options"]
        self.factor = 0.5  # two ranks
        if not options["gradient_average"]:
            self.factor = 1.0 / options["gradient_predivide_factor"]
        self.frozen, self.graphs = set(), {}
        self.forget()

    def forget(self):
        """As a new wrapper is."""
        self.grads = [[None] * len(self.shapes) for _ in RANKS]
        self.news = [set() for _ in RANKS]
        self.active, self.prepared, self.broken, self.graphs = set(), False, False, {}
        self.local = False  # the last forward ran in no_sync()
        self.fresh = True  # ranks have not agreed on anything

    def forward(self, number, terms, local=False):
        self.active = {p for p in range(len(self.shapes)) if p not in self.frozen}
        self.prepared, self.broken, self.local = not local, False, local
        self.graphs[number] = [[p for p in used if p in self.active] for used in terms]

    @property
    def reduces(self):
        return not (self.disabled or self.local)

    def reached(self, numbers):
        """By rank, the parameters whose gradient a backward through these graphs adds to."""
        found = [{p for n in numbers for p in self.graphs[n][r]} for r in RANKS]
        return [used - self.frozen for used in found]

    def refusal(self, numbers):
        """The text of the error that backward must raise, or None."""
        if not self.reduces:
            return None
        if not self.prepared:
            return "backward without a forward"
        late = any(used - self.active for used in self.reached(numbers))
        return "was frozen" if late else None

    def add(self, number, rank, index):
        new = inputs(number, rank, index, self.shapes[index]).sum(0)
        old = self.grads[rank][index]
        self.grads[rank][index] = new if old is None else old + new
        self.news[rank].add(index)

    def backward(self, numbers, retain):
        for number in numbers:
            for rank, used in enumerate(self.graphs[number]):
                for index in set(used) - self.frozen:
                    self.add(number, rank, index)
            if not retain:
                del self.graphs[number]

    def reduce(self):
        for index in self.active:
            mine = [self.grads[r][index] for r in RANKS]
            if any(index in self.news[r] and mine[r] is not None for r in RANKS):
                zero = torch.zeros(self.shapes[index], dtype=torch.float64)
                result = sum(zero if g is None else g for g in mine) * self.factor
                for rank in RANKS:
                    self.grads[rank][index] = result.clone()
        self.news, self.prepared = [set() for _ in RANKS], False

    def zero(self, rank, to_none):
        for index, grad in enumerate(self.grads[rank]):
            self.grads[rank][index] = None if to_none or grad is None else grad * 0

    def is_hardly_exact(self):
        """Whether the next average may need more bits than a bfloat16 has."""
        grads = [g for mine in self.grads for g in mine if g is not None and g.numel()]
        return any(g.abs().max() > LIMIT or (4 * g % 1).any() for g in grads)


indices = st.integers(0, 4)
OPTIONS = st.one_of(
    st.fixed_dictionaries({"message_size": st.sampled_from([1, 4, 10, 10_000_000])}),
    st.just({"delay_allreduce": True}),
    st.fixed_dictionaries({"triggers": st.lists(st.integers(0, 1), unique=True)}),
    st.fixed_dictionaries(
        {"message_size": st.sampled_from([1, 4]), "num_allreduce_streams": st.integers(2, 3)}
    ),
)
FACTORS = [(True, 1.0), (True, 0.5), (True, 4.0), (False, 1.0), (False, 2.0)]
MORE = st.builds(
    lambda factors, retains, wide: {
        "gradient_average": factors[0],
        "gradient_predivide_factor": factors[1],
        "retain_allreduce_buffers": retains,
        "allreduce_always_fp32": wide,
    },
    st.sampled_from(FACTORS),
    st.booleans(),
    st.booleans(),
)
SPECS = st.fixed_dictionaries(
    {
        "params": st.lists(st.tuples(st.integers(0, 3), indices), min_size=2, max_size=5),
        "options": st.builds(dict.__or__, OPTIONS, MORE),
    }
)


class Sequences(RuleBasedStateMachine):
    ranks = None

    @initialize(specs=st.lists(SPECS, min_size=1, max_size=2))
    def start(self, specs):
        self.specs, self.plain = specs, [Plain(spec) for spec in specs]
        self.operations, self.number = [], 0

    def wrapper(self, where):
        where %= len(self.plain)
        return where, self.plain[where]

    def note(self, operation, where=0, **arguments):
        """Add what has been done to the model to the operations of the ranks."""
        lists = lambda g: None if g is None else g.tolist()
        expected = [[[lists(g) for g in mine] for mine in plain.grads] for plain in self.plain]
        self.operations.append((operation, where, arguments, expected))
        for other, plain in enumerate(self.plain):
            if operation != "zero" and plain.is_hardly_exact():
                self.zero(other, [0, 1], to_none=False)

    def used(self, data, plain):
        terms = st.lists(st.integers(0, len(plain.shapes) - 1), min_size=1, unique=True)
        return data.draw(terms.filter(lambda used: set(used) - plain.frozen), label="used")

    def run_forward(self, where, data, same, local=False):
        plain = self.plain[where]
        first = self.used(data, plain)
        terms = [first, first if same else self.used(data, plain)]
        self.number += 1
        plain.forward(self.number, terms, local)
        self.note("forward", where, number=self.number, terms=terms, local=local)

    def run_step(self, where, data, same, retain=False, local=False):
        self.run_forward(where, data, same, local)
        numbers = [[self.number] if i == where else [] for i in range(len(self.plain))]
        self.go_back(numbers, retain)

    def switch(self, where, disabled):
        if self.plain[where].disabled != disabled:
            self.plain[where].disabled = disabled
            self.note("disable", where, disabled=disabled)

    @rule(where=indices, data=st.data(), same=st.booleans(), local=st.sampled_from([0, 0, 1]))
    def forward(self, where, data, same, local):
        self.run_forward(self.wrapper(where)[0], data, same, bool(local))

    @rule(where=indices, data=st.data(), same=st.booleans(), retain=st.booleans())
    def step(self, where, data, same, retain):
        where, _ = self.wrapper(where)
        self.switch(where, False)
        self.run_step(where, data, same, retain)

    @rule(
        where=indices,
        data=st.data(),
        zeros=st.sampled_from([None, None, True, False]),
        local=st.booleans(),
    )
    def accumulate(self, where, data, zeros, local):
        """As loops that reduce every other step, some of which discard what they have."""
        where, _ = self.wrapper(where)
        self.switch(where, not local)
        self.run_step(where, data, same=False, local=local)
        if zeros is not None:
            self.discard(where, data.draw(st.sampled_from([[0, 1], [0]])), zeros)
        self.switch(where, False)
        self.run_step(where, data, same=False)

    def go_back(self, numbers, retain):
        pairs = [(p, mine) for p, mine in zip(self.plain, numbers, strict=True) if mine]
        for plain, mine in pairs:
            if not all(plain.reached(mine)) or (plain.broken and plain.reduces):
                return  # each backward reaches a parameter; after a failed one comes a forward
        refusals = [plain.refusal(mine) for plain, mine in pairs]
        message = next(filter(None, refusals), None)
        if message and len(pairs) > 1:
            return
        for plain, mine in pairs:
            plain.fresh &= not plain.reduces
            if message == "was frozen" and any(g[0] != g[1] for g in map(plain.graphs.get, mine)):
                return  # ranks would have launched different buckets before the error
            plain.backward(mine, retain)
            if message:
                plain.broken = plain.prepared
                plain.graphs.clear()
                for rank in RANKS:
                    plain.zero(rank, True)  # how much had been added, is nobody's promise
            elif plain.reduces:
                plain.reduce()
        if not message:
            self.note("backward", numbers=numbers, retain=retain)
            return
        (where,) = [i for i, mine in enumerate(numbers) if mine]
        self.note("refused", where, numbers=numbers[where], message=message)

    @precondition(lambda self: any(plain.graphs for plain in self.plain))
    @rule(data=st.data(), retain=st.booleans())
    def backward(self, data, retain):
        graphs = [(i, n) for i, plain in enumerate(self.plain) for n in plain.graphs]
        chosen = data.draw(st.lists(st.sampled_from(graphs), min_size=1, unique=True))
        self.go_back([[n for i, n in chosen if i == w] for w in range(len(self.plain))], retain)

    @rule(where=indices, data=st.data())
    def fail(self, where, data):
        """In forward, or in backward between two parameters, on both ranks alike."""
        where, plain = self.wrapper(where)
        used = self.used(data, plain)
        at = data.draw(st.none() | st.integers(0, len(used)), label="fails at")
        self.number += 1
        plain.forward(self.number, [used, used])
        del plain.graphs[self.number]
        if at is not None:
            plain.broken, plain.fresh = not plain.disabled, plain.fresh and plain.disabled
            for rank in RANKS:
                for index in set(used[at:]) - plain.frozen:
                    plain.add(self.number, rank, index)
                if plain.broken:
                    plain.zero(rank, True)  # what had been reduced by then, is nobody's promise
        self.note("fail", where, number=self.number, used=used, at=at)

    @precondition(lambda self: any(plain.fresh for plain in self.plain))
    @rule(data=st.data())
    def differ(self, data):
        fresh = [where for where, plain in enumerate(self.plain) if plain.fresh]
        where = data.draw(st.sampled_from(fresh))
        self.switch(where, False)
        plain = self.plain[where]
        used = sorted(set(range(len(plain.shapes))) - plain.frozen)
        if len(used) < 2:
            return
        self.number += 1
        plain.forward(self.number, [used, used])
        del plain.graphs[self.number]
        plain.broken, plain.fresh = True, False
        for rank in RANKS:
            plain.zero(rank, True)
        self.note(
            "differ", where, number=self.number, used=used, index=data.draw(st.sampled_from(used))
        )

    @rule(where=indices, ranks=st.sampled_from([[0, 1], [0, 1], [0]]), to_none=st.booleans())
    def zero(self, where, ranks, to_none):
        self.discard(self.wrapper(where)[0], ranks, to_none)

    def discard(self, where, ranks, to_none):
        for rank in ranks:
            self.plain[where].zero(rank, to_none)
        self.note("zero", where, ranks=ranks, to_none=to_none)

    @rule(where=indices, index=indices)
    def freeze(self, where, index):
        """Or the opposite."""
        where, plain = self.wrapper(where)
        index %= len(plain.shapes)
        frozen = index not in plain.frozen
        if frozen and len(plain.frozen) + 1 == len(plain.shapes):
            return
        plain.frozen ^= {index}
        self.note("freeze", where, index=index, frozen=frozen)

    @rule(where=indices, data=st.data())
    def seldom(self, where, data):
        """What is not a part of training steps: one rule, so that most sequences are of those."""
        where, _ = self.wrapper(where)
        names = ("look", "evaluate", "load", "disable", "change", "cast", "copy")
        getattr(self, data.draw(st.sampled_from(names)))(where, self.plain[where], data)

    def look(self, where, plain, data):
        numbers = [n for n in plain.graphs if any(u - plain.frozen for u in plain.reached([n]))]
        if numbers:
            self.note("look", where, number=data.draw(st.sampled_from(numbers)))

    def evaluate(self, where, plain, data):
        self.note("evaluate", where)

    def load(self, where, plain, data):
        self.note("load", where)

    def disable(self, where, plain, data):
        self.switch(where, not plain.disabled)

    def change(self, where, plain, data):
        name, value = data.draw(st.sampled_from([("needs_refresh", True), ("message_size", 3)]))
        self.note("change", where, name=name, value=value)

    def copy(self, where, plain, data):
        plain.forget()
        self.note("copy", where, pickled=data.draw(st.booleans()))

    def cast(self, where, plain, data):
        index = data.draw(st.integers(0, len(plain.shapes) - 1))
        dtype = data.draw(st.integers(0, 3))
        plain.graphs = {}
        plain.prepared = False  # a forward comes before the next backward
        for rank in RANKS:
            plain.grads[rank][index] = None
        self.note("cast", where, index=index, dtype=dtype)

    def teardown(self):
        if self.operations:
            self.ranks(check_sequence, specs=self.specs, operations=self.operations)


def test_sequences(two_ranks):
    examples = int(os.environ.get("APEX_EXAMPLES", "0"))
    Sequences.ranks = two_ranks
    run_state_machine_as_test(
        Sequences,
        settings=settings(
            max_examples=examples or 300,
            stateful_step_count=30,
            derandomize=not examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
