"""Random sequences of calls of every optimizer, against one float64 model step of each.

A long run by hand: ``OPTIMIZER_SEQUENCES=20000 pytest test_optimizers_machine.py``, for all modes
together. ``OPTIMIZER_SEED`` gives other sequences.
"""

import copy
import io
import os

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from apex.optimizers.stepping import held_lists
from apex.optimizers.stepping.buckets import Bucket
from apex_testkit.optimizer_models import (
    ModelParam,
    assert_near,
    everything,
    exact,
    global_norm,
    random_tensor,
)
from apex_testkit.optimizer_modes import MODES, group_options

SEQUENCES = int(os.environ.get("OPTIMIZER_SEQUENCES", "0")) // len(MODES) or 50
SEED = os.environ.get("OPTIMIZER_SEED")
SIZES = st.sampled_from([(0,), (1,), (3,), (2, 3), (4, 4)])
SEEDS = st.integers(0, 2**16)
PICK = st.integers(0, 99)


def no_launch(*_):
    raise ArithmeticError("this launch fails")


class OptimizerMachine(RuleBasedStateMachine):
    """Groups of parameters, their optimizer, and the same in float64."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.saved = None
        self.patch = pytest.MonkeyPatch()

    def teardown(self):
        self.patch.undo()

    @initialize(
        shapes=st.lists(st.lists(SIZES, max_size=3), min_size=1, max_size=3),
        pick=PICK,
        unfreezes=st.booleans(),
        holds=st.booleans(),
    )
    def make(self, shapes, pick, unfreezes, holds):
        torch.manual_seed(pick)
        if holds:  # lists of few tensors, too, which otherwise are not worth it
            self.patch.setattr(held_lists, "MIN_TENSORS", 1)
        self.params, self.models, self.hyper, self.counts = [], [], [], []
        for index, sizes in enumerate(shapes):
            self._add(sizes, pick + index)
        groups = [
            {"params": params, **group_options(hyper)}
            for params, hyper in zip(self.params, self.hyper, strict=True)
        ]
        self.optimizer = self.mode.make(groups)
        if unfreezes:  # states of the first group are all there are, and then are not
            self.step_groups(pick, [1, 1, 7, 7, 7])

    def _add(self, sizes, pick):
        params, models = [], []
        for index, size in enumerate(sizes):
            dtype = self.mode.dtypes[(pick + index * 7) % len(self.mode.dtypes)]
            param = torch.nn.Parameter(random_tensor(size, pick * 31 + index, dtype))
            params.append(param)
            models.append(ModelParam(exact(param), is_complex=dtype.is_complex))
        self.params.append(params)
        self.models.append(models)
        decay = (0.0, 0.1)[pick % 2]
        self.hyper.append({**self.mode.hyper, "lr": 0.05, "weight_decay": decay})
        self.counts.append(0)

    def _pairs(self):
        return [
            (index, param, model)
            for index, (params, models) in enumerate(zip(self.params, self.models, strict=True))
            for param, model in zip(params, models, strict=True)
        ]

    def _picked(self, pick):
        pairs = self._pairs()
        return pairs[pick % len(pairs)] if pairs else (0, None, None)

    # Gradients and steps.

    def _set_gradients(self, seed, pattern):
        """Gradients of some parameters, some of them in another layout."""
        chosen = []
        if self.mode.make.offload_gradients:  # setting them to None is not seen on the host
            self.optimizer.zero_grad(set_to_none=True)
        for number, (index, param, model) in enumerate(self._pairs()):
            self.mode.set_gradient(param, None)
            if pattern >> (number % 8) & 1 == 0:
                continue
            dtype = self.mode.gradient_dtype(param, seed + number)
            grad = random_tensor(param.shape, seed * 17 + number, dtype)
            if grad.dim() == 2 and (seed + number) % 3 == 0:
                grad = grad.t().contiguous().t()
            if grad.dim() and grad.numel() and (seed + number) % 5 == 0:
                grad = grad[:1].expand_as(grad)
            if grad.is_complex() and (seed + number) % 2 == 0:
                grad = grad.conj()  # which is a view of its conjugates
            self.mode.set_gradient(param, grad)
            chosen.append((index, param, model, exact(grad)))
        return chosen

    @rule(
        seed=SEEDS,
        pattern=st.integers(0, 255),
        skipped=st.booleans(),
        limit=st.sampled_from([None, 0.3, 30.0]),
    )
    def step(self, seed, pattern, skipped, limit=None):
        given = self._set_gradients(seed, pattern)
        limits = {"max_norm": limit} if self.mode.takes_limits and limit else {}
        norm = global_norm([grad for *_, grad in given])
        is_above = skipped and self.mode.takes_limits and seed % 4 == 1 and norm > 0
        is_skipped = is_above or (skipped and self.mode.capturable and seed % 2 == 0)
        if is_above:
            limits["skip_above"] = 0.5 * norm
        elif is_skipped:
            self.optimizer.found_inf = torch.ones(())
        for _, param, model, _ in given:
            self._take_master(param, model)
        self.optimizer.step(**limits)
        given = self._clipped(given, limits, norm)
        if is_skipped and not is_above:
            del self.optimizer.found_inf
        elif not is_skipped:
            self.counts = [count + 1 for count in self.counts]
            for index, _, model, grad in given:
                model.steps += 1
                self.mode.model(model, grad, self.hyper[index], norm)
        self._compare([] if is_skipped else given)

    def _clipped(self, given, limits, norm):
        """Gradients as they are used: clipped, and rounded as they are kept."""
        if "max_norm" not in limits:
            return given
        factor = min(1.0, limits["max_norm"] / (norm + 1e-6))
        clipped = []
        for index, param, model, grad in given:
            own = self.mode.gradient(param)
            dtype = (param if own is None else own).dtype.to_real()
            wide = torch.promote_types(dtype, torch.float32)
            own = (grad.to(wide) * torch.tensor(factor, dtype=wide)).to(dtype)
            clipped.append((index, param, model, exact(own)))
        return clipped

    @rule(seed=SEEDS, groups=st.lists(st.sampled_from([1, 2, 5, 7, 15]), min_size=1, max_size=5))
    def step_groups(self, seed, groups):
        """All of some groups: others are frozen, or experts without tokens."""
        for number, chosen in enumerate(groups):
            bits = [(chosen >> index & 1) << i for i, (index, *_) in enumerate(self._pairs()[:8])]
            self.step(seed + number, sum(bits), False)

    def _take_master(self, param, model):
        """What was written into a parameter wins over its master, where it is not that, rounded."""
        value = exact(param) if model.stale else model.value
        if model.stale and model.has_master:
            is_rounded = model.value.float().to(param.dtype) == param
            value = torch.where(is_rounded, model.value, value)
        if model.stale and self.mode.keeps_remainders and model.has_master:
            # Half of the master: what was written lacks the bits that the parameter lacks.
            value = exact(self.mode.moment(self.optimizer, param, "master_param"))
        has_had = model.has_master and param.dtype in (torch.float16, torch.bfloat16)
        model.has_master = param.dtype in self.mode.masters or has_had
        if self.mode.rounds_moments:  # to the parameter's dtype, which may have changed
            dtype = param.dtype.to_real()
            model.state = {key: exact(own.to(dtype)) for key, own in model.state.items()}
        model.value, model.stale = value, False

    def _compare(self, stepped):
        optimizer, mode = self.optimizer, self.mode
        for _, param, model, _ in stepped:
            state = optimizer.state.get(param, {})
            for name, moment in model.state.items():
                if name == "norm":
                    continue
                real = mode.moment(optimizer, param, name)
                assert_near(name, real, moment, mode.kept_dtype(param), mode.loose)
                if mode.resync:
                    model.state[name] = exact(real)
            if "step" in state:
                assert int(state["step"]) == model.steps
            if model.has_master:
                master = mode.moment(optimizer, param, "master_param")
                assert_near("master", master, model.value, mode.master_dtype)
            assert_near("parameter", param, model.value, param.dtype)
            model.value = exact(master) if model.has_master else exact(param)
        for _, param, model in self._pairs():
            if not (model.has_master or model.stale):
                assert_near("parameter", param, model.value, param.dtype)
        if mode.counts:
            counts = [int(group.get("step", 0)) for group in optimizer.param_groups]
            assert counts == self.counts

    # Changes between steps.

    @rule(data=st.data(), pick=PICK)
    def seldom(self, data, pick):
        """One rule for all of these, so that most of a sequence are steps and what upsets them."""
        names = ("_add_group", "_drop_state", "_make_infinite", "_copy_all", "_save", "_load")
        getattr(self, data.draw(st.sampled_from(names)))(data, pick)

    def _add_group(self, data, pick):
        if len(self.params) == 4:
            return
        self._add(data.draw(st.lists(SIZES, max_size=2)), pick)
        group = {"params": self.params[-1], **group_options(self.hyper[-1])}
        self.optimizer.add_param_group(group)

    @rule(pick=PICK, decay=st.sampled_from([0.0, 0.1]), lr=st.sampled_from([0.0, 0.02, 0.1]))
    def change_numbers(self, pick, decay, lr):
        index = pick % len(self.params)
        for group in (self.hyper[index], self.optimizer.param_groups[index]):
            group.update(weight_decay=decay, lr=lr)

    @rule(pick=PICK, form=st.sampled_from(["dtype", "view", "strides", "same"]), seed=SEEDS)
    def replace_data(self, pick, form, seed):
        """And step: before that, another change would hide how the first is noticed."""
        self._replace_data(pick, form, seed)
        self.step(seed, 255, False)

    @rule(pick=PICK, which=PICK, seed=SEEDS)
    def replace_state(self, pick, which, seed):
        """By an equal tensor, the shared number of steps too; and step."""
        _, param, _ = self._picked(pick)
        own = {} if param is None else self.optimizer.state.get(param, {})
        keys = [key for key, value in own.items() if isinstance(value, torch.Tensor)]
        if keys:
            key = keys[which % len(keys)]
            own[key] = own[key].clone()
            self.step(seed, 255, False)

    def _replace_data(self, pick, form, seed):
        _, param, model = self._picked(pick)
        if param is None:
            return
        self.mode.set_gradient(param, None)
        alike = [d for d in self.mode.dtypes if d.is_complex == param.is_complex()]
        allowed = [d for d in alike if d.itemsize <= param.dtype.itemsize]
        if form == "dtype":
            param.data = param.data.to(alike[seed % len(alike)])
        elif form == "view" and allowed and param.data.is_contiguous():
            memory = param.data.flatten().view(allowed[seed % len(allowed)])
            param.data = memory[: param.numel()].view(param.shape)
        elif form == "strides" and param.dim() == 2:
            param.data = param.data.t().contiguous().t()
        elif form == "same" and param.dim() == 2 and param.shape[0] == param.shape[1]:
            param.data = param.data.t()
        with torch.no_grad():  # written to, so that masters give way
            param.copy_(random_tensor(param.shape, seed, param.dtype))
        model.stale = True

    def _make_infinite(self, data, pick):
        index, param, model = self._picked(pick)
        if param is None or not param.numel() or not self.mode.takes_infinity:
            return
        self.change_numbers(index, 0.0, 0.05)
        with torch.no_grad():
            param[(0,) * param.dim()] = -torch.inf
        model.stale = True

    def _drop_state(self, data, pick):
        _, param, model = self._picked(pick)
        if param is None:
            return
        self.optimizer.state.pop(param, None)
        model.state, model.steps = {}, 0
        if model.has_master:
            model.has_master, model.stale = False, True

    # Copies and checkpoints.

    def _copy_all(self, data, pick):
        pair = self.optimizer, self.params
        if self.mode.make.offload_gradients is not None:
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copy.deepcopy(self.optimizer)
            return
        if data.draw(st.booleans(), label="pickled"):
            file = io.BytesIO()  # torch's own pickling: that of Python lacks some dtypes
            torch.save(pair, file)
            file.seek(0)
            self.optimizer, self.params = torch.load(file, weights_only=False)
        else:
            self.optimizer, self.params = copy.deepcopy(pair)

    def _dtypes(self):
        return [[p.dtype for p in own] for own in self.params]

    def _save(self, data, pick):
        kept = (self._dtypes(), self.models, self.hyper, self.counts)
        state = copy.deepcopy(self.optimizer.state_dict())
        self.saved = (state, *copy.deepcopy(kept))

    def _load(self, data, pick):
        if not self.saved or self.saved[1] != self._dtypes():
            return
        state, _, models, *kept = copy.deepcopy(self.saved)
        if [[m.value.shape for m in own] for own in models] != [
            [exact(p).shape for p in own] for own in self.params
        ]:
            return
        self.optimizer.load_state_dict(state)
        self.models, (self.hyper, self.counts) = models, kept
        for _, _, model in self._pairs():
            model.stale = True

    # A call that fails.

    @rule(
        pick=PICK,
        seed=SEEDS,
        kind=st.sampled_from(["dtype", "sparse", "number", "value", "launch"]),
    )
    def failing_step(self, pick, seed, kind):
        index, param, _ = self._picked(pick)
        if param is None:
            return
        self._set_gradients(seed, 255)
        group = self.optimizer.param_groups[index]
        numbers = {key: group[key] for key in ("lr", "betas", "eps", "momentum") if key in group}
        if kind == "number":
            group["lr"] = None
        elif kind == "value":  # of the right type, so that the operator refuses it
            bad = {"betas": (0.9, 1.0), "eps": -1.0, "momentum": -1.0}
            group.update({name: bad[name] for name in numbers if name in bad})
        elif kind == "sparse":
            self.mode.set_gradient(param, torch.zeros_like(param.detach()).to_sparse())
        elif kind == "dtype":
            wrong = torch.float32 if param.dtype == torch.float64 else torch.float64
            wrong = torch.int32 if self.mode.decoupled else wrong
            grad = torch.zeros_like(param.detach())
            self.mode.set_gradient(param, grad)
            grad.data = torch.zeros_like(grad, dtype=wrong)  # torch itself would refuse to set it
        params = [param for _, param, _ in self._pairs()]
        before = everything(self.optimizer, params)
        with pytest.MonkeyPatch.context() as patch:
            if kind == "launch":  # once states are made
                patch.setattr(Bucket, "run", no_launch)
            with pytest.raises((ArithmeticError, RuntimeError, TypeError, ValueError)):
                self.optimizer.step()
        group.update({**numbers, "lr": self.hyper[index]["lr"]})
        after = everything(self.optimizer, params)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(value.nan_to_num(7), after[key].nan_to_num(7)), key


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_random_sequences_agree_with_the_model(mode):
    settings = hypothesis.settings(
        max_examples=SEQUENCES,
        stateful_step_count=20,
        derandomize=SEED is None,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, *(() if SEED else (hypothesis.Phase.shrink,))],
    )
    if SEED is None:
        run_machine(lambda: OptimizerMachine(mode), settings=settings)
        return
    seeded = hypothesis.seed(int(SEED))(type("Seeded", (OptimizerMachine,), {}))
    run_machine(lambda: seeded(mode), settings=settings)
