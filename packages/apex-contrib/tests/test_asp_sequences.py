"""Random sequences of ASP's calls, training, checkpoints and copies, against a plain model.

The plain model has two weights, dense values, masks, and what was pruned, in NumPy's float64. It
trains by SGD with momentum, by the formula. ASP's network must have the same numbers after each
call, and a call that is refused must change nothing.
"""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from apex.contrib.sparsity import ASP
from apex.contrib.sparsity.permutation_lib import Permutation

NAMES = ("0.weight", "2.weight")
LR, MOMENTUM = 0.1, 0.9


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh()).double()


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)


def best_mask(weight):
    """The two largest of each four; of equal ones the first."""
    fours = np.abs(weight).reshape(-1, 4)
    order = np.argsort(-fours, axis=1, kind="stable")[:, :2]
    mask = np.zeros(fours.shape, dtype=bool)
    np.put_along_axis(mask, order, True, axis=1)
    return mask.reshape(weight.shape)


class Plain:
    """What ASP keeps of a network's two weights."""

    def __init__(self, net):
        self.weights = {n: net.get_parameter(n).detach().numpy().copy() for n in NAMES}
        self.momenta = dict.fromkeys(NAMES)
        self.masks = {n: np.ones_like(w, dtype=bool) for n, w in self.weights.items()}
        self.lost = {n: np.zeros_like(w) for n, w in self.weights.items()}

    def is_pruned(self):
        return any(not mask.all() for mask in self.masks.values())

    def restore(self):
        for name in NAMES:
            if not self.masks[name].all():
                self.weights[name] = self.weights[name] + self.lost[name]
                self.masks[name] = np.ones_like(self.masks[name])
                self.lost[name] = np.zeros_like(self.lost[name])

    def prune(self):
        self.restore()
        for name in NAMES:
            self.masks[name] = best_mask(self.weights[name])
            self.lost[name] = np.where(self.masks[name], 0, self.weights[name])
            self.weights[name] = np.where(self.masks[name], self.weights[name], 0)

    def step(self, gradients, is_masked):
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            gradient = gradient * self.masks[name] if is_masked else gradient
            before = self.momenta[name]
            momentum = gradient if before is None else MOMENTUM * before + gradient
            self.momenta[name] = momentum
            self.weights[name] = self.weights[name] - LR * momentum
        if is_masked:
            for name in NAMES:
                self.weights[name] = self.weights[name] * self.masks[name]


class Sequences(RuleBasedStateMachine):
    """The rules are ASP's calls in any order, also in those that it refuses."""

    @initialize(keep=st.booleans(), begun=st.booleans())
    def start(self, keep, begun):
        ASP.reset()
        Permutation.set_permutation_saving_params(allow_permutation=True)
        self.keep, self.net = keep, network()
        self.optimizer = optimizer_of(self.net)
        self.is_held = self.is_wrapped = False
        self.plain, self.saved, self.had_masks = Plain(self.net), None, False
        if begun:  # so that half of the sequences are about a pruned network
            self.init_model()
            self.init_optimizer()
            self.compute_masks()

    def teardown(self):
        ASP.reset()

    def refused(self, call, text):
        """A call that must raise; the invariant sees that nothing changed."""
        with pytest.raises(RuntimeError, match=text):
            call()

    @rule()
    def init_model(self):
        def call():
            ASP.init_model_for_pruning(
                self.net, verbosity=0, allow_recompute_mask=self.keep, allow_permutation=False
            )

        if self.is_held:
            self.refused(call, r"ASP\.reset\(\)")
            return
        call()
        self.is_held = self.had_masks = True

    @rule()
    def init_optimizer(self):
        call = lambda: ASP.init_optimizer_for_pruning(self.optimizer)
        if not self.is_held:
            self.refused(call, "init_model_for_pruning first")
        elif self.is_wrapped:
            self.refused(call, "holds one optimizer")
        else:
            call()
            self.is_wrapped = True

    @rule()
    def compute_masks(self):
        if not self.is_held:
            self.refused(ASP.compute_sparse_masks, "init_model_for_pruning first")
        elif self.plain.is_pruned() and not self.keep:
            self.refused(ASP.compute_sparse_masks, "allow_recompute_mask=True")
        else:
            ASP.compute_sparse_masks()
            self.plain.prune()

    @rule()
    def restore(self):
        if not self.is_held:
            self.refused(ASP.restore_pruned_weights, "init_model_for_pruning first")
        elif self.plain.is_pruned() and not self.keep:
            self.refused(ASP.restore_pruned_weights, "allow_recompute_mask=True")
        else:
            ASP.restore_pruned_weights()
            self.plain.restore()

    @rule(seed=st.integers(0, 99), frozen=st.booleans(), with_closure=st.booleans())
    def train(self, seed, frozen, with_closure):
        """A step; a frozen first weight has no gradient."""
        x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

        def closure():
            self.optimizer.zero_grad()
            self.net[0].weight.requires_grad_(not frozen)
            loss = self.net(x).square().sum()
            loss.backward()
            self.net[0].weight.requires_grad_(True)
            return loss

        closure()
        given = {n: self.net.get_parameter(n).grad for n in NAMES}
        given = {n: None if g is None else g.numpy().copy() for n, g in given.items()}
        if with_closure:
            self.optimizer.step(closure)
        else:
            self.optimizer.step()
        self.plain.step(given, self.is_wrapped)

    @rule()
    def reset(self):
        ASP.reset()
        self.is_held = self.is_wrapped = False
        if self.had_masks:  # go on with a network without masks: the weights are what they are
            self.rebuilt(Plain(self.net), {"net": plain_state(self.net)})

    def rebuilt(self, plain, state):
        """A new network, with the numbers of a state."""
        self.net = network()
        if self.is_held:
            ASP.reset()
            ASP.init_model_for_pruning(
                self.net, verbosity=0, allow_recompute_mask=self.keep, allow_permutation=False
            )
        self.had_masks, self.is_wrapped = self.is_held, False
        self.net.load_state_dict(state["net"])
        momenta = self.optimizer.state_dict() if "optimizer" not in state else state["optimizer"]
        self.optimizer = optimizer_of(self.net)
        self.optimizer.load_state_dict(momenta)
        plain.momenta = copy.deepcopy(plain.momenta if "optimizer" in state else self.plain.momenta)
        self.plain = plain

    @rule()
    def save(self):
        file = io.BytesIO()
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, file)
        self.saved = file.getvalue(), copy.deepcopy(self.plain), self.had_masks

    @precondition(lambda self: self.saved is not None)
    @rule(anew=st.booleans())
    def load(self, anew):
        """Into the network that is there, or as a new process does: build, init, load."""
        data, plain, had_masks = self.saved
        state = torch.load(io.BytesIO(data), weights_only=True)
        if had_masks != self.had_masks:  # without masks a checkpoint with masks does not fit
            before = self.net.state_dict()
            text = "Unexpected key" if had_masks else "Missing key"
            names = {k: v.clone() for k, v in before.items()}
            self.refused(lambda: self.net.load_state_dict(state["net"]), text)
            self.net.load_state_dict(names)  # torch itself loads what fits before it raises
            return
        if anew and self.is_held == self.had_masks:
            self.rebuilt(copy.deepcopy(plain), state)
        else:
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.plain = copy.deepcopy(plain)

    @rule()
    def a_copy_is_another_network(self):
        """What ASP does goes to the one that it holds."""
        other = copy.deepcopy(self.net)
        before = {k: v.clone() for k, v in other.state_dict().items()}
        if self.is_held and self.keep:
            ASP.compute_sparse_masks()
            self.plain.prune()
        with torch.no_grad():
            other[0].weight.add_(1)
        before["0.weight"] += 1
        assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())

    @invariant()
    def has_the_same_numbers(self):
        if not hasattr(self, "net"):
            return
        for name in NAMES:
            actual = self.net.get_parameter(name).detach()
            torch.testing.assert_close(
                actual, torch.from_numpy(self.plain.weights[name]), rtol=1e-12, atol=1e-14
            )
            if self.had_masks:
                module, _, own = name.rpartition(".")
                buffers = dict(self.net.get_submodule(module).named_buffers())
                mask = torch.from_numpy(self.plain.masks[name])
                assert torch.equal(buffers[f"__{own}_mma_mask"], mask)
                lost = buffers.get(f"__{own}_mma_pruned_p")
                assert (lost is not None) == self.keep
                if self.keep:
                    plain = torch.from_numpy(self.plain.lost[name])
                    torch.testing.assert_close(lost, plain, rtol=1e-12, atol=1e-14)
            momentum = self.optimizer.state[self.net.get_parameter(name)].get("momentum_buffer")
            if momentum is not None:
                plain = torch.from_numpy(self.plain.momenta[name])
                torch.testing.assert_close(momentum, plain, rtol=1e-12, atol=1e-14)
        assert ASP.already_init_asp_model() == self.is_held
        if self.is_held:
            assert ASP.is_sparsity_enabled() == self.plain.is_pruned()


def plain_state(net):
    return {k: v for k, v in net.state_dict().items() if "_mma_" not in k}


TestSequences = Sequences.TestCase
TestSequences.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
