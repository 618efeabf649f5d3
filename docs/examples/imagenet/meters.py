"""Scores, speed, and the progress bar that shows them."""

import sys
import time
from dataclasses import dataclass

import torch
from processes import Processes
from tqdm import tqdm


@dataclass(frozen=True)
class Scores:
    """Averages over images; accuracies in percent."""

    loss: float
    top1: float
    top5: float

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  top-1 {self.top1:.2f} %  top-5 {self.top5:.2f} %"


class Totals:
    """Sums over images, kept on the device: only reading them waits for it."""

    def __init__(self, processes: Processes):
        self.processes = processes
        # loss, correct first guesses, correct in five guesses, images
        self.sums = torch.zeros(4, dtype=torch.float64, device=processes.device)

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """``loss``: the batch's mean, a scalar; ``logits`` [batch, classes]; ``labels`` [batch]."""
        guesses = logits.topk(min(5, logits.size(1)), dim=1).indices
        right = guesses == labels.unsqueeze(1)
        images = torch.full_like(loss, len(labels), dtype=torch.float64)
        self.sums += torch.stack([loss * images, right[:, 0].sum(), right.sum(), images])

    def scores(self) -> Scores:
        """Averages over the images of all processes, which must call this together."""
        loss, top1, top5, images = self.processes.total(self.sums.clone()).tolist()
        return Scores(loss / images, 100 * top1 / images, 100 * top5 / images)


class Speedometer:
    """Images per second of all processes, without the first step: it builds and tunes kernels."""

    def __init__(self, images_per_step: int, device: torch.device):
        self.images_per_step = images_per_step
        self.device = device
        self.timed_steps = -1
        self.begun_s = 0.0

    def step(self) -> None:
        self.timed_steps += 1
        if self.timed_steps == 0:
            self.begun_s = self.now_s()

    def now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def images_per_s(self) -> float | None:
        """None until the second step has ended."""
        if self.timed_steps < 1:
            return None
        return self.timed_steps * self.images_per_step / (self.now_s() - self.begun_s)


class Progress:
    """A bar on a terminal; in a log, a line every ``print_freq`` steps."""

    def __init__(self, title: str, steps: int, print_freq: int, processes: Processes):
        self.title = title
        self.print_freq = print_freq
        self.visible = processes.is_main
        self.on_terminal = self.visible and sys.stderr.isatty()
        self.bar = tqdm(total=steps, desc=title, leave=False, disable=not self.on_terminal)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception) -> None:
        self.bar.close()

    def step(self, step: int, totals: Totals, speed: Speedometer | None = None) -> None:
        """Count ``step``, from 0; every process calls it, because reading scores is collective."""
        self.bar.update()
        if (step + 1) % self.print_freq:
            return
        text = str(totals.scores())
        images_per_s = speed.images_per_s() if speed else None
        if images_per_s is not None:
            text += f"  {images_per_s:.1f} images/s"
        if self.on_terminal:
            self.bar.set_postfix_str(text)
        elif self.visible:
            print(f"{self.title}, step {step + 1}/{self.bar.total}: {text}", flush=True)
