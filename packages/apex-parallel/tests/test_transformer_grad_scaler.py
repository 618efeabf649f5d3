"""GradScaler: all ranks of a model skip a step together, and only they.

``APEX_EXAMPLES`` sets the number of random schedules, for long runs.
"""

import copy
import os
import pickle
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from apex.transformer import parallel_state
from apex.transformer.amp import GradScaler
from apex.transformer.pipeline_parallel import get_forward_backward_func, utils
from apex_testkit.model_parallel import model_parallel


class Custom(torch.optim.SGD):
    """Unscales its gradients itself."""

    _custom_amp_unscale_grads = True

    def unscale_grads(self, inv_scale, found_inf, allow_fp16):
        assert not allow_fp16
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(inv_scale)
                    found_inf.copy_((~p.grad.isfinite()).any())
        return {found_inf.device: found_inf}


class TakesScaler(Custom):
    """Decides itself whether to step, as DistributedFusedAdam does."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        found = grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"]
        if not found:  # nobody has called unscale_
            inv_scale = 1 / grad_scaler.get_scale()
            found |= self.unscale_grads(torch.tensor(inv_scale), torch.zeros(()), False)
        if not any(found.values()):
            super().step()


OPTIMIZERS = {
    "plain": lambda params: torch.optim.SGD(params, lr=1.0),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),  # is given the scale
    "custom": lambda params: Custom(params, lr=1.0),
    "takes the scaler": lambda params: TakesScaler(params, lr=1.0),
}


def step(scaler, optimizer, param, gradient, unscales=False):
    optimizer.zero_grad()
    scaler.scale((param * gradient).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
        torch.testing.assert_close(param.grad, gradient * torch.ones(3))
    scaler.step(optimizer)
    scaler.update()


def check_skips(rank, world, tensor, pipeline):
    """Rank 1 overflows in the second step: its model's ranks skip it, the others do not."""
    with model_parallel(tensor, pipeline):
        has_rank_1 = 1 in parallel_state._state.ranks["model_parallel"]
        for name, make in OPTIMIZERS.items():
            for unscales in (False, True):
                param = torch.nn.Parameter(torch.ones(3))
                optimizer, scaler = make([param]), GradScaler(2.0**8, growth_interval=100)
                step(scaler, optimizer, param, 1.0, unscales)
                bad = torch.inf if rank == 1 else 1.0
                step(scaler, optimizer, param, bad, unscales and rank != 1)
                expected = 0.0 if has_rank_1 else -1.0
                assert param.tolist() == [expected] * 3, name
                assert scaler.get_scale() == (2.0**7 if has_rank_1 else 2.0**8), name


def check_no_gradients(rank, world):
    """A rank whose optimizer has no gradients goes along with the others."""
    with model_parallel(1, world):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer, scaler = OPTIMIZERS["plain"]([param]), GradScaler(4.0)
        scaler.scale(torch.ones(1))
        if rank == 0:
            param.grad = torch.full((3,), torch.nan)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert param.tolist() == [1.0] * 3


class Stage(torch.nn.Linear):
    """A stage of a pipeline that multiplies by 1."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        torch.nn.init.ones_(self.weight)

    def set_input_tensor(self, tensors):
        (self.input,) = tensors

    def forward(self, x):
        return super().forward(x if self.input is None else self.input)


def check_pipeline(rank, world, chunks):
    """Stages without a loss never scale one, and step all the same; they skip with the others."""
    scalers = [GradScaler(2.0**8), torch.amp.GradScaler("cpu", 2.0**8)]
    for scaler in scalers:
        with model_parallel(1, world):
            if chunks > 1:
                parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
            utils._reconfigure_microbatch_calculator(1, None, world, 1, 1)
            stages = [Stage() for _ in range(chunks)]
            optimizer = torch.optim.SGD([stage.weight for stage in stages], lr=0.125)
            run = get_forward_backward_func(chunks if chunks > 1 else None, world)
            for number in range(2 if scaler is scalers[0] else 1):

                def step(batch, model, number=number):
                    output = model(batch)
                    if rank == 0 and number == 1:  # overflows in its own gradient alone
                        model.weight.register_hook(lambda grad: grad * torch.inf)
                    return output, lambda output: (output.sum(), None)

                optimizer.zero_grad()
                batch, shape = torch.ones(world, 1, 1), (1, 1, 1)
                options = {"tensor_shape": shape, "grad_scaler": scaler}
                run(step, batch, stages, forward_only=True, **options)
                run(step, batch, stages, forward_only=False, **options)
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert [stage.weight.item() for stage in stages] == [0.875] * chunks
            assert scaler.get_scale() == (2.0**7 if scaler is scalers[0] else 2.0**8)
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


def test_pipeline(two_ranks, four_ranks):
    four_ranks(check_pipeline, chunks=1)
    two_ranks(check_pipeline, chunks=2)


def test_ranks_skip_together(two_ranks, four_ranks):
    four_ranks(check_skips, tensor=2, pipeline=1)
    four_ranks(check_skips, tensor=2, pipeline=2)
    four_ranks(check_skips, tensor=1, pipeline=2)
    two_ranks(check_no_gradients)


def test_alone_without_model_parallelism():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = OPTIMIZERS["plain"]([param]), GradScaler(4.0, growth_interval=1)
    step(scaler, optimizer, param, 1.0)
    assert (param.tolist(), scaler.get_scale()) == ([0.0] * 3, 8.0)
    step(scaler, optimizer, param, torch.inf)
    assert (param.tolist(), scaler.get_scale()) == ([0.0] * 3, 4.0)
    scaler.update(3.0)
    assert scaler.get_scale() == 3.0
    scaler.update(torch.tensor([5.0]))
    assert scaler.get_scale() == 5.0
    state = scaler.state_dict()
    other = GradScaler(device="cpu")
    other.load_state_dict(state)
    assert other.state_dict() == state
    off = GradScaler(enabled=False)
    assert off.scale(param) is param
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


@dataclass
class Plain:
    """What a scaler knows, in plain Python."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int = 0

    def update(self, found):
        if found:
            self.scale *= self.backoff_factor
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self.scale *= self.growth_factor
            self._growth_tracker = 0


class Schedule:
    """What a script does with a scaler, beside the plain one; all ranks are given the same seeds.

    Gradients are small integers and the other numbers powers of two, so that all sums are exact.
    """

    rank, world = 0, 1

    def start(self, seed):
        rng = random.Random(seed)
        self.scaler, self.plain = self.new_scaler(rng)
        self.params, self.values, self.optimizers = [], [], []
        for name in rng.sample(sorted(OPTIMIZERS), rng.randrange(1, 4)):
            self.params.append(torch.nn.Parameter(torch.zeros(3)))
            self.values.append(torch.zeros(3))
            self.optimizers.append(OPTIMIZERS[name](self.params[-1:]))
        self.is_started, self.saved = False, None

    def new_scaler(self, rng):
        numbers = {
            "growth_factor": rng.choice((2.0, 4.0)),
            "backoff_factor": rng.choice((0.5, 0.25)),
            "growth_interval": rng.randrange(1, 4),
        }
        scale = 2.0 ** rng.randrange(-2, 17)
        return GradScaler(scale, device="cpu", **numbers), Plain(scale, **numbers)

    def agrees(self):
        assert self.scaler.state_dict() == vars(self.plain)
        assert self.scaler.get_scale() == self.plain.scale
        for param, value in zip(self.params, self.values, strict=True):
            assert torch.equal(param, value)

    def iteration(self, seed):
        """Gradients for some optimizers, of which some steps overflow; then an update."""
        rng = random.Random(seed)
        founds = [self.one_optimizer(rng, index) for index in range(len(self.optimizers))]
        checked = [found for found in founds if found is not None]
        if not checked:
            with pytest.raises(AssertionError, match="No inf checks"):
                self.scaler.update()
            return
        self.scaler.update()
        self.plain.update(any(checked))

    def one_optimizer(self, rng, index):
        """Whether it overflowed; None if it was not asked."""
        param, optimizer = self.params[index], self.optimizers[index]
        optimizer.zero_grad()
        total = self.backward(rng, param)
        unscales, steps = rng.choice(((False, True), (True, True), (True, False), (False, False)))
        found = self.overflow(rng, param) if unscales or steps else None
        if unscales:
            self.scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match="already been called"):
                self.scaler.unscale_(optimizer)
            if not found and total is not None:
                assert torch.equal(param.grad, total)
        if steps:
            self.scaler.step(optimizer)
            for again in (self.scaler.step, self.scaler.unscale_):
                with pytest.raises(RuntimeError, match=r"already been called|after step\(\)"):
                    again(optimizer)
            if not found and total is not None:
                self.values[index] -= total  # the learning rate is 1
        return found

    def backward(self, rng, param):
        """The sum of one or two passes; None on a rank that has no gradients."""
        without = rng.choice((None, None, None, *range(self.world))) if self.world > 1 else None
        passes = [[rng.randrange(-3, 4) for _ in range(3)] for _ in range(rng.randrange(1, 3))]
        self.is_started = True
        if without == self.rank:
            self.scaler.scale(torch.ones(()))
            return None
        for weights in passes:
            self.scaler.scale((param * torch.tensor(weights)).sum()).backward()
        return torch.tensor(passes).sum(0).float()

    def overflow(self, rng, param):
        """Whether a rank has an inf or NaN now."""
        bad, value = rng.choice((None, None, *range(self.world))), rng.choice((INF, -INF, NAN))
        place = rng.randrange(3)
        if bad == self.rank:
            if param.grad is None:
                param.grad = torch.zeros(3)
            param.grad[place] = value
        return bad is not None

    def new_scale(self, seed):
        rng = random.Random(seed)
        scale = 2.0 ** rng.randrange(-2, 17)
        given = rng.choice((scale, torch.tensor(scale), torch.tensor([scale])))
        if not self.is_started:
            with pytest.raises(AssertionError, match="_scale is None"):
                self.scaler.update(given)
            return
        self.scaler.update(given)
        self.plain.scale = scale
        if isinstance(given, torch.Tensor):
            given.zero_()  # it was copied

    def set_numbers(self, seed):
        rng = random.Random(seed)
        other = self.new_scaler(rng)[1]
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if rng.random() < 0.5:
                getattr(self.scaler, f"set_{name}")(getattr(other, name))
                setattr(self.plain, name, getattr(other, name))
            assert getattr(self.scaler, f"get_{name}")() == getattr(self.plain, name)

    def save(self, seed):
        self.saved = copy.deepcopy((self.scaler.state_dict(), self.plain))

    def load(self, seed):
        """Into the scaler, or into one of a new process, which has not scaled yet."""
        rng = random.Random(seed)
        if rng.random() < 0.5:
            self.scaler, self.plain = self.new_scaler(rng)
            self.is_started = False
        if self.saved is not None:
            state, self.plain = copy.deepcopy(self.saved)
            self.scaler.load_state_dict(state)

    def copy_by_pickle(self, seed):
        self.scaler = pickle.loads(pickle.dumps(self.scaler))
        self.is_started = False  # the copy makes its tensors when it scales


INF, NAN = float("inf"), float("nan")
SEED = st.integers(0, 9999)
CALLS = ("iteration", "iteration", "iteration", "new_scale", "set_numbers", "save", "load")
CALLS += ("copy_by_pickle",)


class Machine(Schedule, RuleBasedStateMachine):
    start = initialize(seed=SEED)(Schedule.start)
    iteration = rule(seed=SEED)(Schedule.iteration)
    new_scale = rule(seed=SEED)(Schedule.new_scale)
    set_numbers = rule(seed=SEED)(Schedule.set_numbers)
    save = rule(seed=SEED)(Schedule.save)
    load = rule(seed=SEED)(Schedule.load)
    copy_by_pickle = rule(seed=SEED)(Schedule.copy_by_pickle)
    agrees = invariant()(Schedule.agrees)


EXAMPLES = int(os.environ.get("APEX_EXAMPLES", "0"))
OPTIONS = {"derandomize": not EXAMPLES, "deadline": None, "database": None}


@pytest.mark.parametrize("has_ranks", [False, True], ids=["no ranks", "one rank"])
def test_random_schedules_agree_with_plain_python(has_ranks, request):
    if has_ranks:
        request.getfixturevalue("alone")
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES or 20,
            stateful_step_count=15,
            suppress_health_check=list(HealthCheck),
            **OPTIONS,
        ),
    )


def check_schedules(rank, world, tensor, pipeline, schedules):
    """An overflow of one rank is one of all: the schedule of each agrees with the same numbers."""
    with model_parallel(tensor, pipeline):
        for number in range(schedules):
            schedule, rng = Schedule(), random.Random(number)
            schedule.rank, schedule.world = rank, world
            schedule.start(number)
            for _ in range(20):
                getattr(schedule, rng.choice(CALLS))(rng.randrange(10_000))
                schedule.agrees()


def test_random_schedules_on_ranks(two_ranks, four_ranks):
    two_ranks(check_schedules, tensor=2, pipeline=1, schedules=EXAMPLES or 20)
    four_ranks(check_schedules, tensor=2, pipeline=2, schedules=EXAMPLES or 10)
