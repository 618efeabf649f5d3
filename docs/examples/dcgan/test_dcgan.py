"""Runs the DCGAN example as users do, on drawn images and small models."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MAIN = Path(__file__).with_name("main_amp.py")


def run(folder, *arguments):
    options = ["--dataset=fake", "--dry-run", "--manualSeed=3", f"--outf={folder}", *arguments]
    return subprocess.run(
        [sys.executable, str(MAIN), *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_dry_run(level, tmp_path):
    done = run(tmp_path, f"--opt-level={level}")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"loss_D (\S+) loss_G (\S+) loss scales \[(.*)\]", done.stdout)
    assert len(steps) == 2
    assert all(0 < float(loss) < 50 for step in steps for loss in step[:2])
    scales = [float(scale) for scale in steps[-1][2].split(",")]
    assert len(scales) == 3
    assert all(scale >= 1024 if level in ("O1", "O2") else scale == 1 for scale in scales)
    assert (tmp_path / "samples_000.png").read_bytes().startswith(b"\x89PNG")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert list(state["amp"]) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    dtypes = {v.dtype for v in state["generator"].values() if v.is_floating_point()}
    assert dtypes == {torch.float32}
    assert not list(tmp_path.glob(".*"))


def test_resume(tmp_path):
    assert run(tmp_path).returncode == 0
    checkpoint = tmp_path / "checkpoint.pt"
    done = run(tmp_path, f"--resume={checkpoint}")
    assert done.returncode == 0, done.stderr
    assert "loss_D" not in done.stdout  # the one epoch of a dry run is behind it


def test_resume_at_another_level_is_refused(tmp_path):
    assert run(tmp_path, "--opt-level=O0").returncode == 0
    done = run(tmp_path, "--opt-level=O2", f"--resume={tmp_path / 'checkpoint.pt'}")
    assert done.returncode == 1
    assert "was saved at opt level O0, but this run has O2" in done.stderr


def test_fewer_images_than_a_batch(tmp_path):
    from PIL import Image

    images, output = tmp_path / "images", tmp_path / "output"
    (images / "all").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (16, 16)).save(images / "all" / f"{number}.png")
    done = run(output, "--dataset=folder", f"--dataroot={images}")
    assert done.returncode == 1
    assert "--batchSize: 8 is more than the 3 images of --dataset folder" in done.stderr
    assert not output.exists()


def test_wrong_size(tmp_path):
    script = "import networks; networks.Generator(30, 4, 4, 3)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=MAIN.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "expected 16, 32, 64, 128 or the like, got 30" in done.stderr
