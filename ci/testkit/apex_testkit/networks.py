"""Networks that whole training steps are timed on."""

import torch
import torch.nn.functional as F
from torch import nn


def skip(inputs, outputs, stride):
    """What goes around a block: the input, or a convolution where the shape changes."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Basic(nn.Module):
    """The block of ResNet-18 (He et al. 2015)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)),
            nn.ReLU(inplace=True),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.skip = skip(inputs, outputs, stride)

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


class Bottleneck(nn.Module):
    """The block of ResNet-50, with the stride where torchvision has it."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        width = outputs // 4
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)),
            nn.ReLU(inplace=True),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)),
            nn.ReLU(inplace=True),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.skip = skip(inputs, outputs, stride)

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def resnet18():
    """With the stem for small images: 3x3, no pooling."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    return _resnet(stem, Basic, ((64, 2), (128, 2), (256, 2), (512, 2)), 10)


def resnet50():
    """25.6 M parameters."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    stages = ((256, 3), (512, 4), (1024, 6), (2048, 3))
    return _resnet([*stem, nn.MaxPool2d(3, 2, 1)], Bottleneck, stages, 1000)


def _resnet(stem, block, stages, classes):
    layers, inputs = [*stem], 64
    for stage, (outputs, count) in enumerate(stages):
        layers.append(block(inputs, outputs, 2 if stage else 1))
        layers += [block(outputs, outputs, 1) for _ in range(count - 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Gpt(nn.Module):
    """Of GPT-2's kind; by default four blocks of width 256, four heads, a vocabulary of 1,024."""

    def __init__(self, width=256, blocks=4, heads=4, vocabulary=1024, length=128, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

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
