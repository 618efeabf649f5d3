"""Tests of the example's parts, within one process."""

import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

import demo
from checkpoint import check_writable, load_checkpoint, restore, save_checkpoint, write_atomically
from data import MEAN, STD, Batches, load_data
from digits import write_digits
from meters import Totals
from options import UsageError, parse_arguments
from plain import PlainTrainer
from plot import plot_histories
from processes import Processes
from schedule import learning_rate

CPU = torch.device("cpu")


def write_images(root: Path, classes: list[str], per_class: int) -> Path:
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            Image.new("RGB", (8, 8), (number, 0, 255)).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "train", ["a", "b"], per_class=6)
    write_images(tmp_path / "val", ["a", "b"], per_class=5)
    return tmp_path


def options(data: Path, **changes) -> Namespace:
    default = Namespace(
        data=data, augment="none", image_size=8, batch_size=3, workers=0, seed=0, evaluate=False
    )
    return Namespace(**(vars(default) | changes))


def test_known_command_line(folder):
    line = "-a resnet50 --b 128 --workers 4 --opt-level O2 --loss-scale 128.0 --sync_bn --prof 3"
    args = parse_arguments(
        [*line.split(), "--keep-batchnorm-fp32", "True", "--deterministic", "-e", str(folder)]
    )
    assert (args.arch, args.batch_size, args.workers) == ("resnet50", 128, 4)
    assert (args.opt_level, args.loss_scale, args.keep_batchnorm_fp32) == ("O2", "128.0", "True")
    assert (args.optimizer, args.lr, args.seed) == ("fused_sgd", 0.1, 0)
    assert args.sync_bn
    assert args.evaluate
    assert args.prof == 3


@pytest.mark.parametrize("flag", ["-b", "--b", "--batch-size"])
def test_batch_size_has_three_names(flag, folder):
    assert parse_arguments([flag, "7", str(folder)]).batch_size == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-a", "resnet5"], "did you mean resnet50"),
        (["-a", "inception_v3"], "auxiliary logits"),
        (["--opt-level", "02"], "invalid choice: '02'"),
        (["--loss-scale", "dynamics"], "expected 'dynamic' or a number > 0, got 'dynamics'"),
        (["--loss-scale", "-1"], "expected 'dynamic' or a number > 0, got '-1'"),
        (["--loss-scale", "nan"], "expected 'dynamic' or a number > 0, got 'nan'"),
        (["--keep-batchnorm-fp32", "yes"], "invalid choice: 'yes'"),
        (["--b", "0"], "expected an integer >= 1, got 0"),
        (["--workers", "-1"], "expected an integer >= 0, got -1"),
        (["--lr", "inf"], "expected a finite number >= 0, got inf"),
        (["--start-epoch", "90"], "90 leaves nothing to train of --epochs 90"),
        (["--plain", "--opt-level", "O2"], "expected --opt-level O0, O1, O4, got O2"),
        (["--plain", "--loss-scale", "8"], "the loss scale and batch norm are torch's own"),
        (["--resume", "absent.pth.tar"], "no such file: absent.pth.tar"),
    ],
)
def test_bad_arguments(arguments, message, folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([*arguments, str(folder)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert arguments[0] in error


def test_folder_without_val(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    with pytest.raises(SystemExit):
        parse_arguments([str(tmp_path)])
    assert "missing: val" in capsys.readouterr().err


def test_classes_must_agree(folder):
    write_images(folder / "val", ["c"], per_class=1)
    with pytest.raises(UsageError, match=r"differ in the classes \['c'\]"):
        load_data(options(folder), Processes(CPU))


def test_class_without_images(folder):
    (folder / "train" / "empty").mkdir()
    with pytest.raises(UsageError, match="empty"):
        load_data(options(folder), Processes(CPU))


def test_batch_larger_than_the_training_set(folder):
    with pytest.raises(UsageError, match=r"7 images on each of 2 processes make 14, but .* 12"):
        load_data(options(folder, batch_size=7), Processes(CPU, 0, 2))


def test_evaluation_needs_no_full_batch(folder):
    data = load_data(options(folder, batch_size=7, evaluate=True), Processes(CPU, 0, 2))
    assert sum(len(labels) for _, labels in data.val) == 5


def test_processes_share_the_images(folder):
    """Together they see every validation image once, and disjoint training images."""
    parts = [load_data(options(folder), Processes(CPU, rank, 3)) for rank in range(3)]
    val = [index for part in parts for index in part.val.dataset.indices]
    assert sorted(val) == list(range(10))
    train = [index for part in parts for index in part.sampler]
    assert sorted(train) == list(range(12))


@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_are_normalized(folder, channels_last):
    data = load_data(options(folder, batch_size=10), Processes(CPU))
    ((images, labels),) = Batches(data.val, CPU, channels_last)
    assert labels.tolist() == [0] * 5 + [1] * 5
    pixels = torch.tensor([3.0, 0.0, 255.0])  # of the fourth image
    expected = (pixels - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(images[3], expected.view(3, 1, 1).expand(3, 8, 8))
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_totals_weigh_batches_by_images():
    totals = Totals(Processes(CPU))
    totals.add(torch.tensor(1.0), torch.eye(6)[:4], torch.tensor([0, 1, 2, 5]))
    totals.add(torch.tensor(6.0), torch.eye(6)[:1], torch.tensor([1]))
    scores = totals.scores()
    assert scores.loss == pytest.approx((4 * 1 + 6) / 5)
    assert scores.top1 == pytest.approx(100 * 3 / 5)


def test_top5_of_three_classes_is_everything():
    totals = Totals(Processes(CPU))
    totals.add(torch.tensor(1.0), torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    assert totals.scores().top5 == 100


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(0.5, 0.1), (2.5, 0.5), (5, 1.0), (29.9, 1.0), (30, 0.1), (60, 0.01), (80, 0.001)],
)
def test_step_schedule(epoch, expected):
    lr = learning_rate(1.0, epoch, schedule="step", epochs=90, warmup_epochs=5)
    assert lr == pytest.approx(expected)


@pytest.mark.parametrize(("epoch", "expected"), [(0.5, 0.5), (1, 1.0), (2, 0.5), (3, 0.0)])
def test_cosine_schedule(epoch, expected):
    lr = learning_rate(1.0, epoch, schedule="cosine", epochs=3, warmup_epochs=1)
    assert lr == pytest.approx(expected)


def test_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def interrupted(file):
        file.write(b"half of the n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_probed(tmp_path):
    check_writable("--output", tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output: cannot write into .*file: File exists"):
        check_writable("--output", tmp_path / "file")


def test_digits(tmp_path):
    write_digits(tmp_path / "digits", size=16)
    train = {path.name for path in tmp_path.glob("digits/train/*/*.png")}
    val = {path.name for path in tmp_path.glob("digits/val/*/*.png")}
    assert (len(train), len(val), len(train & val)) == (1198, 599, 0)
    for digit in range(10):
        assert 55 <= len(list(tmp_path.glob(f"digits/val/{digit}/*.png"))) <= 65
    with Image.open(next(tmp_path.glob("digits/train/0/*.png"))) as image:
        assert (image.size, image.mode) == ((16, 16), "RGB")
    with pytest.raises(FileExistsError, match="choose another folder"):
        write_digits(tmp_path / "digits")


def test_plot_is_a_png(tmp_path):
    scores = {"val_loss": 0.5, "train_loss": 1.0, "val_top1": 90.0, "train_top1": 80.0}
    records = [{"epoch": epoch, **scores} for epoch in range(2)]
    plot_histories(tmp_path / "plot.png", {"one": {"O0": records}, "two": {"O1": records}})
    with Image.open(tmp_path / "plot.png") as image:
        image.load()
        assert image.height > 700  # two rows


def result(level, top1=98.0, images_per_s=100.0):
    return demo.Result("fused_sgd", level, 0.1, top1, images_per_s, epochs=[])


def test_demo_accepts_what_is_within_its_limits():
    results = [result("O0"), result("O1", top1=97.1), result("O5", images_per_s=76.0)]
    demo.compare(results)
    assert demo.failures(results) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (result("O1", top1=96.9), "O1 is 1.10 points less accurate than O0"),
        (result("O2", images_per_s=74.0), "O2 runs at 0.74 of O0's speed"),
        (result("O5", top1=math.nan), "O5 is nan points less accurate"),
    ],
)
def test_demo_rejects_what_is_not(bad, message):
    results = [result("O0"), bad]
    demo.compare(results)
    (text,) = demo.failures(results)
    assert message in text


def test_demo_needs_a_baseline_that_learned():
    results = [result("O0", top1=94.0)]
    demo.compare(results)
    assert "reached 94.00 %" in demo.failures(results)[0]


def arguments(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    return demo.parse_arguments()


def test_demo_is_short_unless_asked(monkeypatch):
    short, full = arguments(monkeypatch), arguments(monkeypatch, "--full", "--seeds", "3")
    assert (short.optimizers, short.levels, short.seeds) == (["fused_adam"], ["O0", "O5"], [0])
    assert (full.optimizers, full.levels) == (list(demo.OPTIMIZERS), list(demo.LEVELS))
    assert full.seeds == [3]  # what is named goes before what --full means
    assert arguments(monkeypatch, "--levels", "O2").levels == ["O0", "O2"]


def test_demo_tells_of_epochs_and_compiling_as_they_come(tmp_path, capsys):
    lines = "apex: compiling fused_adam\nnoise\nepoch 0: training\n"
    command = [sys.executable, "-c", f"print({lines!r}); raise SystemExit(3)"]
    assert demo.run_and_tell(command, tmp_path / "log", "O5") == 3
    assert capsys.readouterr().out == "  O5: apex: compiling fused_adam\n  O5: epoch 0: training\n"
    assert "noise" in (tmp_path / "log").read_text()


def test_demo_ends_what_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "RUN_LIMIT_S", 1)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert demo.run_and_tell(command, tmp_path / "log", "O5") < 0


class Part:
    """Something with a state, which refuses states that are negative."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if self.value < 0:
            raise ValueError("negative")


@pytest.mark.parametrize("state", [{"a": {"value": 5}}, {"a": {"value": 5}, "b": {"value": -5}}])
def test_restore_changes_all_parts_or_none(state):
    parts = {"a": Part(1), "b": Part(2)}
    with pytest.raises((KeyError, ValueError)):
        restore(parts, state)
    assert (parts["a"].value, parts["b"].value) == (1, 2)
    restore(parts, {"a": {"value": 3}, "b": {"value": 4}})
    assert (parts["a"].value, parts["b"].value) == (3, 4)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
def test_a_checkpoint_that_was_cut_off_is_refused(fraction, tmp_path):
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    save_checkpoint(tmp_path, network, optimizer, identity={}, epochs=[], is_best=False)
    path = tmp_path / "checkpoint.pth.tar"
    data = path.read_bytes()
    path.write_bytes(data[: int(fraction * len(data))])
    with pytest.raises(UsageError, match="not a whole one"):
        load_checkpoint(path, network, optimizer, identity={}, device=CPU)


def test_a_plain_runs_loss_scale_is_in_its_checkpoint(tmp_path):
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    args = Namespace(batch_size=1, lr=0.1, opt_level="O1")
    saved, resumed = (PlainTrainer(args, Processes(CPU), network, optimizer) for _ in range(2))
    saved.scaling.scale(torch.ones(()))  # which takes its first value now
    saved.scaling.update(8.0)
    common = {"identity": {}, "scaling": saved.scaling}
    save_checkpoint(tmp_path, network, optimizer, epochs=[], is_best=False, **common)
    path = tmp_path / "checkpoint.pth.tar"
    common["scaling"] = resumed.scaling
    load_checkpoint(path, network, optimizer, device=CPU, **common)
    assert resumed.loss_scale() == 8.0
