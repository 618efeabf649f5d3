"""What scripts do with parameters themselves, for a state machine of amp."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from .amp_model import integers

PICK, SEED = st.integers(0, 9), st.integers(0, 999)


class ChangedByHand(RuleBasedStateMachine):
    """Rules of a machine whose own checks, after each rule, find what else has changed."""

    @rule(pick=PICK, seed=SEED)
    def write(self, pick, seed):
        """Checkpoints have what was written. Steps start there, but a master wins over it."""
        index, value = pick % len(self.plain), integers(seed) / 4
        weight, before = self.weights()[index].detach(), self.weights()[index].detach().clone()
        weight.copy_(value)
        state = self.model[index].state_dict()
        (name,) = [name for name in state if name.endswith(("own", "weight"))]
        assert torch.equal(state[name], value)
        if self.has_master(index):
            weight.copy_(before)
        else:
            self.plain[index].value = value

    @rule(pick=PICK, keeps=st.booleans())
    def leave_gradient(self, pick, keeps):
        """Of a frozen parameter, from before it was frozen: zero_grad clears it, as torch's."""
        if not self.frozen:
            return
        weight = self.weights()[sorted(self.frozen)[pick % len(self.frozen)]]
        if keeps:
            weight.grad = torch.ones_like(weight)
            self.zero_grad(False)
            assert not weight.grad.any()
        weight.grad = torch.ones_like(weight)
        self.zero_grad(True)
        assert weight.grad is None
