"""What two ranks do for test_distributed_sequences.py: one sequence of operations, compared."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from apex.parallel import DistributedDataParallel

DTYPES = ("float16", "bfloat16", "float32", "float64")
SHAPES = ((), (3,), (2, 2), (0,), (7,))


def inputs(number, rank, index, shape):
    """``[rows, *shape]``; the gradient of a parameter is its sum over the rows."""
    generator = torch.Generator().manual_seed(100 * number + 10 * rank + index)
    rows = int(torch.randint(4, (), generator=generator))  # ranks have batches of other sizes
    return torch.randint(-1, 2, (rows, *shape), generator=generator).double()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("this backward fails")


class Terms(nn.Module):
    """A sum with one term for each parameter that is used, in any order."""

    def __init__(self, spec, rank):
        super().__init__()
        self.params = nn.ParameterList(
            torch.full(SHAPES[s], 1 + rank + i, dtype=getattr(torch, DTYPES[d]))
            for i, (d, s) in enumerate(spec["params"])
        )

    def forward(self, number, rank, used, fails_at=None, forward_fails=False):
        total = torch.zeros((), dtype=torch.float64)
        for position, index in enumerate(used):
            if position == fails_at:
                total = Fails.apply(total.requires_grad_())
            param = self.params[index]
            total = total + (param.double() * inputs(number, rank, index, param.shape)).sum()
        if forward_fails:
            raise ArithmeticError("this forward fails")
        return Fails.apply(total.requires_grad_()) if fails_at == len(used) else total


class Side:
    """A wrapper on one rank, and the graphs of its forwards."""

    def __init__(self, spec, rank):
        self.rank, self.graphs = rank, {}
        module, options = Terms(spec, rank), dict(spec["options"])
        if "triggers" in options:
            chosen = options.pop("triggers")
            options["allreduce_trigger_params"] = [module.params[i] for i in chosen]
        self.ddp = DistributedDataParallel(module, **options)
        self.params = list(module.params)
        assert all((p == 1 + i).all() for i, p in enumerate(self.params))  # rank 0's

    def forward(self, number, terms, local):
        with self.ddp.no_sync() if local else nullcontext():
            self.graphs[number] = self.ddp(number, self.rank, terms[self.rank])

    def fail(self, number, used, at):
        try:
            self.ddp(number, self.rank, used, at, forward_fails=at is None).backward()
        except ArithmeticError:
            if at is not None and not self.ddp._disable_allreduce:
                self.ddp.zero_grad()
            return
        raise AssertionError("the failure was swallowed")

    def refused(self, numbers, message):
        with pytest.raises(RuntimeError, match=message):
            sum(self.graphs[n] for n in numbers).backward()
        self.ddp.zero_grad()

    def differ(self, number, used, index):
        """Before ranks have agreed on anything, one of them freezes another parameter."""
        param = self.params[index]
        param.requires_grad_(self.rank == 0)
        with pytest.raises(RuntimeError, match="differ from those of rank 0"):
            self.ddp(number, self.rank, used).backward()
        param.requires_grad_(True)
        self.ddp.zero_grad()

    def look(self, number):
        """``autograd.grad`` reduces nothing."""
        wanted = [p for p in self.params if p.requires_grad]
        torch.autograd.grad(self.graphs[number], wanted, retain_graph=True, allow_unused=True)

    def evaluate(self):
        with torch.no_grad():
            self.ddp(0, self.rank, [0])

    def zero(self, ranks, to_none):
        if self.rank in ranks:
            self.ddp.zero_grad(set_to_none=to_none)

    def freeze(self, index, frozen):
        self.params[index].requires_grad_(not frozen)

    def disable(self, disabled):
        self.ddp.disable_allreduce() if disabled else self.ddp.enable_allreduce()

    def change(self, name, value):
        setattr(self.ddp, name, value)

    def copy(self, pickled):
        self.ddp = pickle.loads(pickle.dumps(self.ddp)) if pickled else copy.deepcopy(self.ddp)
        self.params, self.graphs = list(self.ddp.module.params), {}

    def load(self):
        state = {name: value + 1 for name, value in self.ddp.state_dict().items()}
        self.ddp.load_state_dict(state)
        loaded = zip(self.ddp.parameters(), state.values(), strict=True)
        assert all(torch.equal(p.detach(), value) for p, value in loaded)

    def cast(self, index, dtype):
        param = self.params[index]
        param.grad, self.graphs = None, {}
        param.data = param.data.to(getattr(torch, DTYPES[dtype]))


def check_sequence(rank, world, specs, operations):
    sides = [Side(spec, rank) for spec in specs]
    for position, (name, where, arguments, expected) in enumerate(operations):
        if name == "backward":  # of several wrappers, perhaps
            pairs = zip(sides, arguments["numbers"], strict=True)
            losses = [side.graphs[number] for side, mine in pairs for number in mine]
            sum(losses).backward(retain_graph=arguments["retain"])
        else:
            getattr(sides[where], name)(**arguments)
        for side, wanted in zip(sides, expected, strict=True):
            for index, (param, value) in enumerate(zip(side.params, wanted[rank], strict=True)):
                grad = None if param.grad is None else param.grad.tolist()
                what = f"operation {position} ({name}), parameter {index}: {grad}, not {value}"
                assert grad == value, what
