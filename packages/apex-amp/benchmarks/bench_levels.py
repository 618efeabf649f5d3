"""Casts of O1 and O4 against torch.autocast, and whole steps of a ResNet-18 and a small GPT.

`autocast`: forward and backward of one model, once as amp.initialize returned it and once in a
block of torch's. On the CPU amp adds rules that autocast has on CUDA only (norms, GELU and softmax
in float32): the perceptrons have none of these functions and show what amp itself costs, ResNet-50
and GPT-2 what a user sees. amp also replaces torch's float16 products on CPUs without float16
instructions, and autocast then shares them.

`linears`: sixty tiny layers, which torch.autocast runs while amp is off, with torch's own products.
The two take turns in blocks of calls, because amp is switched on for each of its blocks.

`level_step`: forward, backward, overflow check and SGD at an opt level, against plain torch in
float32: the ratio is what the level gains.
"""

import copy
import time

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex_testkit.bench import chosen_device, compare, record_samples
from apex_testkit.load import LoadMeter
from apex_testkit.networks import Gpt, resnet18, resnet50

GPT2 = {"width": 768, "blocks": 12, "heads": 12, "vocabulary": 50_257, "length": 64, "tied": True}
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


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


def linears(width, batch, level, dtype, device, rounds=15, calls=10):
    """Sixty layers in O1's or O4's casts, and in torch's while amp is off."""
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(60))).to(device)
    start, x = copy.deepcopy(plain), torch.randn(batch, width, device=device)

    def theirs():
        with torch.autocast(device, dtype=dtype):
            return plain(x)

    samples = {(op, who): [] for op in ("fwd", "fwd+bwd") for who in ("apex", "torch_autocast")}

    def sample(who, forward, training):
        for op, call in (("fwd", forward), ("fwd+bwd", training)):
            call()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            samples[op, who].append((time.perf_counter() - begin) / calls * 1e6)

    meter = LoadMeter()
    for _ in range(rounds):
        sample("torch_autocast", theirs, lambda: theirs().float().sum().backward())
        model, optimizer = initialized(copy.deepcopy(start), level, loss_scale=1.0)

        def ours(model=model, optimizer=optimizer):
            with amp.scale_loss(model(x).float().sum(), optimizer) as loss:
                loss.backward()

        sample("apex", lambda model=model: model(x), ours)
        _amp_state.handle._deactivate()
    load = meter.read()
    for op in ("fwd", "fwd+bwd"):
        of_op = {who: values for (kind, who), values in samples.items() if kind == op}
        record_samples(f"linears {op}", f"60 of {batch}x{width} {level}", of_op, load)


def mlp(layers, width):
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))


if __name__ == "__main__":
    device = chosen_device()
    for level, dtype in (("O1", torch.float16), ("O4", torch.bfloat16)):
        for width, batch in ((16, 8), (16, 32), (32, 32)):
            linears(width, batch, level, dtype, device)
        for layers, width, batch in ((50, 16, 8), (8, 512, 64)):
            x = torch.randn(batch, width, device=device)
            casts(f"mlp {layers} x {width}", lambda n=layers, w=width: mlp(n, w), x, level, dtype)
        casts("resnet50, 4 x 64 x 64", resnet50, torch.randn(4, 3, 64, 64).to(device), level, dtype)
        tokens = torch.randint(GPT2["vocabulary"], (2, 64), device=device)
        casts("gpt2, 2 x 64 tokens", lambda: Gpt(**GPT2), tokens, level, dtype)
    images, labels = torch.randn(16, 3, 32, 32, device=device), torch.arange(16, device=device) % 10
    steps("resnet18, 16 x 32 x 32", resnet18().to(device), images, labels, device)
    tokens = torch.randint(1024, (4, 128), device=device)
    steps("gpt 4 x 256, 4 x 128 tokens", Gpt().to(device), tokens, tokens.flatten(), device)
