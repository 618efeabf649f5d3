"""Casts of O1 and O4 against torch.autocast, and whole steps of a ResNet-18 and a small GPT.

`autocast`: forward and backward of one model, once as amp.initialize returned it and once in a
block of torch's. On the CPU amp adds rules that autocast has on CUDA only (norms and softmax in
float32), so these models have none.

`level_step`: forward, backward, overflow check and SGD at an opt level, against plain torch in
float32: the ratio is what the level gains.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex_testkit.bench import chosen_device, compare

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Basic(nn.Module):
    """The block of ResNet-18 (He et al. 2015)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)),
            nn.ReLU(inplace=True),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.skip = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def resnet18():
    """With the stem for small images: 3x3, no pooling."""
    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Basic(inputs, outputs, stride), Basic(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Gpt(nn.Module):
    """Four blocks of width 256, four heads; a vocabulary of 1,024."""

    def __init__(self, width=256, blocks=4, heads=4, vocabulary=1024, length=128):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        x = self.tokens(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def initialized(model, level, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def amp_step(model, level, inputs, targets):
    """One training step at a level."""
    model, optimizer = initialized(model, level)

    def step():
        loss = F.cross_entropy(model(inputs).float().flatten(0, -2), targets)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step


def torch_step(model, inputs, targets):
    """The same in float32 without amp, whatever casts are in force."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step():
        with torch.autocast(inputs.device.type, enabled=False):
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step


def steps(case, start, inputs, targets, device):
    for level in LEVELS:
        compare(
            "level_step",
            f"{case} {level}",
            repeats=9,
            device=device,
            apex=amp_step(copy.deepcopy(start), level, inputs, targets),
            torch_float32=torch_step(copy.deepcopy(start), inputs, targets),
        )
        _amp_state.handle._deactivate()


def casts(case, make, x, level, dtype):
    """Forward and backward in O1's or O4's casts and in torch's, on one model's copies."""
    device = x.device.type
    plain = make().to(device)
    model, optimizer = initialized(copy.deepcopy(plain), level, loss_scale=1.0)

    def ours():
        with amp.scale_loss(model(x).float().sum(), optimizer) as loss:
            loss.backward()

    def theirs():
        with torch.autocast(device, enabled=False):  # outside of the casts of our initialize
            with torch.autocast(device, dtype=dtype):
                y = plain(x)
            y.float().sum().backward()

    compare("autocast", f"{case} {level}", device=device, apex=ours, torch_autocast=theirs)
    _amp_state.handle._deactivate()


def mlp(layers, width):
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))


if __name__ == "__main__":
    device = chosen_device()
    for level, dtype in (("O1", torch.float16), ("O4", torch.bfloat16)):
        for layers, width, batch in ((50, 16, 8), (8, 512, 64)):
            x = torch.randn(batch, width, device=device)
            casts(f"mlp {layers} x {width}", lambda n=layers, w=width: mlp(n, w), x, level, dtype)
    images, labels = torch.randn(16, 3, 32, 32, device=device), torch.arange(16, device=device) % 10
    steps("resnet18, 16 x 32 x 32", resnet18().to(device), images, labels, device)
    tokens = torch.randint(1024, (4, 128), device=device)
    steps("gpt 4 x 256, 4 x 128 tokens", Gpt().to(device), tokens, tokens.flatten(), device)
