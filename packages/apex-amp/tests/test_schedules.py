"""Random sequences of steps, overflows, rates of schedulers and resumption, against plain Python.

Rates and scales are powers of two and compared exactly; weights are sums in float32, the model's in
float64. ``APEX_EXAMPLES`` sets the number of sequences, for long runs.
"""

import copy
import os

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
from torch import nn
from torch.optim import lr_scheduler

from apex import amp
from apex.amp import _amp_state

MOMENTUM, WINDOW, FIRST_SCALE = 0.5, 3, 64.0
# Name -> torch's schedule, and its rate after so many steps of it.
SCHEDULES = {
    "step": (
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        lambda steps: 0.5 ** (steps // 2),
    ),
    "milestones": (
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 4], gamma=0.25),
        lambda steps: 0.25 ** ((steps >= 1) + (steps >= 4)),
    ),
    "warmup": (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 2.0 ** min(n - 4, 0)),
        lambda steps: 2.0 ** min(steps - 4, 0),
    ),
}


class Scheduled(RuleBasedStateMachine):
    """A script that steps its scheduler in each iteration, also where amp skips the optimizer."""

    @initialize(
        level=st.sampled_from(["O1", "O2", "O4", "O5"]),
        schedule=st.sampled_from(sorted(SCHEDULES)),
        hysteresis=st.integers(1, 2),
        low=st.sampled_from([None, 16.0]),
        before=st.booleans(),
    )
    def begin(self, level, schedule, hysteresis, low, before):
        make, self.rate_after = SCHEDULES[schedule]
        self.low, self.hysteresis = low or 0.0, hysteresis
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
        scheduler = make(optimizer) if before else None
        self.model, self.optimizer = amp.initialize(
            *(model, optimizer),
            opt_level=level,
            loss_scale="dynamic",
            min_loss_scale=low,
            max_loss_scale=FIRST_SCALE,
            hysteresis=hysteresis,
            verbosity=0,
        )
        _amp_state.loss_scalers[0]._scale_seq_len = WINDOW
        self.scheduler = scheduler or make(self.optimizer)
        self.plain = {"value": 1.0, "momentum": None, "steps": 0, "scale": FIRST_SCALE}
        self.plain |= {"unskipped": 0, "left": hysteresis}
        self.saved = None

    @rule(
        gradients=st.lists(st.integers(-3, 3), min_size=1, max_size=3),
        overflow=st.sampled_from([None, None, None, torch.inf, torch.nan]),
        schedules=st.sampled_from([True, True, False]),
    )
    def iteration(self, gradients, overflow, schedules):
        """Several backward passes, one step: the last pass may overflow."""
        plain = self.plain
        is_skipped = False
        for index, gradient in enumerate(gradients):
            is_last = index == len(gradients) - 1
            factor = overflow if overflow is not None and is_last else float(gradient)
            loss = self.model(torch.ones(1, 1)).float().sum() * factor
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            is_skipped = overflow is not None and is_last
            self.update(is_skipped)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not is_skipped:
            old = 0.0 if plain["momentum"] is None else MOMENTUM * plain["momentum"]
            plain["momentum"] = old + float(sum(gradients))
            plain["value"] -= self.rate_after(plain["steps"]) * plain["momentum"]
        if schedules:
            self.scheduler.step()
            plain["steps"] += 1

    def update(self, overflow):
        """The plain scaler: back off after enough overflows, grow after a window without."""
        plain = self.plain
        if overflow:
            plain["left"], plain["unskipped"] = max(plain["left"] - 1, 0), 0
            if plain["left"] == 0:
                plain["scale"] = max(plain["scale"] / 2, self.low)
            return
        plain["left"], plain["unskipped"] = self.hysteresis, plain["unskipped"] + 1
        if plain["unskipped"] == WINDOW:
            plain["scale"], plain["unskipped"] = min(plain["scale"] * 2, FIRST_SCALE), 0

    @rule()
    def save(self):
        parts = self.model, self.optimizer, self.scheduler, amp
        self.saved = copy.deepcopy(([part.state_dict() for part in parts], self.plain))

    @rule()
    def load(self):
        if self.saved is not None:
            states, self.plain = copy.deepcopy(self.saved)
            for part, state in zip(
                (self.model, self.optimizer, self.scheduler, amp), states, strict=True
            ):
                part.load_state_dict(state)

    @invariant()
    def agrees(self):
        if not hasattr(self, "plain"):
            return
        plain, (group,) = self.plain, self.optimizer.param_groups
        (weight,) = group["params"]
        state = amp.state_dict()["loss_scaler0"]
        assert group["lr"] == self.rate_after(plain["steps"])
        assert state["loss_scale"] == plain["scale"]
        assert state["unskipped"] == plain["unskipped"]
        assert weight.item() == pytest.approx(plain["value"], rel=1e-5, abs=1e-5)
        momentum = self.optimizer.state.get(weight, {}).get("momentum_buffer")
        assert (momentum is None) == (plain["momentum"] is None)
        if momentum is not None:
            assert momentum.item() == pytest.approx(plain["momentum"], rel=1e-5, abs=1e-5)


def test_random_sequences_agree_with_the_model():
    examples = int(os.environ.get("APEX_EXAMPLES", "0"))
    run_state_machine_as_test(
        Scheduled,
        settings=settings(
            max_examples=examples or 60,
            stateful_step_count=20,
            derandomize=not examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
