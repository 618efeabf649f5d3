"""Optimizers in threads of their own, and the first calls of their operators from all at once."""

import functools
import gc
import subprocess
import sys

import pytest
import torch

from apex import optimizers
from apex.optimizers.fused_adam.buckets import ADAM
from apex.optimizers.stepping.held_lists import MIN_TENSORS
from apex_testkit.threads import together

CLASSES = [name for name in optimizers.__all__ if name.startswith("Fused")]

# In a process where no library is loaded yet. Two threads begin with each operator.
FIRST_CALLS = """
import sys, sysconfig, threading, time
import torch
from apex import optimizers
from apex.optimizers._ops import library

open_, opened = library._open, []
def open_slowly(path):
    opened.append(str(path))
    time.sleep(0.05)
    return open_(path)
library._open = open_slowly

def step(name):
    param = torch.nn.Parameter(torch.arange(100.0))
    optimizer = getattr(optimizers, name)([param], lr=0.1)
    param.grad = torch.linspace(-1, 1, 100)
    optimizer.step()
    return param.detach()

names = sys.argv[1:] * 2
start, found = threading.Barrier(len(names)), {}
def work(i):
    start.wait(60)
    found[i] = step(names[i])
threads = [threading.Thread(target=work, args=(i,)) for i in range(len(names))]
for thread in threads: thread.start()
for thread in threads: thread.join()

assert opened and len(opened) == len(set(opened)), opened
for i, name in enumerate(names):
    assert torch.equal(found[i], step(name)), name
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    assert not sys._is_gil_enabled(), "an import has switched the GIL on"
"""


def test_the_first_calls_of_all_threads_load_each_library_once(tmp_path):
    command = [sys.executable, "-c", FIRST_CALLS, *CLASSES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def trained(name, seed, device):
    """Values after some steps on many small tensors, which C++ holds from the second step on."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        sizes = [3 + i % 5 for i in range(MIN_TENSORS + 3)]
        return [torch.randn(n, generator=generator).to(device) for n in sizes]

    params = [torch.nn.Parameter(value) for value in draw()]
    optimizer = getattr(optimizers, name)(params, lr=0.1, weight_decay=0.01)
    for _ in range(6):
        for param, grad in zip(params, draw(), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", CLASSES)
def test_two_optimizers_in_two_threads(name, device):
    """They get the bits that they get one after the other."""
    functions = [functools.partial(trained, name, seed, device) for seed in range(2)]
    expected = [function() for function in functions]
    for of_one, of_thread in zip(expected, together(*functions), strict=True):
        assert all(map(torch.equal, of_one, of_thread))
    assert not torch.equal(expected[0][0], expected[1][0])


def test_lists_come_and_go_in_all_threads(device):
    """C++ has one table of them for all optimizers, and torch calls it without the GIL."""
    gc.collect()
    like = torch.empty(0, device=device)
    before = ADAM.held.count(like)

    def hold_and_release():
        params = [torch.ones(1, device=device)]
        numbers = [ADAM.held.hold(params, [], [], [], [], []) for _ in range(10_000)]
        for number in numbers:
            ADAM.held.release(like, number)
        return numbers

    found = together(*[hold_and_release] * 4)
    assert ADAM.held.count(like) == before
    assert len({number for numbers in found for number in numbers}) == 40_000
