"""Random sequences of what a training script does with amp, against a plain model of it.

Gradients are small integers and the other numbers powers of two, so all sums are exact in every
dtype: what differs is wrong. ``APEX_EXAMPLES`` sets the number of sequences, for long runs.
"""

import copy
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from apex import amp
from apex.amp import _amp_state
from apex.amp.masters.exact import add_checkpoint_hooks
from apex_testkit.amp_by_hand import ChangedByHand
from apex_testkit.amp_model import (
    SIZE,
    Layer,
    Plain,
    integers,
    plus,
)
from apex_testkit.amp_refusals import RefusedCalls
from apex_testkit.amp_watched import Watched

CASTS = {"O1": torch.float16, "O4": torch.bfloat16}
LIMIT = 64  # sums of gradients stay exact in bfloat16
PICK, SEED = st.integers(0, 9), st.integers(0, 999)


PASSES = st.fixed_dictionaries(
    {
        "zero": st.sampled_from([None, None, None, None, True, False]),
        "seed": SEED,
        "used": st.just(63) | st.integers(0, 63),
        "loss_id": st.integers(0, 1),
        "delay": st.sampled_from([False, False, True]),
        "casts": st.sampled_from(["on", "on", "disabled", "inactive"]),
        "overflow": st.sampled_from([None, None, None, None, None, "input", "loss", "gradient"]),
        "value": st.sampled_from([torch.inf, -torch.inf, torch.nan]),
    }
)


class Training(RefusedCalls, ChangedByHand, Watched):
    """What a training script does."""

    def expected_dtype(self, index, has_casts):
        if self.model[index].norm is not None:
            return torch.float32  # a product of a float32 weight
        return self.half or (CASTS.get(self.level) if has_casts else None) or torch.float32

    def largest(self):
        grads = [g for p in self.plain for g in (p.done, p.scaled) if g is not None]
        scale = max(scaler.scale for scaler in self.scalers)
        return max((g.abs().max().item() for g in grads), default=0) / (
            1 if self.pending is None else scale
        )

    def inputs(self, seed, used):
        chosen = [i for i in range(len(self.plain)) if used >> (i % 6) & 1]
        free = [i for i in range(len(self.plain)) if i not in self.frozen]
        if not set(chosen) & set(free):
            chosen.append(free[seed % len(free)])
        return {index: integers(seed + index * 31) for index in sorted(set(chosen))}

    # Iterations.

    @rule(
        passes=st.lists(PASSES, min_size=1, max_size=4),
        zero=st.sampled_from([None, True, False]),
        steps=st.booleans(),
    )
    def iteration(self, passes, zero, steps):
        for arguments in passes:
            self.one_pass(**arguments)
        if zero is not None:
            self.zero_grad(zero)
        if steps:
            self.step()

    @rule(iterations=st.lists(st.lists(PASSES, min_size=1, max_size=2), min_size=1, max_size=4))
    def epoch(self, iterations):
        """As most scripts do it."""
        for passes in iterations:
            self.iteration(passes, None, True)
            self.zero_grad(True)

    @rule(
        passes=st.lists(PASSES, min_size=1, max_size=3),
        steps=st.booleans(),
        parts=st.integers(1, 7),
    )
    def go_back(self, passes, steps, parts):
        """To the state before an iteration."""
        self.save()
        self.iteration(passes, None, steps)
        self.load(parts)

    def one_pass(self, zero, seed, used, loss_id, delay, casts, overflow, value):
        if zero is not None:
            self.zero_grad(zero)
        if self.pending is not None:
            loss_id = self.pending  # with one scale
        if self.largest() > LIMIT:
            self.zero_grad(True)
        if not self.scalers[loss_id].dynamic:
            overflow = None  # which a static scale does not look for
        inputs = self.inputs(seed, used)
        target = next(i for i in inputs if i not in self.frozen)
        given = {index: x.clone() for index, x in inputs.items()}
        if overflow == "input":
            given[target][seed % SIZE] = value
        loss = self.forward(given, casts)
        if overflow == "loss":
            loss = loss * value
        self.check_dtypes(inputs, casts)
        with amp.scale_loss(loss, self.optimizers, loss_id, delay_unscale=delay) as scaled:
            scaled.backward()
            if overflow == "gradient":
                self.weights()[target].grad[seed % SIZE] = value
        self.after_block(inputs, loss_id, delay, overflow is not None)
        self.agrees()

    def forward(self, inputs, casts):
        if casts == "disabled":
            with amp.disable_casts():
                return self.model(inputs)
        was_active = getattr(_amp_state.handle, "_is_active", None)
        if casts == "inactive":
            _amp_state.handle._is_active = False
        try:
            return self.model(inputs)
        finally:
            if was_active is not None:
                _amp_state.handle._is_active = was_active

    def check_dtypes(self, inputs, casts):
        has_casts = casts == "on" and not self.paused
        for index in inputs:
            assert self.model.dtypes[index] is self.expected_dtype(index, has_casts)

    def after_block(self, inputs, loss_id, delay, overflow):
        scaler, grads = self.scalers[loss_id], dict(inputs)
        for index in self.frozen:
            grads.pop(index, None)
        if self.is_plain:
            for index, grad in grads.items():
                self.plain[index].done = plus(self.plain[index].done, grad)
            return
        for index, grad in grads.items():
            plain = self.plain[index]
            plain.scaled = plus(plain.scaled, grad * scaler.scale)
        if delay:
            self.pending, self.pending_overflow = loss_id, self.pending_overflow or overflow
            self.dirty = self.dirty or overflow
            return
        overflow = overflow or self.pending_overflow
        for plain in self.plain:
            if plain.scaled is not None:
                plain.done = plus(plain.done, plain.scaled / scaler.scale)
        self.forget_scaled()
        scaler.update(overflow)
        self.skip, self.dirty = self.skip or overflow, self.dirty or overflow

    def forget_scaled(self):
        self.pending, self.pending_overflow = None, False
        for plain in self.plain:
            plain.scaled = None

    @rule()
    def step(self):
        if self.pending is not None or (self.dirty and not self.skip):
            self.zero_grad(True)
        for optimizer in self.optimizers:
            optimizer.step()
        for index, stepped in enumerate(self.stepped_on()):
            assert stepped.grad is None or not self.has_master(index)  # skipped or not
        for index, plain in enumerate(self.plain):
            if not self.skip:
                plain.step()
            if self.is_half(index):
                plain.done = None
                assert self.has_master(index) or index in self.frozen or self.skip
        self.skip = False

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        visible = [p.scaled if self.is_held(i) else p.done for i, p in enumerate(self.plain)]
        for index, plain in enumerate(self.plain):
            plain.done = None
            if visible[index] is not None and not set_to_none and not self.is_half(index):
                plain.done = torch.zeros(SIZE)
        self.forget_scaled()
        self.dirty = False

    # Changes between iterations.

    @rule(pick=PICK)
    def freeze_or_unfreeze(self, pick):
        index = pick % len(self.plain)
        is_frozen = index in self.frozen
        if not is_frozen and len(self.frozen) + 1 == len(self.plain):
            return  # a loss needs a gradient
        self.frozen ^= {index}
        self.weights()[index].requires_grad_(is_frozen)

    @precondition(lambda self: len(self.plain) < 6)
    @rule(seed=SEED, is_norm=st.booleans(), frozen=st.booleans(), lr=st.sampled_from([0.25, 0.5]))
    def add_param_group(self, seed, is_norm, frozen, lr):
        layer = Layer(is_norm, seed)
        self.plain.append(Plain(layer.weight.detach().clone(), lr))
        if not is_norm and self.half is not None:
            layer.to(self.half)
        layer.weight.requires_grad_(not frozen)
        if frozen:
            self.frozen.add(len(self.model))
        if self.half is not None:  # checkpoints of new modules are the script's own, else
            add_checkpoint_hooks(layer, masters=True)
        self.model.append(layer)
        owner = self.optimizer_of(len(self.model) - 1)
        owner.add_param_group({"params": [layer.weight], "lr": lr})

    @precondition(lambda self: self.level in CASTS)
    @rule()
    def pause_or_resume(self):
        self.paused = not self.paused
        _amp_state.handle._is_active = not self.paused

    # Checkpoints.

    @rule()
    def save(self):
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = self.model.state_dict(), optimizers, amp.state_dict()
        kept = [(plain.value, plain.momentum, plain.lr) for plain in self.plain]
        self.saved = copy.deepcopy((state, kept, self.scalers))
        for layer, plain in zip(self.model, self.plain, strict=True):
            for name, value in layer.state_dict().items():
                if name.endswith(("own", "weight")):
                    assert value.dtype is torch.float32
                    assert torch.equal(value, plain.value)

    @precondition(lambda self: self.saved and len(self.saved[1]) == len(self.plain))
    @rule(parts=st.integers(1, 7))
    def load(self, parts):
        (model, optimizers, scalers), kept, plain_scalers = copy.deepcopy(self.saved)
        if parts & 1:
            self.model.load_state_dict(model)
        if parts & 2:
            for optimizer, state in zip(self.optimizers, optimizers, strict=True):
                optimizer.load_state_dict(state)
        for plain, (value, momentum, lr) in zip(self.plain, kept, strict=True):
            if parts & 1:
                plain.value = value
            if parts & 2:
                plain.momentum, plain.lr = momentum, lr
        if parts & 4 and self.pending is None:
            amp.load_state_dict(scalers)
            self.scalers = plain_scalers


@pytest.mark.filterwarnings("ignore:.*at opt_level O0 does not help")
def test_random_sequences_agree_with_the_model():
    examples = int(os.environ.get("APEX_EXAMPLES", "0"))
    run_state_machine_as_test(
        Training,
        settings=settings(
            max_examples=examples or 160,
            stateful_step_count=25,
            derandomize=not examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
