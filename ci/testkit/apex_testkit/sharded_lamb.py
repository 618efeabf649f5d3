"""What ranks do for test_distributed_lamb_sequences.py: a sequence of calls, and plain float64.

A step of the plain model is that of optimizer_models.py, with the gradients of all ranks.
"""

import copy
import warnings

import pytest
import torch

from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex_testkit.optimizer_models import ModelParam, assert_near, exact, lamb
from apex_testkit.sharded_terms import Sums, Terms, chosen, norm

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
FAMILIES = {"float32": [FLOAT32], "float16": [FLOAT16], "mixed": [FLOAT32, BFLOAT16, FLOAT16]}
# By name: for which families, and what is given to the constructor.
OPTIONS = {
    "plain": ("float32 float16 mixed", {}),
    "few blocks": ("float32 mixed", {"dwu_num_blocks": 1, "dwu_num_chunks": 2}),
    "reduced at once": ("float32 float16", {"full_ar": True, "fuse_scale": True}),
    "nodes of one": ("float32 mixed", {"dwu_group_size": 1}),
    "clipped before": ("float32", {"clip_after_ar": False}),
    "not overlapped": ("float32 float16 mixed", {"overlap_reductions": False, "fused_norm": True}),
    "bytes": ("float32 float16", {"e5m2_allgather": True}),
    "views": ("float32 float16", {"set_param_views_to_flat_buffer": True}),
    "gathered later": ("float32 mixed", {"skip_allgather": True}),
    "nvlamb": ("float32 mixed", {"use_nvlamb": True, "grad_averaging": False}),
    "decay in gradients": ("float32", {"adam_w_mode": False, "bias_correction": False}),
}
HYPER = {"betas": (0.9, 0.99), "eps": 1e-3}
NATIVE = ("_pipeline_block_reductions", "_pipeline_step")
MODES = {"adam_w_mode": True, "bias_correction": True, "grad_averaging": True, "use_nvlamb": False}
GROUPS = (
    {"lr": 0.05, "weight_decay": 0.1, "max_grad_norm": 0.0},
    {"lr": 0.02, "weight_decay": 0.0, "max_grad_norm": 2.0},
)


class Side:
    """The optimizer of one rank, and what its parameters must be."""

    def __init__(self, spec, rank, world):
        self.rank, self.world = rank, world
        names = [n for n, (families, _) in OPTIONS.items() if spec["family"] in families.split()]
        self.name = names[spec["option"] % len(names)]
        self.options, dtypes = OPTIONS[self.name][1], FAMILIES[spec["family"]]
        specs = [(dtypes[d % len(dtypes)], shape) for d, shape in spec["params"]]
        self.terms = Terms(specs, rank)
        self.params = self.terms.params
        self.left_alone = spec["left_alone"] if len(specs) > 1 else None  # frozen from the start
        if self.left_alone is not None:
            self.left_alone %= len(specs)
            self.params[self.left_alone].requires_grad_(False)
        split, indices = spec["split"] % len(specs), list(range(len(specs)))
        self.groups = [part for part in (indices[:split], indices[split:]) if part]
        self.hyper = [dict(GROUPS[number]) for number in range(len(self.groups))]
        self.saved, self.formers = None, []  # older optimizers over these parameters, still alive
        self.begin()
        self.zero(to_none=True)

    def begin(self):
        """Make the optimizer, which knows of no step."""
        groups = [
            {"params": [self.params[i] for i in indices], **numbers}
            for indices, numbers in zip(self.groups, self.hyper, strict=True)
        ]
        self.optimizer = DistributedFusedLAMB(groups, **HYPER, dwu_num_ar_pg=1, **self.options)
        self.own = [ModelParam(exact(param)) for param in self.params]
        self.count, self.lr, self.replaced, self.heard = 0, None, (), []

    def numbers_of(self, index):
        (group,) = [g for g, indices in enumerate(self.groups) if index in indices]
        modes = {name: self.options.get(name, default) for name, default in MODES.items()}
        numbers = {**HYPER, **modes, **self.hyper[group]}
        return numbers if self.lr is None else {**numbers, "lr": self.lr}

    # Gradients.

    def used(self, masks):
        if not any(param.requires_grad for param in self.params):
            return None
        return [chosen(mask, self.params) for mask in masks[: self.world]]

    def iterate(self, seed, masks, passes):
        """Backward passes of one iteration, of which the last reduces."""
        used = self.used(masks)
        if used is None:
            return
        if self.sums.are_hardly_exact() or self.is_reduced:
            self.zero(to_none=True)
        for number in range(passes):
            is_last = number + 1 == passes
            self.optimizer.set_is_accumulation_step(not is_last)
            self.terms(seed + number, self.rank, used[self.rank]).backward()
            self.sums.add(seed + number, used, self.params)
        self.is_reduced = True

    def zero(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)
        self.sums, self.scale, self.is_reduced = Sums(self.world, self.params), 1.0, False
        self.heard.clear()

    def gradients(self):
        """What a step uses, in float64; clipped, where that comes before sums."""
        parts = self.sums.parts
        if not self.options.get("clip_after_ar", True):
            limit = max(numbers["max_grad_norm"] for numbers in self.hyper)
            norms = [norm(mine) * self.scale for mine in parts]
            factors = [min(1.0, limit / (n + 1e-6)) if limit else 1.0 for n in norms]
            parts = [[p * f for p in mine] for mine, f in zip(parts, factors, strict=True)]
        return [sum(of) * self.scale / self.world for of in zip(*parts, strict=True)]

    def measure(self):
        """The norm of the averaged, still scaled gradient; or of this rank's own."""
        self.optimizer.complete_reductions()
        self.is_reduced = True
        if self.options.get("clip_after_ar", True):
            expected = norm(self.gradients()) / self.scale
        else:
            expected = norm(self.sums.parts[self.rank])
        assert float(self.optimizer.L2_grad_norm) == pytest.approx(expected, rel=1e-5)

    # Steps.

    def step(self, closed):
        closure = (lambda: "loss") if closed else None
        assert self.optimizer.step(closure) == ("loss" if closed else None)
        self.follow()

    def follow(self):
        """The plain step."""
        self.count += 1
        gradients = self.gradients()
        total = norm(gradients)
        for index, (own, grad) in enumerate(zip(self.own, gradients, strict=True)):
            if index != self.left_alone:
                own.steps, numbers = self.count, self.numbers_of(index)
                if not self.options.get("clip_after_ar", True):
                    numbers["max_grad_norm"] = 0.0
                lamb(own, grad, numbers, total)
        self.is_reduced = False
        self.check_heard()
        if self.options.get("skip_allgather"):
            self.optimizer.gather_params()
        self.look()

    def scaled(self, seed, masks, infinite, by_scaler):
        """The step of a scaled loss; or none, where the loss of one rank is not finite."""
        used, scale = self.used(masks), 8.0
        if used is None:
            return
        self.zero(to_none=True)
        optimizer = self.optimizer
        optimizer.set_is_accumulation_step(False)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
        loss, where = self.terms(seed, self.rank, used[self.rank]), infinite % self.world
        hit = any(self.params[i].numel() and self.params[i].requires_grad for i in used[where])
        is_skipped = hit and infinite < 3
        factor = torch.inf if is_skipped and where == self.rank else 1.0
        before = self.everything()
        (loss * factor * scale).backward()
        if by_scaler:
            scaler.scale(torch.ones(1))  # makes its scale
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of the argument grad_scaler
                scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (scale / 2 if is_skipped else scale)
        else:
            optimizer.set_global_scale(scale)
            optimizer.step()
            optimizer.set_global_scale(1.0)
        if is_skipped:
            self.check_heard()
            self.check_unchanged(before)
            if self.options.get("skip_allgather"):
                self.optimizer.gather_params()
        else:
            self.sums.add(seed, used, self.params, scale)
            self.scale /= scale
            self.follow()
        self.zero(to_none=False)

    def look(self):
        """Compare this rank's part and all parameters, and go on from what the optimizer has."""
        optimizer = self.optimizer
        state = optimizer.state_dict()
        assert int(state["step"]) == self.count
        layout, shard = optimizer._layout, optimizer._groups.shard
        indices = [i for i in range(len(self.params)) if i != self.left_alone]
        for fragment in layout.fragments(shard):
            own = self.own[indices[fragment.param]]
            begin = fragment.flat - layout.offsets[fragment.param]
            there, here = (slice(at, at + fragment.numel) for at in (begin, fragment.own))
            for name, moment in (("m", "exp_avg"), ("v", "exp_avg_sq")):
                flat = own.moment(moment).reshape(-1)
                assert_near(name, state[f"fp32_{name}"][here], flat[there], FLOAT32)
            assert_near("master", state["fp32_p"][here], own.value.reshape(-1)[there], FLOAT32)
        for param, own in zip(self.params, self.own, strict=True):
            if self.name == "bytes" and self.count:  # the upper byte of a float16 number
                error = (param.double() - own.value).abs()
                assert (error <= 0.25 * own.value.abs() + 1e-4).all()
            else:
                assert_near("parameter", param, own.value, param.dtype)

    # Changes between steps.

    def numbers(self, group, lr, decay, limit):
        group %= len(self.groups)
        new = {"lr": lr, "weight_decay": decay, "max_grad_norm": limit}
        self.hyper[group].update(new)
        self.optimizer.param_groups[group].update(new)

    def give_lr(self, lr):
        """As scripts for Apex do; it replaces that of all groups."""
        self.optimizer._lr = torch.tensor([lr])
        self.lr = lr

    def freeze(self, index):
        """Or the opposite; it goes on without gradients."""
        index %= len(self.params)
        if index != self.left_alone:
            self.zero(to_none=True)
            param = self.params[index]
            param.requires_grad_(not param.requires_grad)

    def save(self):
        values = [param.detach().clone() for param in self.params]
        state = self.optimizer.state_dict()
        self.saved = copy.deepcopy((state, values, self.own, self.count))

    def load(self):
        if self.saved is not None:
            state, values, self.own, self.count = copy.deepcopy(self.saved)
            for param, value in zip(self.params, values, strict=True):
                param.data.copy_(value)
            self.optimizer.load_state_dict(state)
            self.look()

    # Methods that scripts replace.

    def replace(self, names):
        """Put functions around methods on the instance, which note that they are called."""
        for name in NATIVE:
            vars(self.optimizer).pop(name, None)
        self.replaced = names
        self.heard.clear()
        for name in names:
            native = getattr(self.optimizer, name)

            def around(*block, native=native):
                self.heard.append(block[0] if block else "step")
                native(*block)

            setattr(self.optimizer, name, around)
        if self.is_reduced or self.optimizer._has_begun:  # some were not heard
            self.zero(to_none=True)

    def check_heard(self):
        """All blocks from the last one on, each once; and the step, which may begin before them."""
        blocks = [what for what in self.heard if what != "step"]
        every = list(reversed(range(self.options.get("dwu_num_blocks", 4))))
        assert blocks == (every if NATIVE[0] in self.replaced else [])
        assert self.heard.count("step") == (NATIVE[1] in self.replaced)
        self.heard.clear()

    def leave_out(self):
        """One step whose inner part a script leaves out: nothing moves, and the next one works."""
        before = self.everything()
        vars(self.optimizer).pop(NATIVE[1], None)
        self.optimizer._pipeline_step = lambda: None
        self.optimizer.step()
        self.check_unchanged(before)
        self.replace(self.replaced)
        self.zero(to_none=True)

    # Another optimizer over the same parameters.

    def succeed(self, is_kept, is_moved):
        """Build a second one; ``is_moved``: with the state of the first, which has no say then.

        Gradients that are in the parameters are its own.
        """
        for index, param in enumerate(self.params):
            param.requires_grad_(index != self.left_alone)
        state = copy.deepcopy(self.optimizer.state_dict())
        own, count = self.own, self.count
        if is_kept:
            self.formers.append(self.optimizer)
        self.begin()
        if is_moved:
            self.optimizer.load_state_dict(state)
            self.own, self.count = own, count
        self.is_reduced = False
        self.look()

    def ask_former(self, call):
        """It says that it has no parameters any more, on each rank, and changes nothing."""
        if not self.formers:
            return
        before, former = self.everything(), self.formers[-1]
        calls = {
            "step": former.step,
            "zero": former.zero_grad,
            "load": lambda: former.load_state_dict(former.state_dict()),
            "reduce": former.complete_reductions,
            "gather": former.gather_params,
        }
        with pytest.raises(RuntimeError, match="belong to a newer"):
            calls[call]()
        self.check_unchanged(before)

    # Calls that fail.

    def everything(self):
        values = [param.detach().clone() for param in self.params]
        return [*self.optimizer.state_dict().values(), *values]

    def check_unchanged(self, before):
        for number, (old, new) in enumerate(zip(before, self.everything(), strict=True)):
            assert torch.equal(old, new), number

    def fail(self):
        before, optimizer = self.everything(), self.optimizer
        state = optimizer.state_dict()
        short = {**state, "fp32_v": state["fp32_v"][:-1]}
        lost = {name: value for name, value in state.items() if name != "fp32_m"}
        negative = {**state, "fp32_v": state["fp32_v"] - 1e9}
        other = {**state, "fp32_p": state["fp32_p"].half()}
        later = {**state, "step": state["step"] + (self.rank + 1 == self.world)}
        calls = {
            "group": lambda: optimizer.add_param_group({"params": [torch.ones(2)]}),
            "short": lambda: optimizer.load_state_dict(short),
            "lost": lambda: optimizer.load_state_dict(lost),
            "negative": lambda: optimizer.load_state_dict(negative),
            "dtype": lambda: optimizer.load_state_dict(other),
            "no state": lambda: optimizer.load_state_dict([]),
            # Of one rank alone.
            "one": lambda: optimizer.load_state_dict(lost if self.rank == 0 else state),
            "step": lambda: optimizer.load_state_dict(later if self.world > 1 else lost),
        }
        for call in calls.values():
            with pytest.raises((ValueError, RuntimeError)):
                call()
            self.check_unchanged(before)

    def fail_in_backward(self, seed, masks, at):
        """On all ranks alike; then gradients are cleared, as after any failure of training."""
        used = self.used([masks[0]] * 2)
        if used is None:
            return
        self.zero(to_none=True)
        self.optimizer.set_is_accumulation_step(False)
        with pytest.raises(ArithmeticError):
            self.terms(seed, 0, used[0], at % (len(used[0]) + 1)).backward()
        self.zero(to_none=True)

    def fail_again(self, seed, masks):
        """A backward pass after the one that reduced."""
        used = self.used([masks[0]] * 2)
        overlaps = self.options.get("overlap_reductions", True)
        if used is None or not overlaps or not self.options.get("clip_after_ar", True):
            return
        everything = [i for i, param in enumerate(self.params) if param.requires_grad]
        self.zero(to_none=True)
        self.optimizer.set_is_accumulation_step(False)
        self.terms(seed, 0, everything).backward()
        self.optimizer.complete_reductions()
        with pytest.raises(RuntimeError, match="arrived again"):
            self.terms(seed, 0, everything).backward()
        self.zero(to_none=True)


def check_sequence(rank, world, spec, calls):
    side = Side(spec, rank, world)
    for position, (name, arguments) in enumerate(calls):
        try:
            getattr(side, name)(**arguments)
        except Exception as error:
            where = f"call {position}, {name}{arguments}, of {side.name!r}"
            raise AssertionError(where) from error
    side.look()
    side.zero(to_none=True)  # ends reductions that only some ranks may have started
