"""Runs main_amp.py as users do, for a few steps on a handful of images."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

MAIN = Path(__file__).with_name("main_amp.py")
TIMEOUT_S = 240
COLOURS = {"blue": (40, 60, 200), "green": (50, 190, 60), "red": (210, 40, 50)}
IMAGES = {"train": 16, "val": 5}  # per class

SMALL = "-a resnet18 --b 16 --workers 0 --image-size 32 --augment none --seed 3 --deterministic"
SMALL += " --lr 0.1 --warmup-epochs 0"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Noisy images of three colours, easy to tell apart."""
    root = tmp_path_factory.mktemp("images")
    noise = random.Random(0)
    for part, count in IMAGES.items():
        for name, colour in COLOURS.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (32, 32))
                image.putdata(
                    [tuple(c + noise.randint(-40, 40) for c in colour) for _ in range(32 * 32)]
                )
                image.save(root / part / name / f"{number}.png")
    return root


def run(images: Path, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess:
    """main_amp.py with its standard arguments, started as the README says."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    launcher += ["--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(MAIN), str(images)]
    return subprocess.run(
        [*command, *SMALL.split(), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def train(images: Path, output: Path, *arguments: str, processes: int = 1) -> list[dict]:
    """A successful run: the records of its epochs."""
    history = output / "history.json"
    files = [f"--output={output}", f"--history={history}"]
    done = run(images, *files, *arguments, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(history.read_text())["epochs"]


def without_speed(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in record.items() if k != "images_per_s"} for record in records]


@pytest.mark.parametrize("optimizer", ["fused_sgd", "fused_adam"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_learns_at_every_level(level, optimizer, images, tmp_path):
    rate = {"fused_sgd": "0.1", "fused_adam": "0.01"}[optimizer]
    records = train(
        images,
        tmp_path,
        *f"--opt-level {level} --optimizer {optimizer} --lr {rate} --epochs 3".split(),
        f"--plot={tmp_path / 'plot.png'}",
    )
    assert [record["epoch"] for record in records] == [0, 1, 2]
    assert records[-1]["train_loss"] < 0.7 * records[0]["train_loss"]
    assert all(math.isfinite(record["val_loss"]) for record in records)
    # Dynamic scales start at 2 ** 16 and halve at an overflow, which the first steps may bring.
    scales = {1.0} if level in ("O0", "O5") else {2.0**k for k in range(10, 17)}
    assert records[-1]["loss_scale"] in scales
    with Image.open(tmp_path / "plot.png") as image:
        image.load()
    state = torch.load(tmp_path / "checkpoint.pth.tar", weights_only=True)
    assert {value.dtype for value in state["state_dict"].values()} == {torch.float32, torch.int64}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.pth.tar",
        "history.json",
        "model_best.pth.tar",
        "plot.png",
    ]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resume_is_exact(level, images, tmp_path):
    """One epoch, then another from the checkpoint, equals two epochs in one go, bit for bit."""
    straight = train(images, tmp_path / "straight", "--opt-level", level, "--epochs", "2")
    train(images, tmp_path / "first", "--opt-level", level, "--epochs", "1")
    checkpoint = tmp_path / "first" / "checkpoint.pth.tar"
    resumed = train(
        images,
        tmp_path / "second",
        *f"--opt-level {level} --epochs 2 --resume {checkpoint}".split(),
    )
    assert without_speed(resumed) == without_speed(straight)


def test_evaluate_prints_the_saved_scores(images, tmp_path):
    overrides = "--loss-scale 128.0 --keep-batchnorm-fp32 False --workers 2 --channels-last"
    (record,) = train(images, tmp_path, "--opt-level=O2", "--epochs=1", *overrides.split())
    assert record["loss_scale"] == 128
    checkpoint = tmp_path / "checkpoint.pth.tar"
    done = run(images, *f"--opt-level O2 --evaluate --resume {checkpoint} {overrides}".split())
    assert done.returncode == 0, done.stderr
    expected = f"validation loss {record['val_loss']:.4f}  top-1 {record['val_top1']:.2f} %"
    assert expected in done.stdout


def test_resume_of_another_run_is_refused(images, tmp_path):
    train(images, tmp_path, "--opt-level", "O0", "--epochs", "1")
    checkpoint = str(tmp_path / "checkpoint.pth.tar")
    done = run(images, "--opt-level=O1", "--optimizer=sgd", "--resume", checkpoint)
    assert done.returncode == 1
    assert (
        "was saved with opt_level O0, optimizer fused_sgd, "
        "but this run has opt_level O1, optimizer sgd." in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_resume_of_something_else_is_refused(images, tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    done = run(images, "--resume", str(tmp_path / "list.pt"))
    assert done.returncode == 1
    assert "is not a checkpoint of this example" in done.stderr


def test_profile(images, tmp_path):
    done = run(images, "--opt-level=O5", "--prof=2", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "Self CPU" in done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert (names.count("forward"), names.count("update")) == (2, 2)
    assert not (tmp_path / "checkpoint.pth.tar").exists()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_processes_with_sync_bn(level, images, tmp_path):
    train(
        images,
        tmp_path,
        *f"--opt-level {level} --b 8 --sync_bn --epochs 1".split(),
        processes=2,
    )


def test_two_processes_without_apex(images, tmp_path):
    options = "--plain --opt-level O4 --optimizer fused_adam --b 8 --epochs 1"
    (record,) = train(images, tmp_path, *options.split(), processes=2)
    assert 0 < record["train_loss"] < 10
    state = torch.load(tmp_path / "checkpoint.pth.tar", weights_only=True)
    identity = state["identity"]
    assert (identity["opt_level"], identity["optimizer"]) == ("O4, plain", "adamw")
    assert state["amp"] == {}  # bfloat16 has no loss scale


def test_two_processes_equal_one(images, tmp_path):
    """Two times 8 images with synchronized batch norm are one batch of 16."""
    common = ["--opt-level", "O0", "--epochs", "1", "--image-size", "64", "--lr", "0.05"]
    (together,) = train(images, tmp_path / "two", *common, "--b=8", "--sync_bn", processes=2)
    (alone,) = train(images, tmp_path / "one", *common, "--b=16")
    # Three steps: later ones amplify rounding. Batch norm of each process alone changes the first
    # loss by 2 %, gradients that are not averaged the epoch's by 4 %.
    assert together["train_loss"] == pytest.approx(alone["train_loss"], rel=5e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "/dev/null/folder"], "--output: cannot write into /dev/null/folder"),
        (["--plot", "/dev/null/plot.png"], "--plot: cannot write into /dev/null"),
        (["--b", "100"], "--batch-size: 100 images on each of 1 processes"),
        (["--opt-level", "O1", "--keep-batchnorm-fp32", "True"], "keep_batchnorm_fp32"),
    ],
)
def test_bad_arguments(arguments, message, images):
    done = run(images, *arguments)
    assert done.returncode == 1
    assert message in done.stderr


def test_resume_of_a_finished_run_says_so(images, tmp_path):
    train(images, tmp_path, "--opt-level", "O0", "--epochs", "1")
    checkpoint = str(tmp_path / "checkpoint.pth.tar")
    done = run(images, *f"--opt-level O0 --epochs 1 --resume {checkpoint}".split())
    assert done.returncode == 0
    assert "all 1 epochs are done" in done.stdout
