"""A small ResNet as MLPerf's is written, with conv_bias_relu and groupbn, against plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apex.contrib.conv_bias_relu import ConvBias, ConvBiasReLU
from apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC

CHANNELS = 16


class Conv(nn.Conv2d):
    """Of ``[N, H, W, C]``, with a bias and a ReLU if asked for."""

    relu = False

    def forward(self, x):
        function = ConvBiasReLU if self.relu else ConvBias
        y = function(x.movedim(-1, 1), self.weight, self.bias, self.padding[0], self.stride[0])
        return y.movedim(1, -1)


class Block(nn.Module):
    """conv, batch norm with ReLU; conv, batch norm with residual and ReLU."""

    def __init__(self, stride):
        super().__init__()
        self.conv1 = Conv(CHANNELS, CHANNELS, 3, stride, 1)
        self.bn1 = BatchNorm2d_NHWC(CHANNELS, fuse_relu=True)
        self.conv2 = Conv(CHANNELS, CHANNELS, 3, 1, 1)
        self.bn2 = BatchNorm2d_NHWC(CHANNELS, fuse_relu=True)
        self.shortcut = Conv(CHANNELS, CHANNELS, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = self.bn1(self.conv1(x))
        return self.bn2(self.conv2(out), self.shortcut(x))


class Net(nn.Module):
    """Of images ``[N, 3, H, W]``."""

    def __init__(self):
        super().__init__()
        self.stem = Conv(3, CHANNELS, 3, 2, 1)
        self.stem.relu = True
        self.blocks = nn.Sequential(Block(1), Block(2))
        self.head = nn.Linear(CHANNELS, 10)

    def forward(self, x):
        y = self.blocks(self.stem(x.movedim(1, -1)))
        return self.head(y.mean((1, 2)))


class PlainBlock(nn.Module):
    def __init__(self, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, stride, 1)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1)
        self.bn1, self.bn2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.shortcut = nn.Conv2d(CHANNELS, CHANNELS, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class PlainNet(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, 2, 1)
        self.blocks = nn.Sequential(PlainBlock(1), PlainBlock(2))
        self.head = nn.Linear(CHANNELS, 10)
        self.load_state_dict(net.state_dict())  # the same names, so checkpoints move

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def train(model, x, labels, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float() if x.dtype != torch.float64 else model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def problem(device):
    torch.manual_seed(0)
    net = Net().double().to(device)
    plain = PlainNet(net).to(device).double()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(8, 3, 16, 16, dtype=torch.float64, device=device)
    return net, plain, x, torch.arange(8, device=device)


def test_trains_as_plain_pytorch(problem):
    net, plain, x, labels = problem
    assert train(net, x, labels) == pytest.approx(train(plain, x, labels), rel=1e-9)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(net.eval()(x), plain.eval()(x), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision(dtype, problem, device):
    """16-bit convolutions and activations, float32 parameters: the loss is that of float64."""
    net, plain, x, labels = problem
    expected = train(copy.deepcopy(plain), x, labels)
    net.float()
    with torch.autocast(device.type, dtype):
        actual = train(net, x.float(), labels)
    assert actual[-1] < actual[0]
    assert actual == pytest.approx(expected, rel=0.1)


def test_compiled(problem):
    net, plain, x, labels = problem
    torch.compiler.reset()
    compiled = torch.compile(net, backend="aot_eager")
    assert train(compiled, x, labels, 2) == pytest.approx(train(plain, x, labels, 2), rel=1e-9)
