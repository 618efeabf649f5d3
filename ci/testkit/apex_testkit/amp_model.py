"""A network whose gradients can be told without autograd, and a plain model of training it."""

import torch
import torch.nn.functional as F
from torch import nn

SIZE, MOMENTUM = 3, 0.5


class Layer(nn.Module):
    """One weight that is cast with the model, or, in a batch norm, one that is not."""

    def __init__(self, is_norm, seed):
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE) if is_norm else None
        self.own = None if is_norm else nn.Parameter(torch.zeros(SIZE))
        with torch.no_grad():
            self.weight.copy_(integers(seed) / 4)

    @property
    def weight(self):
        return self.own if self.norm is None else self.norm.weight

    def forward(self, x):
        if self.norm is None:
            return F.linear(x[None], self.weight[None])
        return self.weight * x


class Net(nn.ModuleList):
    """The sum of ``weight * x`` over some layers; keeps the dtypes that its layers computed in."""

    def forward(self, inputs):
        results = {index: self[index](x) for index, x in inputs.items()}
        self.dtypes = {index: result.dtype for index, result in results.items()}
        return torch.stack([result.float().sum() for result in results.values()]).sum()


class Plain:
    """One weight: float32 value, momentum and gradients, as a textbook has them."""

    def __init__(self, value, lr):
        self.value, self.lr, self.momentum = value, lr, None
        self.done = self.scaled = None  # the unscaled gradient; what still is to be unscaled

    def step(self):
        if self.done is None:
            return
        old = 0 if self.momentum is None else MOMENTUM * self.momentum.double()
        self.momentum = (old + self.done.double()).float()
        self.value = (self.value.double() - self.lr * self.momentum.double()).float()


class PlainScaler:
    """The numbers of one loss scaler."""

    def __init__(self, spec, window):
        self.dynamic, self.window = spec["loss_scale"] == "dynamic", window
        self.low, self.high = spec["min_loss_scale"] or 0.0, spec["max_loss_scale"]
        self.scale = self.high if self.dynamic else spec["loss_scale"]
        self.unskipped, self.hysteresis = 0, spec["hysteresis"]
        self.left = self.hysteresis

    def update(self, overflow):
        if overflow:
            self.left, self.unskipped = max(self.left - 1, 0), 0
            if self.left == 0:
                self.scale = max(self.scale / 2, self.low)
            return
        self.left, self.unskipped = self.hysteresis, self.unskipped + 1
        if self.dynamic and self.unskipped == self.window:
            self.scale, self.unskipped = min(self.scale * 2, self.high), 0


def integers(seed):
    """SIZE integers from -4 to 4, in float32."""
    return torch.tensor([float((seed * 7 + i * 5 + seed // 9) % 9 - 4) for i in range(SIZE)])


def plus(a, b):
    """The sum of two gradients, where None is no gradient."""
    return a if b is None else b if a is None else a + b


def same(actual, expected):
    """Whether they are equal, or both None; ``expected`` is float32."""
    if expected is None or actual is None:
        return actual is expected
    return torch.equal(actual.detach().float(), expected)
