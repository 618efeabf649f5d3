"""Random sequences of what users do with DistributedFusedLAMB, against a plain float64 model.

Hypothesis draws a sequence in this process; one or two ranks make the calls and compare parameters,
masters and moments after each step. Gradients are small integers, so their sums are exact.
``APEX_EXAMPLES`` sets the number of sequences.
"""

import os

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from apex_testkit.sharded_lamb import FAMILIES, NATIVE, check_sequence

EXAMPLES = int(os.environ.get("APEX_EXAMPLES", "0"))
# Not shrunk on two ranks, which begin anew after each failure: that takes minutes.
PHASES = {"one_rank": [Phase.generate, Phase.shrink], "two_ranks": [Phase.generate]}
INDEX, SEED = st.integers(0, 11), st.integers(0, 999)
MASKS = st.lists(st.integers(0, 63), min_size=2, max_size=2)


def call(name, **arguments):
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


ITERATE = call("iterate", seed=SEED, masks=MASKS, passes=st.integers(1, 3))
STEP = call("step", closed=st.booleans())
ZERO = call("zero", to_none=st.booleans())
SUCCEED = call("succeed", is_kept=st.booleans(), is_moved=st.booleans())
ASK = call("ask_former", call=st.sampled_from(["step", "zero", "load", "reduce", "gather"]))
TRAINING = [
    st.tuples(ITERATE, STEP).map(list),
    st.tuples(ITERATE, STEP, ZERO).map(list),
    st.tuples(ITERATE, call("measure"), STEP).map(list),
    st.tuples(ITERATE, SUCCEED, ASK, STEP).map(list),
]
ONE = [
    ITERATE,
    STEP,
    ZERO,
    call("measure"),
    call("scaled", seed=SEED, masks=MASKS, infinite=st.integers(0, 9), by_scaler=st.booleans()),
    call(
        "numbers",
        group=INDEX,
        lr=st.sampled_from([0.0, 0.1]),
        decay=st.sampled_from([0.0, 0.2]),
        limit=st.sampled_from([0.0, 1.0, 1e6]),
    ),
    call("save"),
    call("load"),
    # What is seldom is one of these.
    st.one_of(
        call("freeze", index=INDEX),
        call("give_lr", lr=st.sampled_from([0.01, 0.1])),
        call("fail_in_backward", seed=SEED, masks=MASKS, at=INDEX),
        call("fail_again", seed=SEED, masks=MASKS),
    ),
    call("fail"),
    call("replace", names=st.sampled_from([(), NATIVE[:1], NATIVE[1:], NATIVE])),
    st.one_of(call("leave_out"), SUCCEED, ASK),
]
CALLS = st.lists(
    st.one_of(*TRAINING, *(one.map(lambda c: [c]) for one in ONE)), min_size=4, max_size=14
).map(lambda parts: [each for part in parts for each in part])
SPECS = st.fixed_dictionaries(
    {
        "family": st.sampled_from(list(FAMILIES)),
        "params": st.lists(st.tuples(INDEX, st.integers(0, 6)), min_size=1, max_size=5),
        "left_alone": st.none() | INDEX,
        "split": INDEX,
        "option": INDEX,
    }
)


@pytest.fixture
def one_rank():
    """Runs a check in this process, which is a world of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda check, **arguments: check(0, 1, **arguments)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_sequences_agree_with_the_model(ranks, request):
    run = request.getfixturevalue(ranks)

    @settings(
        max_examples=EXAMPLES or 60,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=PHASES[ranks],
    )
    @given(spec=SPECS, calls=CALLS)
    def check(spec, calls):
        run(check_sequence, spec=spec, calls=calls)

    check()
