"""docs/examples/megatron: a GPT of megatron-core without Transformer Engine, and an error."""

import re
import runpy
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import fused_weight_gradient_mlp_cuda
import pytest
import scaled_upper_triang_masked_softmax_cuda
import torch
from megatron.core import ModelParallelConfig
from megatron.core.fusions import fused_layer_norm
from megatron.core.tensor_parallel import layers

import apex.optimizers

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "megatron"
STEPS, MICRO_BATCHES, LAYERS = 20, 2, 4


@pytest.fixture
def train(monkeypatch):
    """The example's ``main`` for a process that torchrun would have started alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return runpy.run_path(str(EXAMPLE / "train.py"))["main"]


def count(monkeypatch, owner, name):
    """Count calls of a function that goes on working."""
    calls, own = [], getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return own(*args, **kwargs)

    is_type = isinstance(owner, type) and name == "apply"
    monkeypatch.setattr(owner, name, staticmethod(counted) if is_type else counted)
    return calls


def test_trains_as_without_our_functions(train, monkeypatch):
    """Losses and gradient norms of megatron-core's unfused operations, in bfloat16."""
    counter = partial(count, monkeypatch)
    products = counter(fused_weight_gradient_mlp_cuda, "wgrad_gemm_accum_fp32")
    softmaxes = counter(scaled_upper_triang_masked_softmax_cuda, "forward")
    norms = counter(fused_layer_norm.FusedLayerNormAffineFunction, "apply")
    steps = counter(apex.optimizers.FusedAdam, "step")
    ours = train([f"--steps={STEPS}"])
    passes = STEPS * MICRO_BATCHES
    assert len(products) == passes * (4 * LAYERS + 1)  # four products a layer, and the head
    assert len(softmaxes) == passes * LAYERS
    assert len(norms) == passes * (2 * LAYERS + 1)
    assert len(steps) == STEPS
    plain = train([f"--steps={STEPS}", "--plain"])
    assert len(products) == passes * (4 * LAYERS + 1)  # as before: none was called
    for (loss, norm), (plain_loss, plain_norm) in zip(ours, plain, strict=True):
        assert loss == pytest.approx(plain_loss, rel=2e-3)
        assert norm == pytest.approx(plain_norm, rel=2e-2)
    assert ours[-1][0] < 0.5 * ours[0][0]


def test_the_command_on_two_processes(train):
    """Tensor parallelism: what it prints are losses and gradient norms of one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(EXAMPLE / "train.py"), f"--steps={STEPS}"]
    command += ["--tensor-model-parallel-size=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"step (\d+)/\d+  loss ([\d.]+)  norm ([\d.]+)", done.stdout)
    assert [step for step, *_ in printed] == ["1", "10", "20"]
    alone = train([f"--steps={STEPS}"])
    for step, *values in printed:
        loss, norm = map(float, values)
        assert loss == pytest.approx(alone[int(step) - 1][0], rel=2e-3)
        assert norm == pytest.approx(alone[int(step) - 1][1], rel=2e-2)


def test_troubleshooting_has_the_error_of_those_without(monkeypatch):
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    config = ModelParallelConfig(gradient_accumulation_fusion=True, use_cpu_initialization=True)
    with pytest.raises(RuntimeError) as error:
        layers.ColumnParallelLinear(8, 8, config=config, init_method=torch.nn.init.zeros_)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    (title,) = re.findall(r"^### `(ColumnParallelLinear .*)`$", page, re.M)
    assert title in str(error.value)
