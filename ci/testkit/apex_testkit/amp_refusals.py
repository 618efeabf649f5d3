"""Calls of amp that fail, for a state machine: nothing may have changed afterwards."""

import contextlib
import copy

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import nn

from apex import amp

from .amp_model import SIZE

SEED = st.integers(0, 999)
REFUSED = ["optimizer", "options", "lr", "shape", "amp", "number", "group", "integers"]


def _interrupt(*unused):
    raise KeyboardInterrupt


class RefusedCalls(RuleBasedStateMachine):
    """Rules of a machine whose own checks, after each rule, find what has changed."""

    @rule(kind=st.sampled_from(["loss_id", "foreign", "type", "nested"]), delay=st.booleans())
    def refused_block(self, kind, delay):
        """Wrong arguments of scale_loss."""
        loss, optimizers = torch.ones(()), self.optimizers
        foreign = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        arguments = {
            "loss_id": (loss, optimizers, 2),
            "foreign": (loss, [*optimizers, foreign]),
            "type": ("loss", optimizers),
            "nested": (loss, optimizers[-1]),
        }[kind]
        if self.is_plain and kind in ("foreign", "nested"):
            return  # blocks do nothing there
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises((RuntimeError, TypeError, ValueError)))
            if kind == "nested":
                stack.enter_context(amp.scale_loss(loss, optimizers, delay_unscale=delay))
            stack.enter_context(amp.scale_loss(*arguments, delay_unscale=delay))

    @rule(seed=SEED, used=st.integers(0, 63), delay=st.booleans(), late=st.booleans())
    def failing_block(self, seed, used, delay, late):
        """An exception in a block, before the backward pass or after it."""
        loss = self.forward(self.inputs(seed, used), "on")
        # After a delayed pass, or where nothing is unscaled, autograd adds to what is there.
        late = late and self.pending is None and not self.is_plain
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
            with amp.scale_loss(loss, self.optimizers, delay_unscale=delay) as scaled:
                if late:
                    scaled.backward()
                raise KeyboardInterrupt

    @rule()
    def failing_step(self):
        """An exception in the optimizer's own step."""
        if self.skip:
            return  # amp does not call it
        if self.pending is not None or self.dirty:
            self.zero_grad(True)
        for optimizer in self.optimizers:
            handle = optimizer.register_step_pre_hook(_interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            handle.remove()

    @rule(kind=st.sampled_from(REFUSED))
    def refused_call(self, kind):
        """Checkpoints and groups of another kind."""
        weight, optimizer = self.weights()[0], self.optimizers[0]
        state = copy.deepcopy(optimizer.state_dict())
        if kind == "options":
            del state["param_groups"][0]["momentum"]
        if kind == "lr":
            del state["param_groups"][0]["lr"]
        if kind == "shape":
            state["state"][0] = {"momentum_buffer": torch.ones(SIZE + 1)}
        state["param_groups"] += [{}] if kind == "optimizer" else []
        call, argument = {
            "optimizer": (optimizer.load_state_dict, state),
            "options": (optimizer.load_state_dict, state),
            "lr": (optimizer.load_state_dict, state),
            "shape": (optimizer.load_state_dict, state),
            "amp": (amp.load_state_dict, {"loss_scaler0": {"loss_scale": 4.0}}),
            "number": (amp.load_state_dict, {"scale": 4.0}),
            "group": (optimizer.add_param_group, {"params": [weight]}),
            "integers": (optimizer.add_param_group, {"params": [torch.zeros(1).int()]}),
        }[kind]
        with pytest.raises((RuntimeError, TypeError, ValueError, KeyError)):
            call(argument)
        if kind == "group":
            assert argument["params"][0] is weight
