"""Where kernels are neither prebuilt nor can be built, the constructor says so."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from apex import optimizers
from apex.optimizers import _ops
from apex.optimizers.stepping import optimizer as stepping

_ops.library.manifest = lambda: {}  # also where this test runs on a wheel with kernels
# CPUOffload's error is that of FusedAdam.
classes = [getattr(optimizers, name) for name in optimizers.__all__ if name.startswith("Fused")]
for cls in classes:
    try:
        cls([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    except RuntimeError as error:
        assert f"{cls.__name__}: the kernels of" in str(error), error
        assert "because APEX_JIT=0 forbids compiling them." in str(error), error
    else:
        raise AssertionError(cls)

# Copies are made without a constructor, and find out in their first step.
stepping.require_kernels = lambda *arguments: None
for cls in classes:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([param], lr=0.1)
    param.grad = torch.ones(3)
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "APEX_JIT=0" in str(error), error
    else:
        raise AssertionError(cls)
    assert not optimizer.state, (cls, optimizer.state)
print("refused")
"""


@pytest.mark.slow
def test_optimizers_are_refused_without_kernels(tmp_path):
    environment = {**os.environ, "APEX_JIT": "0", "APEX_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert result.stdout.strip() == "refused", result.stderr
