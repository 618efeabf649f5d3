"""Ops for GPUs from end to end without a card: tests of packages, on the card that is fake.

Each op's own tests compare with float64. The library is the wheel's, where one is installed.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import card
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent

pytestmark = pytest.mark.builds


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Return a function that gives the environment of a maker's card."""

    @functools.cache
    def of(maker):
        folder = tmp_path_factory.mktemp(maker)
        paths = [str(HERE), str(ROOT)]
        cache = {"APEX_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
        return os.environ | card.build(folder, maker) | cache

    return of


# Of each engine, every shape of one test: rows and their columns, lists without and with sums,
# segments (with shared memory whose size a launch says), samples.
@pytest.mark.parametrize(
    ("maker", "file", "test", "kernels"),
    [
        ("nvidia", "normalization/tests/test_fused_layer_norm.py", "test_affine", 4),
        ("nvidia", "optimizers/tests/test_fused_adam.py", "test_options_follow", 1),
        ("nvidia", "optimizers/tests/test_multi_tensor_l2norm.py", "test_l2norm_of_all_and", 3),
        ("nvidia", "contrib/tests/test_index_mul_2d.py", "test_matches_the_oracle", 6),
        ("nvidia", "contrib/tests/test_group_norm.py", "test_other_dimensions", 3),
        ("amd", "normalization/tests/test_fused_layer_norm.py", "test_affine", 4),
        ("amd", "optimizers/tests/test_fused_adam.py", "test_options_follow", 1),
    ],
)
def test_ops_on_the_card(environment, maker, file, test, kernels):
    options = ["-q", "-p", "card", "-p", "ci.sampling", "--cases-per-test", "1", "--every-shape"]
    options += ["0", "--device-tests-only", "--device", "cpu", "--timeout", "300"]
    command = [sys.executable, "-m", "pytest", *options, f"packages/apex-{file}", "-k", test]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(maker), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-8000:]
    said = re.search(r"fake card: (\d+) launches, (\d+) kernels compiled", done.stdout)
    launches, compiled = map(int, said.groups())
    assert launches >= compiled >= kernels


TWO_CARDS = """
import ctypes, os, threading
import card
driver = card.insert()
maker = os.environ[card.MAKER]
torch_gpu = ctypes.CDLL(f"{os.environ[card.FOLDER]}/{card.LIBRARIES[maker][1]}")
import torch
from apex.normalization import FusedLayerNorm

norm, x = FusedLayerNorm(33), torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
expected = torch.nn.functional.layer_norm(x.double(), [33])

def call(device):
    torch_gpu.fake_device(device)
    assert (norm(x) - expected).abs().max() < 1e-6
    assert driver.fake_context() == 0  # as before the call

for device in (0, 1, 0, 1):
    call(device)
thread = threading.Thread(target=call, args=(1,))
thread.start(); thread.join()
assert driver.fake_loads() == driver.fake_compilations() == 2
assert driver.fake_launches() == 5

driver.fake_refuse(b"hipModuleLaunchKernel" if maker == "amd" else b"cuLaunchKernel")
try:
    norm(x)
except RuntimeError as error:
    print(error)
driver.fake_refuse(b"")
call(0)
"""


@pytest.mark.parametrize(
    ("maker", "kept"),
    [
        ("nvidia", {"nvrtc-13.7-sm_90", "nvrtc-13.7-sm_120"}),
        ("amd", {"hiprtc-6.4.43482-gfx942", "hiprtc-6.4.43482-gfx1100"}),
    ],
)
def test_two_cards_of_two_kinds_and_a_launch_that_fails(environment, tmp_path, maker, kept):
    done = subprocess.run(
        [sys.executable, "-c", TWO_CARDS],
        cwd=HERE,
        env=environment(maker) | {"APEX_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "rowwise: launch failed: unknown error."
    assert {path.parent.name for path in tmp_path.rglob("*.kernel")} == kept
