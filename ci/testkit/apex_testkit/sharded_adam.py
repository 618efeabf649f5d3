"""What ranks do for test_distributed_adam_sequences.py: a sequence of calls, and plain float64.

A step of the plain model is that of optimizer_models.py, with the gradients of all ranks.
"""

import copy
import os
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam, for_torch
from apex_testkit.optimizer_models import ModelParam, adam, assert_near, exact
from apex_testkit.sharded_terms import Sums, Terms, chosen, factor, norm

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
FAMILIES = {"float32": [FLOAT32], "bfloat16": [BFLOAT16], "mixed": [FLOAT32, BFLOAT16, FLOAT16]}
REMAINDERS = {"store_params": False, "store_param_remainders": True, "param_sync_dtype": BFLOAT16}
# By name: for which families, and what is given to the constructor.
OPTIONS = {
    "plain": ("float32 bfloat16 mixed", {}),
    "not overlapped": ("float32 bfloat16 mixed", {"overlap_grad_sync": False}),
    "sums": ("float32 bfloat16 mixed", {"pipeline_size": 1, "average_grad_sync": False}),
    "gradient buffer": ("float32 bfloat16 mixed", {"contiguous_grad_buffer": True}),
    "parameter buffer": ("float32", {"contiguous_param_buffer": True, "bucket_cap_mb": 1}),
    "own parameters": ("float32", {"store_params": False}),
    "remainders": ("bfloat16", REMAINDERS),
    "narrow states": ("bfloat16", {"dtype": BFLOAT16}),
    "narrow gradients": ("bfloat16 mixed", {"grad_sync_dtype": BFLOAT16}),
    "late parameters": ("float32 bfloat16 mixed", {"overlap_param_sync": True}),
    "capturable": ("float32 bfloat16 mixed", {"capturable": True}),
    "Adam": ("float32", {"adam_w_mode": False}),
}
HYPER = {"betas": (0.9, 0.99), "eps": 1e-3}
GROUPS = (
    {"lr": 0.05, "weight_decay": 0.1, "bias_correction": True},
    {"lr": 0.02, "weight_decay": 0.0, "bias_correction": False},
)
_alone = {}  # by the group of all, that of this rank alone


def alone():
    everyone = dist.group.WORLD
    if everyone not in _alone:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _alone[everyone] = groups[dist.get_rank()]
    return _alone[everyone]


class Side:
    """The optimizer of one rank, and what its parameters must be."""

    def __init__(self, spec, rank, world, folder):
        self.number, self.all, self.folder = rank, world, folder
        self.family, self.saved, self.files, self.count = spec["family"], None, 0, 0
        dtypes = FAMILIES[self.family]
        self.specs = [(dtypes[d % len(dtypes)], shape) for d, shape in spec["params"]]
        split, indices = spec["split"] % len(self.specs), list(range(len(self.specs)))
        self.groups = [part for part in (indices[:split], indices[split:]) if part]
        self.hyper = [dict(GROUPS[number]) for number in range(len(self.groups))]
        self.build(spec["option"], together=True)
        self.own = [ModelParam(exact(param)) for param in self.params]

    def build(self, pick, together, like=()):
        """Parameters and an optimizer, of all ranks together or of each alone."""
        self.name = self.names()[pick % len(self.names())]
        self.options = {"bucket_cap_mb": 0.0005, **OPTIONS[self.name][1]}
        self.together, self.world = together, self.all if together else 1
        self.rank = self.number if together else 0
        self.terms = Terms(self.specs, self.rank)
        for param, old in zip(self.params, like, strict=False):
            param.data.copy_(old.data)
            param.requires_grad_(old.requires_grad)
        groups = [
            {"params": [self.params[i] for i in indices], **numbers}
            for indices, numbers in zip(self.groups, self.hyper, strict=True)
        ]
        more = {"module": self.terms} if self.name == "late parameters" else {}
        more["process_group"] = None if together else alone()
        self.optimizer = DistributedFusedAdam(groups, **HYPER, **self.options, **more)
        self.sums, self.scale = Sums(self.world, self.params), 1.0

    def names(self):
        return [name for name, (families, _) in OPTIONS.items() if self.family in families.split()]

    @property
    def params(self):
        return self.terms.params

    def numbers_of(self, index):
        (group,) = [g for g, indices in enumerate(self.groups) if index in indices]
        mode = self.options.get("adam_w_mode", True)
        return {**HYPER, "adam_w_mode": mode, **self.hyper[group]}

    # Gradients.

    def used(self, masks):
        """By rank, the parameters of a forward; None if no gradient would come of it."""
        if not any(param.requires_grad for param in self.params):
            return None
        return [chosen(mask, self.params) for mask in masks[: self.world]]

    def backward(self, seed, masks, mode):
        """A backward pass; ranks may use different parameters, and leave sums to a later pass."""
        used = self.used(masks)
        if used is None:
            return
        if self.sums.are_hardly_exact():
            self.zero(to_none=True)
        context = self.optimizer.no_sync(mode == "greedy") if mode != "sync" else nullcontext()
        with context:
            self.terms(seed, self.rank, used[self.rank]).backward()
        self.check_seen(used[self.rank])
        self.sums.add(seed, used, self.params)

    def check_seen(self, used):
        """Forward had the values of the newest step."""
        for index in used:
            term = self.terms.terms[index]
            assert_near("seen", term.seen, self.own[index].value, term.seen.dtype)

    def evaluate(self, masks):
        used = self.used(masks)
        if used is not None:
            with torch.no_grad():
                self.terms(0, self.rank, used[self.rank])
            self.check_seen(used[self.rank])

    def assign(self, seed, masks):
        """Gradients that no backward made."""
        used = self.used(masks)
        if used is None:
            return
        self.zero(to_none=True)
        for index in used[self.rank]:
            param = self.params[index]
            if param.requires_grad:
                grad = factor(seed, self.rank, index, param.shape)
                param.grad = torch.empty_like(param).copy_(grad)
        self.sums.add(seed, used, self.params)

    def zero(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)
        self.sums, self.scale = Sums(self.world, self.params), 1.0

    def gradients(self):
        """What a step uses, in float64."""
        average = self.options.get("average_grad_sync", True)
        factor = self.scale / self.world if average else self.scale
        return [total * factor for total in self.sums.totals()]

    def measure(self, some):
        """The norm of all gradients, or of those of some parameters."""
        picked = range(len(self.params)) if some is None else chosen(some, self.params)
        given = None if some is None else [self.params[i] for i in picked]
        gradients = self.gradients()
        expected = norm([gradients[i] for i in picked])
        assert float(self.optimizer.grad_norm(given)) == pytest.approx(expected, rel=1e-5)

    def clip(self, limit):
        total = norm(self.gradients())
        assert float(self.optimizer.clip_grad_norm(limit)) == pytest.approx(total, rel=1e-5)
        self.scale *= min(1.0, limit / (total + 1e-6))

    # Steps.

    def step(self, closed):
        closure = (lambda: "loss") if closed else None
        assert self.optimizer.step(closure) == ("loss" if closed else None)
        self.follow()

    def follow(self):
        """The plain step."""
        self.count += 1
        for index, (own, grad) in enumerate(zip(self.own, self.gradients(), strict=True)):
            if self.params[index].requires_grad:
                own.steps = self.count
                adam(own, grad, self.numbers_of(index), 0.0)
        if self.name != "late parameters":
            self.look()

    def scaled(self, seed, masks, infinite, limit):
        """The step of a scaled loss; or none, where the loss of one rank is not finite."""
        used, scale = self.used(masks), 8.0
        if used is None:
            return
        self.zero(to_none=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
        loss, where = self.terms(seed, self.rank, used[self.rank]), infinite % self.world
        hit = any(self.params[i].numel() and self.params[i].requires_grad for i in used[where])
        is_skipped = hit and infinite < 3
        scaler.scale(loss * torch.inf if is_skipped and where == self.rank else loss).backward()
        if limit is not None:
            self.optimizer.unscale_grads(grad_scaler=scaler)
        if not is_skipped:
            self.sums.add(seed, used, self.params, scale)
            self.scale /= scale
            if limit is not None:
                self.clip(limit)
        before = self.everything() if is_skipped else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the argument grad_scaler
            scaler.step(self.optimizer)
        scaler.update()
        assert scaler.get_scale() == (scale / 2 if is_skipped else scale)
        if is_skipped:
            self.check_unchanged(before)
        else:
            self.follow()
        self.zero(to_none=False)

    def look(self):
        """Compare all there is, and go on from what the optimizer has."""
        state = self.optimizer.state_dict()
        assert state["state"]["step"] == self.count == int(self.optimizer.state["step"])
        kept = self.options.get("dtype", FLOAT32)
        for index, (param, own) in enumerate(zip(self.params, self.own, strict=True)):
            entry = state["state"].get(index)
            if entry is not None:
                for name in ("exp_avg", "exp_avg_sq"):
                    assert_near(name, entry[name], own.moment(name), kept)
                    own.state[name] = exact(entry[name])
                assert_near("master", entry["param"], own.value, kept)
                own.value = exact(entry["param"])
            assert entry is not None or not any(moment.any() for moment in own.state.values())
            assert_near("parameter", param, own.value, param.dtype)

    # Changes between steps.

    def numbers(self, group, lr, decay):
        group %= len(self.groups)
        own = self.optimizer.param_groups[group]
        self.hyper[group].update(lr=lr, weight_decay=decay)
        own["weight_decay"] = decay
        own["lr"] = own["lr"].fill_(lr) if isinstance(own["lr"], torch.Tensor) else lr

    def freeze(self, index):
        """Or the opposite; between two iterations."""
        self.zero(to_none=True)
        param = self.params[index % len(self.params)]
        param.requires_grad_(not param.requires_grad)

    def add_group(self, dtype, shape):
        if len(self.groups) > 2 or self.name in ("late parameters", "parameter buffer"):
            return  # their modules and buffers are complete when they are built
        self.zero(to_none=True)
        dtypes = FAMILIES[self.family]
        self.specs.append((dtypes[dtype % len(dtypes)], shape))
        first, own = (Terms(self.specs, rank).terms[-1] for rank in (0, self.rank))
        self.terms.terms.append(own)
        self.groups.append([len(self.specs) - 1])
        self.hyper.append(dict(GROUPS[0]))
        self.optimizer.add_param_group({"params": [own.param], **GROUPS[0]})
        assert torch.equal(own.param, first.param)  # rank 0's
        self.own.append(ModelParam(exact(first.param)))
        self.sums = Sums(self.world, self.params)

    def prepare(self, index):
        """Give buckets to a parameter, before others."""
        self.optimizer.init_params(self.params[index % len(self.params)])

    def wait(self, for_gradients):
        self.optimizer.grad_sync() if for_gradients else self.optimizer.param_sync()

    # Checkpoints.

    def save(self):
        self.look()
        state = self.optimizer.state_dict()
        self.saved = copy.deepcopy((state, self.own, self.hyper, self.count))

    def load(self):
        """What was saved, perhaps by other ranks and options."""
        if self.saved is None or len(self.saved[1]) != len(self.own):
            return
        self.optimizer.param_sync()
        state, self.own, self.hyper, self.count = copy.deepcopy(self.saved)
        for index, (own, param) in enumerate(zip(self.own, self.params, strict=True)):
            if index not in state["state"]:  # it had no state: it begins with what it is
                own.value = exact(param)
        self.optimizer.load_state_dict(state)
        self.round(self.own)
        self.look()

    def round(self, own):
        """What narrow states, and parameters that are their own masters, keep of loaded values."""
        kept = self.options.get("dtype", FLOAT32)
        for each in own:
            each.value = exact(each.value.to(kept))
            each.state = {name: exact(moment.to(kept)) for name, moment in each.state.items()}

    def move(self, option, together, way):
        """Into an optimizer with other ranks and other options."""
        self.look()
        state = self.optimizer.state_dict()
        having = [index for index in state["state"] if index != "step"]
        frozen = [i for i, param in enumerate(self.params) if not param.requires_grad]
        is_adam = self.names()[option % len(self.names())] == "Adam"
        if way == "torch" and self.family == "float32" and having and not is_adam:
            state = self.through_torch(state)
        elif way == "files" and not set(having) & set(frozen):
            state = self.write()
        self.build(option, together, self.params)
        if isinstance(state, dict):
            self.optimizer.load_state_dict(state)
        else:
            self.read(state)
        self.round(self.own)
        self.look()

    def through_torch(self, state):
        """The state after torch's AdamW had it; it has no values of parameters."""
        own = [nn.Parameter(param.detach().clone()) for param in self.params]
        plain = torch.optim.AdamW([{"params": [own[i] for i in group]} for group in self.groups])
        plain.load_state_dict(for_torch(state))
        return plain.state_dict()

    def write(self):
        """The folder of a checkpoint of torch.distributed.checkpoint."""
        self.files += 1
        owner = "all" if self.together else str(self.number)
        folder = os.path.join(self.folder, f"{self.files}-")
        writer = dcp.FileSystemWriter(folder + owner, sync_files=False)
        group = None if self.together else alone()
        dcp.save(self.optimizer.sharded_state_dict(), storage_writer=writer, process_group=group)
        dist.barrier()
        return folder + ("all" if self.together else "0")

    def read(self, folder):
        state = self.optimizer.sharded_state_dict()
        group = None if self.together else alone()
        dcp.load(state, checkpoint_id=folder, process_group=group)
        self.optimizer.load_sharded_state_dict(state)

    # Calls that fail.

    def everything(self):
        state = self.optimizer.state_dict()
        values = [param.detach().clone() for param in self.params]
        return copy.deepcopy((state["state"], state["param_groups"], values))

    def check_unchanged(self, before):
        state, groups, values = self.everything()
        assert groups == before[1]
        assert all(torch.equal(a, b) for a, b in zip(values, before[2], strict=True))
        for index in set(before[0]) - {"step"}:
            for name, value in before[0][index].items():
                assert torch.equal(value, state[index][name]), (index, name)
        assert before[0]["step"] == state["step"]

    def fail(self, kind):
        """A call with a wrong argument changes nothing."""
        before, optimizer = self.everything(), self.optimizer
        group = optimizer.param_groups[0]
        saved = optimizer.state_dict()
        lost = {**saved, "param_groups": saved["param_groups"][1:]}
        other = nn.Parameter(torch.ones(2))
        calls = {
            "lr": lambda: optimizer.step(),
            "betas": lambda: optimizer.step(),
            "limit": lambda: optimizer.clip_grad_norm(0.0),
            "norm": lambda: optimizer.grad_norm(norm_type=1.0),
            "foreign": lambda: optimizer.grad_norm([other]),
            "scales": lambda: optimizer.unscale_grads(),
            "format": lambda: optimizer.state_dict(state_dict_format=3),
            "group": lambda: optimizer.load_state_dict(lost),
            "dtype": lambda: optimizer.init_params(dtype=torch.float64),
        }
        right = group["lr"], group["betas"]
        if kind in ("lr", "betas"):
            group[kind] = {"lr": -1.0, "betas": (0.9, 1.0)}[kind]
        with pytest.raises((ValueError, RuntimeError)):
            calls[kind]()
        group["lr"], group["betas"] = right
        self.check_unchanged(before)

    def fail_in_backward(self, seed, masks, at):
        """On all ranks alike; then gradients are cleared, as after any failure of training."""
        used = self.used([masks[0]] * 2)
        if used is None:
            return
        with pytest.raises(ArithmeticError):
            self.terms(seed, 0, used[0], at % (len(used[0]) + 1)).backward()
        self.zero(to_none=True)


def check_sequence(rank, world, folder, spec, calls):
    side = Side(spec, rank, world, folder)
    for position, (name, arguments) in enumerate(calls):
        try:
            getattr(side, name)(**arguments)
        except Exception as error:
            where = f"call {position}, {name}{arguments}, of {side.name!r}"
            raise AssertionError(where) from error
    side.look()
