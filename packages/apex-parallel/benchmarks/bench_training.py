"""docs/examples/gpt and imagenet with Apex's parts, and with torch's own (`--plain`), side by side.

Both ways begin with the same weights and see the same batches, which are loaded before. They take
turns in one process: rounds of a step on a CPU, of several on a GPU, whose median counts. The loss
is of held-out data after all steps; the peak memory is that of a model, its optimizer and three
steps, alone.
"""

import contextlib
import ctypes
import gc
import importlib.util
import io
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex_testkit import bench_turns
from apex_testkit.bench import chosen_device, record_samples
from apex_testkit.load import LoadMeter

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
WARM_UP = 3
WAYS = {"apex": [], "torch": ["--plain"]}


@dataclass(frozen=True)
class Size:
    """Options of an example; how many rounds each way trains, and of how many steps."""

    options: str
    rounds: int
    steps: int = 1


GPT = {
    "cpu": Size("--micro-batch-size=4", 120),
    "cuda": Size(
        "--layers=12 --hidden=768 --heads=12 --sequence=1024 --micro-batch-size=8", 15, 30
    ),
}
IMAGENET = {
    "cpu": Size("-a resnet18 --image-size=32 --b=64", 180),
    "cuda": Size("-a resnet50 --image-size=224 --b=128", 15, 18),
}
SCHEDULE = "--optimizer=fused_adam --lr=0.004 --schedule=cosine --warmup-epochs=1 --seed=0"
SCHEDULE += " --channels-last --workers=0 --augment=shift"
# Of imagenet, without and with casts: torch.amp in bfloat16 is O4.
LEVELS = {"float32": "O0", "bfloat16": "O4"}


@dataclass(frozen=True)
class Training:
    """One way to train: a step, and the loss on held-out data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]
    loss: Callable[[], float]
    work: int  # tokens or pictures of a step


@contextlib.contextmanager
def example(name: str) -> Iterator[None]:
    """Import from an example's folder; others have modules of the same names."""
    folder = str(EXAMPLES / name)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for key, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "").parent == Path(folder):
                del sys.modules[key]


def gpt(folder: Path, device: str, size: Size) -> None:
    import layout
    import train

    place, text = layout.start_processes(1, 1), folder / "text.bin"
    options = [*size.options.split(), f"--steps={WARM_UP + size.rounds * size.steps}"]
    common = train.parse_arguments(options)
    train.write_text(text, common.text_bytes)
    train.set_up_batches(common)

    def make(way: str, dtype: str) -> Training:
        args = train.parse_arguments([*options, f"--dtype={dtype}", *WAYS[way]])
        args.text = text
        with contextlib.redirect_stdout(io.StringIO()):  # the number of parameters
            trainer = train.Trainer(args, place)
        tokens = args.global_batch_size * args.sequence
        parts = trainer.model, trainer.optimizer, trainer.step, trainer.validation_loss
        return Training(*parts, tokens)

    try:
        for dtype in ("float32", "bfloat16"):
            measure("gpt", "tokens", dtype, make, device, size)
    finally:
        layout.stop_processes()


def imagenet(folder: Path, device: str, size: Size) -> None:
    import digits
    import main_amp
    import options
    import processes

    digits.write_digits(folder / "digits")
    line = [str(folder / "digits"), f"--output={folder}", *SCHEDULE.split()]
    line += size.options.split()
    data: dict[str, list] = {}

    def make(way: str, dtype: str) -> Training:
        if getattr(_amp_state, "handle", None) is not None:
            _amp_state.handle._deactivate()  # of the case before
        own = [f"--opt-level={LEVELS[dtype]}", *WAYS[way]]
        args = options.parse_arguments([*line, *own])
        with contextlib.redirect_stdout(io.StringIO()):  # what amp says of the level
            run = main_amp.Run(args, processes.start_processes(0))
        if not data:
            data["train"] = list(run.batches(run.data.train))
            data["val"] = list(run.batches(run.data.val))
        trainer, batches, numbers = run.trainer, data["train"], itertools.count()
        args.epochs = max(2, math.ceil((WARM_UP + size.rounds * size.steps) / len(batches)))
        # Of O4 there remain, in both ways' turns, rules for functions that this network lacks.
        casts = amp.disable_casts if args.plain else contextlib.nullcontext

        def step() -> tuple:
            number = next(numbers)
            trainer.set_learning_rate((number + 0.5) / len(batches))
            with casts():
                return trainer.train_step(*batches[number % len(batches)])

        def loss() -> float:
            with casts():
                return trainer.validate(data["val"]).loss

        trainer.model.train()
        return Training(trainer.model, trainer.optimizer, step, loss, args.batch_size)

    for dtype in LEVELS:
        measure("imagenet", "pictures", dtype, make, device, size)


def measure(
    name: str,
    work: str,
    dtype: str,
    make: Callable[[str, str], Training],
    device: str,
    size: Size,
) -> None:
    """Let both ways train in turns, and record them."""
    op = f"training {name}"
    if not bench_turns.current.takes(op, dtype):
        return
    # Twice: what libraries keep belongs to neither way, and counts the first time only.
    peaks = {way: peak_bytes(lambda way=way: make(way, dtype), device) for way in [*WAYS, *WAYS]}
    trainings = {way: make(way, dtype) for way in reversed(WAYS)}  # amp's casts come last
    for training in trainings.values():
        seconds(training, WARM_UP)
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    meter = LoadMeter()
    for number in range(size.rounds):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            samples[way].append(seconds(trainings[way], size.steps) / size.steps * 1e6)
    load = meter.read()
    facts = {
        way: {"work": work, "work_per_step": t.work, "peak_bytes": peaks[way], "loss": t.loss()}
        for way, t in trainings.items()
    }
    record_samples(op, dtype, samples, load, device, facts)


def seconds(training: Training, steps: int) -> float:
    begun = time.perf_counter()
    for _ in range(steps):
        training.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def peak_bytes(make: Callable[[], Training], device: str) -> int | None:
    """Return what a model, its optimizer and its steps took at most; None where nobody counts."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds(make(), WARM_UP)
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is today's size
        before = resident_bytes("VmRSS")
        seconds(make(), WARM_UP)
        return resident_bytes("VmHWM") - before
    except (AttributeError, OSError):  # no glibc, no Linux
        return None


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    device = chosen_device()
    if device == "cpu" and torch.cuda.is_available():
        sys.exit("The examples train on the GPU that is here; hide it: CUDA_VISIBLE_DEVICES=''")
    torch.backends.cudnn.benchmark = True  # as main_amp.py does
    for measured, sizes in ((gpt, GPT), (imagenet, IMAGENET)):
        if measured is imagenet and importlib.util.find_spec("torchvision") is None:
            print("imagenet is left out: torchvision is not installed")
            break
        with tempfile.TemporaryDirectory() as folder, example(measured.__name__):
            measured(Path(folder), device, sizes[device])


if __name__ == "__main__":
    main()
