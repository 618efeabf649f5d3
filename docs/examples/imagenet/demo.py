"""Train on handwritten digits in float32 and in mixed precision, and compare.

Calls main_amp.py at O0 and O5 with FusedAdam; with --full at O0, O1, O2 and O5, with two optimizers
and two seeds. Ends with a table of loss, accuracy and speed, demo.json and demo.png; fails if a
lower precision is less accurate than O0 by more than a point, or slower by more than a quarter.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch
from checkpoint import write_atomically
from digits import write_digits
from plot import plot_histories

HERE = Path(__file__).resolve().parent
OPTIMIZERS = ("fused_sgd", "fused_adam")
LEVELS = ("O0", "O1", "O2", "O5")  # the first is what the others are compared with
SHORT = {"optimizers": ["fused_adam"], "levels": ["O0", "O5"], "seeds": [0]}
FULL = {"optimizers": list(OPTIMIZERS), "levels": list(LEVELS), "seeds": [0, 1]}

IMAGE_SIZE = 32  # pixels
LEARNING_RATES = {"fused_sgd": 0.1, "fused_adam": 0.004}  # for a batch of 256
TRAINING = {
    "arch": "resnet18",
    "batch-size": 64,
    "workers": 0,  # two cores have nothing left for them, and the images are tiny
    "augment": "shift",
    "image-size": IMAGE_SIZE,
    "schedule": "cosine",
    "warmup-epochs": 1,
}

# Of all levels alike. As glibc is set, tensors of some megabytes are mapped anew at every call, and
# page faults then take a third of the time of the levels that cast.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
}

LARGEST_ACCURACY_LOSS = 1.0  # percentage points
LEAST_SPEED = 0.75  # of O0's images per second
LEAST_ACCURACY = 95.0  # %; below, O0 itself has not learned and the comparison says nothing
RUN_LIMIT_S = 900


@dataclass
class Result:
    """One optimizer at one level, averaged over the seeds."""

    optimizer: str
    opt_level: str
    loss: float
    top1: float  # %
    images_per_s: float
    epochs: list[dict]
    top1_change: float = 0.0  # percentage points against O0
    speed: float = 1.0  # of O0's images per second


def train(data: Path, output: Path, optimizer: str, level: str, seed: int, epochs: int) -> list:
    """One call of main_amp.py, whose epochs are printed as they end: the records of its epochs."""
    folder = output / f"{optimizer}-{level}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    history = folder / "history.json"
    options = TRAINING | {
        "lr": LEARNING_RATES[optimizer],
        "optimizer": optimizer,
        "opt-level": level,
        "seed": seed,
        "epochs": epochs,
        "output": folder,
        "history": history,
    }
    command = [sys.executable, str(HERE / "main_amp.py"), str(data), "--channels-last"]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = folder / "log.txt"
    status = run_and_tell(command, log, f"{optimizer} {level} seed {seed}")
    if status:
        end = "\n".join(log.read_text().splitlines()[-25:])
        sys.exit(f"demo.py: {' '.join(command)} ended with status {status}:\n{end}")
    return json.loads(history.read_text())["epochs"]


def run_and_tell(command: list[str], log: Path, name: str) -> int:
    """Run, write all that it prints to the log, and print what matters to who waits."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=MALLOC | os.environ,
    )
    limit = threading.Timer(RUN_LIMIT_S, process.kill)
    limit.start()
    try:
        with process, open(log, "w") as file:
            for line in process.stdout:
                file.write(line)
                if line.startswith(("epoch ", "apex")):
                    print(f"  {name}: {line}", end="", flush=True)
    finally:
        limit.cancel()
    return process.returncode


def images_per_s(epochs: list[dict]) -> float:
    """The fastest epoch's: what else runs on the machine can only slow an epoch down."""
    return max(record["images_per_s"] for record in epochs)


def averaged(histories: list[list[dict]]) -> list[dict]:
    """The mean over seeds of every number of every epoch."""
    return [
        {name: mean(record[name] for record in records) for name in records[0]}
        for records in zip(*histories, strict=True)
    ]


def measure(data: Path, args: argparse.Namespace) -> list[Result]:
    """Train every combination; seeds outermost, so that a busy minute does not hit one level."""
    histories: dict[tuple[str, str], list] = {}
    runs = [(s, o, lv) for s in args.seeds for o in args.optimizers for lv in args.levels]
    for number, (seed, optimizer, level) in enumerate(runs, 1):
        begun_s = time.perf_counter()
        epochs = train(data, args.output, optimizer, level, seed, args.epochs)
        histories.setdefault((optimizer, level), []).append(epochs)
        print(
            f"[{number}/{len(runs)}] {optimizer} {level} seed {seed}: "
            f"top-1 {epochs[-1]['val_top1']:.2f} %, {images_per_s(epochs):.0f} images/s "
            f"({time.perf_counter() - begun_s:.0f} s)",
            flush=True,
        )
    results = []
    for (optimizer, level), per_seed in histories.items():
        epochs = averaged(per_seed)
        last, fastest = epochs[-1], max(images_per_s(epochs) for epochs in per_seed)
        results.append(
            Result(optimizer, level, last["val_loss"], last["val_top1"], fastest, epochs)
        )
    return results


def compare(results: list[Result]) -> None:
    baselines = {r.optimizer: r for r in results if r.opt_level == LEVELS[0]}
    for result in results:
        baseline = baselines[result.optimizer]
        result.top1_change = result.top1 - baseline.top1
        result.speed = result.images_per_s / baseline.images_per_s


def remeasure(data: Path, args: argparse.Namespace, results: list[Result]) -> None:
    """Time slow levels once more, right beside O0: other work on the machine comes and goes."""
    for result in results:
        if result.speed >= LEAST_SPEED:
            continue
        first = result.speed
        again = {
            level: images_per_s(train(data, args.output / "again", result.optimizer, level, 0, 3))
            for level in (LEVELS[0], result.opt_level)
        }
        result.speed = again[result.opt_level] / again[LEVELS[0]]
        result.images_per_s = again[result.opt_level]
        print(
            f"{result.optimizer} {result.opt_level}: measured again, {result.speed:.2f} of "
            f"{LEVELS[0]}'s speed (at first {first:.2f})"
        )


def failures(results: list[Result]) -> list[str]:
    """What does not hold, in words."""
    texts = []
    for r in results:
        name = f"{r.optimizer} {r.opt_level}"
        if r.opt_level == LEVELS[0] and not r.top1 >= LEAST_ACCURACY:
            texts.append(f"{name} reached {r.top1:.2f} %, expected at least {LEAST_ACCURACY} %.")
        if not r.top1_change >= -LARGEST_ACCURACY_LOSS:  # also when it is nan
            texts.append(
                f"{name} is {-r.top1_change:.2f} points less accurate than {LEVELS[0]}, "
                f"allowed are {LARGEST_ACCURACY_LOSS}."
            )
        if r.speed < LEAST_SPEED:
            texts.append(
                f"{name} runs at {r.speed:.2f} of {LEVELS[0]}'s speed, measured twice; at least "
                f"{LEAST_SPEED} is expected. `main_amp.py --prof 10` shows where the time goes."
            )
    return texts


def table(results: list[Result]) -> str:
    lines = [f"{'optimizer':<12}{'level':<7}{'loss':>8}{'top-1':>10}{'vs O0':>8}{'images/s':>10}"]
    lines[0] += f"{'vs O0':>8}"
    for r in results:
        lines.append(
            f"{r.optimizer:<12}{r.opt_level:<7}{r.loss:>8.4f}{r.top1:>8.2f} %{r.top1_change:>+8.2f}"
            f"{r.images_per_s:>10.0f}{r.speed:>7.2f}x"
        )
    return "\n".join(lines)


def report(
    output: Path, args: argparse.Namespace, results: list[Result], failed: list[str]
) -> None:
    """Write demo.json and demo.png."""
    document = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seeds": args.seeds,
        "results": [asdict(result) for result in results],
        "failures": failed,
    }
    text = json.dumps(document, indent=1)
    write_atomically(output / "demo.json", lambda file: file.write(text.encode()))
    rows = {
        f"resnet18 on handwritten digits, {optimizer}": {
            r.opt_level: r.epochs for r in results if r.optimizer == optimizer
        }
        for optimizer in args.optimizers
    }
    plot_histories(output / "demo.png", rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare amp's levels on real images; a minute on two CPU cores, with --full "
        "seven."
    )
    add = parser.add_argument
    add("--full", action="store_true", help="all levels, optimizers and two seeds")
    add("--output", type=Path, default=Path("demo_output"), metavar="DIR")
    add("--optimizers", nargs="+", choices=OPTIMIZERS)
    add("--levels", nargs="+", choices=LEVELS, help=f"{LEVELS[0]} is always among them")
    add("--epochs", type=int, default=8, metavar="N")
    add("--seeds", type=int, nargs="+", metavar="N", help="runs to average over")
    args = parser.parse_args()
    for name, value in (FULL if args.full else SHORT).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.levels = sorted({LEVELS[0], *args.levels})
    return args


def main() -> None:
    args = parse_arguments()
    begun_s = time.perf_counter()
    data = args.output / f"digits-{IMAGE_SIZE}px"
    if not data.exists():
        write_digits(data, size=IMAGE_SIZE)
    print(
        f"resnet18 on {IMAGE_SIZE}x{IMAGE_SIZE} images of digits, {args.epochs} epochs a run. "
        "Fused kernels are compiled at their first call, some seconds each, and kept.",
        flush=True,
    )
    results = measure(data, args)
    compare(results)
    remeasure(data, args, results)
    failed = failures(results)
    report(args.output, args, results, failed)
    print(f"\n{table(results)}\n")
    print(f"{args.output / 'demo.json'} and {args.output / 'demo.png'} written.")
    print(f"The demo took {time.perf_counter() - begun_s:.0f} s.")
    if failed:
        sys.exit("\n".join(f"demo.py: {text}" for text in failed))


if __name__ == "__main__":
    main()
