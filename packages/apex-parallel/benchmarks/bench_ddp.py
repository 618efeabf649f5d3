"""Forward and backward of whole models on 2 gloo processes: DistributedDataParallel and torch's.

"torch" is torch's default, "torch_views" has gradient_as_bucket_view, "alone" reduces nothing and
is what no wrapper can beat. Gradients are either set to None before each step, the default of
zero_grad, or kept and set to zero. All contestants live in the same two processes and take turns,
each with three wrapped models in turn: one is up to 15 % slower than the next, built alike.
Rank 1 does what rank 0 tells it through a pipe and reports back, which costs some 100 us a step for
everyone. A step ends when all ranks have ended it: otherwise one that waits for nobody leaves a
late rank to its successor. The last cases have 1 and 4 processes: where four share two cores, only
ratios within a case count.
"""

import itertools
import multiprocessing
import sys
import tempfile
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex.parallel import DistributedDataParallel
from apex_testkit.bench import compare

TIMEOUT = timedelta(seconds=300)
MODELS_EACH = 3


class Residual(nn.Module):
    """The block of ResNet-18 (two 3x3) or, with ``inner``, of ResNet-50 (1x1, 3x3, 1x1)."""

    def __init__(self, channels, out, stride, inner=None):
        super().__init__()
        shapes = [(channels, out, 3, stride), (out, out, 3, 1)]
        if inner:
            shapes = [(channels, inner, 1, 1), (inner, inner, 3, stride), (inner, out, 1, 1)]
        parts = [(conv(*shape), nn.BatchNorm2d(shape[1]), nn.ReLU()) for shape in shapes]
        self.long = nn.Sequential(*[layer for part in parts for layer in part][:-1])
        same = stride == 1 and channels == out
        short = nn.Sequential(conv(channels, out, 1, stride), nn.BatchNorm2d(out))
        self.short = nn.Identity() if same else short

    def forward(self, x):
        return torch.relu(self.long(x) + self.short(x))


def conv(channels, out, size, stride):
    return nn.Conv2d(channels, out, size, stride, size // 2, bias=False)


def resnet(blocks, bottleneck):
    layers = [conv(3, 64, 3, 1), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        out = 4 * width if bottleneck else width
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Residual(channels, out, stride, width if bottleneck else None))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class GPT(nn.Module):
    """8 layers of 128 channels and 4 heads; 64 tokens of 4,096."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(4096, 128), nn.Linear(128, 4096, bias=False)
        layer = partial(nn.TransformerEncoderLayer, 128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([layer() for _ in range(8)])

    def forward(self, tokens):
        x = self.tokens(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


class Tiny(nn.Module):
    """1,000 parameters of 64 numbers."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList([torch.randn(64) for _ in range(1000)])

    def forward(self, x):
        for param in self.params:
            x = x + param
        return x


def linears():
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])


def images(count):
    return torch.randn(count, 3, 32, 32)


MODELS = {
    "8 x Linear(1024), batch 8": (linears, lambda: torch.randn(8, 1024)),
    "1,000 parameters of 64": (Tiny, lambda: torch.randn(4, 64)),
    "GPT, 8 layers of 128": (GPT, lambda: torch.randint(4096, (2, 64))),
    "ResNet-18, 4 x 32 px": (lambda: resnet((2, 2, 2, 2), False), lambda: images(4)),
    "ResNet-50, 2 x 32 px": (lambda: resnet((3, 4, 6, 3), True), lambda: images(2)),
}
# World size, model, whether gradients are kept.
CASES = [(2, model, kept) for model in MODELS for kept in (False, True)]
CASES += [(world_size, "8 x Linear(1024), batch 8", False) for world_size in (1, 4)]


def stepper(model, x, kept):
    def run():
        model.zero_grad(set_to_none=not kept)
        model(x).sum().backward()

    return run


def contestants(name, kept):
    """The same on every rank: constructors communicate."""
    build, make_input = MODELS[name]

    def module():
        torch.manual_seed(0)
        return build()

    x = make_input()
    wrappers = {
        "apex": DistributedDataParallel,
        "torch": TorchDDP,
        "torch_views": partial(TorchDDP, gradient_as_bucket_view=True),
        "alone": lambda module: module,
    }
    steps = {contestant: [] for contestant in wrappers}
    for _ in range(MODELS_EACH):
        for contestant, wrap in wrappers.items():
            steps[contestant].append(stepper(wrap(module()), x, kept))
    return {contestant: in_turn(each) for contestant, each in steps.items()}


def in_turn(steps):
    turns = itertools.cycle(steps)
    return lambda: next(turns)()


def start(rank, world_size, init_file):
    torch.set_num_threads(1)
    store = f"file://{init_file}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT
    )


def follow(rank, world_size, connection, init_file):
    start(rank, world_size, init_file)
    for model, kept in [case[1:] for case in CASES if case[0] == world_size]:
        steps = contestants(model, kept)
        while (name := connection.recv()) is not None:
            steps[name]()
            connection.send(name)
    dist.destroy_process_group()


def lead(world_size, connections, init_file):
    start(0, world_size, init_file)

    def tell(name):
        for connection in connections:
            connection.send(name)

    for model, kept in [case[1:] for case in CASES if case[0] == world_size]:
        steps = contestants(model, kept)

        def together(name, steps=steps):
            def run():
                tell(name)
                steps[name]()
                for connection in connections:
                    connection.recv()

            return run

        case = f"{model}, gradients {'kept' if kept else 'None'}, {world_size} ranks"
        compare("ddp", case, **{name: together(name) for name in steps})
        tell(None)
    dist.destroy_process_group()


def measure(world_size, folder):
    """Run all cases of a world size; this process is rank 0."""
    context = multiprocessing.get_context("spawn")
    init_file = str(Path(folder) / f"init{world_size}")
    with ExitStack() as stack:
        connections, followers = [], []
        for rank in range(1, world_size):
            here, there = context.Pipe()
            follower = context.Process(target=follow, args=(rank, world_size, there, init_file))
            follower.start()
            there.close()  # so that a follower that dies ends the leader's send, too
            connections.append(here)
            followers.append(follower)
            stack.callback(follower.kill)
        lead(world_size, connections, init_file)
        for follower in followers:
            follower.join(60)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (2, 1, 4):
            measure(world_size, folder)


if __name__ == "__main__":
    sys.exit(main())
