"""Random sequences of calls of FusedAdamSWA, against one float64 model step of each.

A long run by hand: ``OPTIMIZER_SEQUENCES=5000 pytest test_adam_swa_sequences.py``.
"""

import copy
import io
import math
import os
import random

import pytest
import torch

from apex.contrib.openfold_triton import fused_adam_swa
from apex.contrib.openfold_triton.fused_adam_swa import AdamMathType, FusedAdamSWA
from apex_testkit.optimizer_models import ModelParam, adam, assert_near, exact, random_values

SEQUENCES = int(os.environ.get("OPTIMIZER_SEQUENCES", "60"))
CALLS = 20
SIZES = [(0,), (1,), (3,), (2, 3), (4, 4)]
COPIED = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
STATES = [*COPIED, *[torch.float32] * 3]  # those of the kernel more often


class Sequence:
    """Parameters, copies and averages, their optimizer, and the same in float64."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        sizes = self.rng.choices(SIZES, k=self.rng.randint(1, 4))
        self.params = [self._values(size).to(self.rng.choice(STATES)) for size in sizes]
        self.computes = [
            p.to(self.rng.choice(COPIED), copy=True).requires_grad_() for p in self.params
        ]
        self.averages = [torch.full_like(p, math.nan) for p in self.params]
        mode = self.rng.choice(list(AdamMathType))
        self.decay = self.rng.choice([0.0, 0.9, 0.999, 1.0])
        self.hyper = {
            "lr": 0.05,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": self.rng.choice([0.0, 0.1]),
            "bias_correction": self.rng.random() < 0.8,
        }
        self.optimizer = FusedAdamSWA(*self.lists(), self.decay, adam_math_mode=mode, **self.hyper)
        self.hyper["adam_w_mode"] = mode is AdamMathType.ApexAdamW
        self.models = [ModelParam(exact(p)) for p in self.params]
        self.wanted = [exact(a) for a in self.averages]
        self.steps = self.averaged = 0
        self.saved = None

    def lists(self):
        return self.params, self.computes, self.averages

    def _values(self, shape):
        return random_values(shape, self.rng.randrange(2**16))

    def _set_gradients(self):
        """Of some copies, some of them in another layout."""
        missing = self.rng.choice([0.0, 0.3])
        for compute in self.computes:
            compute.grad = None
            if self.rng.random() < missing:
                continue
            grad = self._values(compute.shape).to(compute.dtype)
            if grad.dim() == 2 and self.rng.random() < 0.3:
                grad = grad.t().contiguous().t()
            compute.grad = grad

    def step(self):
        self._set_gradients()
        scale = self.rng.choice([None, 0.5, torch.tensor(0.25)])
        factor = 1.0 if scale is None else float(scale)
        self.optimizer.step(grad_clip_scale=scale)
        for model, compute in zip(self.models, self.computes, strict=True):
            if compute.grad is not None:
                model.steps += 1
                adam(model, exact(compute.grad) * factor, self.hyper, 0.0)
        decay = self.decay if self.averaged else 0.0
        for i, model in enumerate(self.models):
            old = self.wanted[i].nan_to_num() if decay == 0 else self.wanted[i]
            self.wanted[i] = old + (1 - decay) * (model.value - old)
        self.steps, self.averaged = self.steps + 1, self.averaged + 1
        self.compare()

    def compare(self):
        """And go on from what is there, so that roundings do not add up."""
        for i, (param, model) in enumerate(zip(self.params, self.models, strict=True)):
            assert_near("parameter", param, model.value, param.dtype)
            assert_near("average", self.averages[i], self.wanted[i], param.dtype)
            if self.computes[i].grad is not None:
                assert torch.equal(self.computes[i], param.to(self.computes[i].dtype))
            state = self.optimizer.state.get(param, {})
            assert state.get("step", 0) == model.steps
            for name, moment in model.state.items():
                assert_near(name, state[name], moment, torch.float32)
                model.state[name] = exact(state[name])
            model.value, self.wanted[i] = exact(param), exact(self.averages[i])
        assert self.optimizer.param_groups[0].get("step", 0) == self.steps
        assert self.optimizer.swa_param_groups[0]["n_averaged"] == self.averaged

    # Changes between steps.

    def change_numbers(self):
        self.hyper["lr"] = self.rng.choice([0.0, 0.02, 0.1])
        self.hyper["weight_decay"] = self.rng.choice([0.0, 0.1])
        numbers = {key: self.hyper[key] for key in ("lr", "weight_decay")}
        self.optimizer.param_groups[0].update(numbers)

    def replace_data(self):
        """By memory of its own, or by other values."""
        i = self.rng.randrange(len(self.params))
        if self.rng.random() < 0.5:
            for tensors in self.lists():
                tensors[i].data = tensors[i].data.clone()
            return
        self.params[i].data = self._values(self.params[i].shape).to(self.params[i].dtype)
        self.models[i].value = exact(self.params[i])

    def drop_state(self):
        i = self.rng.randrange(len(self.params))
        self.optimizer.state.pop(self.params[i], None)
        self.models[i].state, self.models[i].steps = {}, 0

    def replace_state(self):
        for state in self.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()

    # Copies and checkpoints.

    def copy_all(self):
        everything = (self.optimizer, self.lists())
        if self.rng.random() < 0.5:
            file = io.BytesIO()
            torch.save(everything, file)
            file.seek(0)
            everything = torch.load(file, weights_only=False)
        self.optimizer, lists = copy.deepcopy(everything)
        self.params, self.computes, self.averages = lists

    def save(self):
        kept = (self.models, self.wanted, self.steps, self.averaged, self.hyper)
        values = [exact(t).to(t.dtype) for own in self.lists() for t in own]
        self.saved = copy.deepcopy((self.optimizer.state_dict(), values, kept))

    def load(self):
        if self.saved is None:
            return
        state, values, kept = copy.deepcopy(self.saved)
        self.optimizer.load_state_dict(state)
        self.models, self.wanted, self.steps, self.averaged, self.hyper = kept
        with torch.no_grad():
            for tensor, value in zip([t for own in self.lists() for t in own], values, strict=True):
                tensor.copy_(value)

    # A call that fails.

    def failing_step(self):
        self._set_gradients()
        i = self.rng.randrange(len(self.params))
        param, compute, average = (own[i] for own in self.lists())
        kept = param.data, compute.data, average.data
        kind = self.rng.choice(["sparse", "dtype", "average", "number", "scale", "launch"])
        group, lr, scale = self.optimizer.param_groups[0], self.hyper["lr"], None
        if kind == "sparse":
            compute.grad = torch.zeros_like(compute.detach()).to_sparse()
        elif kind == "dtype":
            param.data = param.data.int()
        elif kind == "average":
            is_double = average.dtype == torch.float64
            average.data = average.data.to(torch.float32 if is_double else torch.float64)
        elif kind == "number":
            group["lr"] = None
        elif kind == "scale":
            scale = torch.ones(2)
            compute.grad = torch.zeros_like(compute)
        before = self._everything()
        with pytest.MonkeyPatch.context() as patch:
            if kind == "launch":
                compute.grad = torch.zeros_like(compute)
                patch.setattr(fused_adam_swa, "call_counted", no_launch)
            with pytest.raises((ArithmeticError, RuntimeError, TypeError)):
                self.optimizer.step(grad_clip_scale=scale)
        after = self._everything()
        assert before.keys() == after.keys()
        for key, value in before.items():
            torch.testing.assert_close(after[key], value, rtol=0, atol=0, equal_nan=True)
        param.data, compute.data, average.data = kept
        group["lr"] = lr

    def _everything(self):
        found = {(k, i): t.detach().clone() for k, own in enumerate(self.lists()) for i, t in
                 enumerate(own)}  # fmt: skip
        for i, param in enumerate(self.params):
            for key, value in self.optimizer.state.get(param, {}).items():
                found[key, i] = torch.as_tensor(value).clone()
        found["count", 0] = torch.tensor(self.optimizer.swa_param_groups[0]["n_averaged"])
        found["count", 1] = torch.tensor(self.optimizer.param_groups[0].get("step", 0))
        return found


def no_launch(*_):
    raise ArithmeticError("this launch fails")


SELDOM = ["change_numbers", "replace_data", "drop_state", "replace_state", "copy_all", "save",
          "load", "failing_step"]  # fmt: skip


def test_random_sequences_agree_with_the_model():
    for seed in range(SEQUENCES):
        sequence, calls = Sequence(seed), []
        try:
            for _ in range(CALLS):
                name = "step" if sequence.rng.random() < 0.5 else sequence.rng.choice(SELDOM)
                calls.append(name)
                getattr(sequence, name)()
        except AssertionError as error:
            raise AssertionError(f"sequence {seed}: {', '.join(calls)}: {error}") from error
