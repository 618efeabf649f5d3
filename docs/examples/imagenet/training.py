"""One epoch of training or validation, or a few profiled steps."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from data import Batches
from meters import Progress, Scores, Speedometer, Totals
from processes import Processes
from schedule import learning_rate
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity

from apex import amp

WARMUP_STEPS = 3  # before profiling: they build, tune and allocate


class Trainer:
    """A model, initialized by amp and perhaps wrapped for several processes, and its optimizer."""

    def __init__(
        self,
        args: Namespace,
        processes: Processes,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self.args = args
        self.processes = processes
        self.model = model
        self.optimizer = optimizer
        self.images_per_step = args.batch_size * processes.world_size
        self.peak_lr = args.lr * self.images_per_step / 256
        self.scaling: Any = amp  # whose state belongs to a checkpoint

    def loss_scale(self) -> float:
        return amp.state_dict()["loss_scaler0"]["loss_scale"]

    def set_learning_rate(self, epoch: float) -> float:
        lr = learning_rate(
            self.peak_lr,
            epoch,
            schedule=self.args.schedule,
            epochs=self.args.epochs,
            warmup_epochs=self.args.warmup_epochs,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def train_step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple:
        """Forward, backward, update; (loss, logits) of the batch."""
        with annotated("forward"):
            logits = self.model(images)
            loss = F.cross_entropy(logits, labels)
        with annotated("backward"):
            self.optimizer.zero_grad()
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        with annotated("update"):
            self.optimizer.step()
        return loss.detach(), logits.detach()

    def train_epoch(self, batches: Batches, epoch: int) -> tuple[Scores, float | None]:
        """One pass over the training images: scores, and images per second of all processes."""
        self.model.train()
        totals = Totals(self.processes)
        speed = Speedometer(self.images_per_step, self.processes.device)
        with self.progress(f"epoch {epoch}", batches) as progress:
            for step, (images, labels) in enumerate(batches):
                self.set_learning_rate(epoch + (step + 0.5) / len(batches))
                totals.add(*self.train_step(images, labels), labels)
                speed.step()
                progress.step(step, totals, speed)
        return totals.scores(), speed.images_per_s()

    @torch.no_grad()
    def validate(self, batches: Batches) -> Scores:
        """Scores over all of val/, every image counted once."""
        self.processes.copy_from_main(self.model.buffers())
        self.model.eval()
        totals = Totals(self.processes)
        with self.progress("validation", batches) as progress:
            for images, labels in batches:
                logits = self.model(images)
                totals.add(F.cross_entropy(logits, labels), logits, labels)
                progress.bar.update()
        return totals.scores()

    def profile(self, batches: Batches, steps: int) -> torch.profiler.profile:
        """Profile ``steps`` training steps, after `WARMUP_STEPS`."""
        self.model.train()
        self.set_learning_rate(self.args.start_epoch + 0.5 / len(batches))
        stream = endlessly(batches)
        for _ in range(WARMUP_STEPS):
            self.train_step(*next(stream))
        activities = [ProfilerActivity.CPU]
        if self.processes.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(steps):
                self.train_step(*next(stream))
                profiler.step()
        return profiler

    def progress(self, title: str, batches: Batches) -> Progress:
        return Progress(title, len(batches), self.args.print_freq, self.processes)


def endlessly(batches: Batches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield from batches


@contextlib.contextmanager
def annotated(name: str) -> Iterator[None]:
    """Name a part of the step in torch's profiler, and for Nsight Systems on a GPU."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
    with torch.profiler.record_function(name), nvtx:
        yield
