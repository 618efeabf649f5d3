"""Train a torchvision model on a folder of images with apex's amp, optimizers and parallel."""

import gc
import json
import random
import sys
from argparse import Namespace

import torch
from checkpoint import check_writable, load_checkpoint, save_checkpoint, write_atomically
from data import Batches, Data, load_data
from meters import Scores
from network import build_network, build_optimizer
from options import UsageError, parse_arguments
from plain import PlainTrainer
from plot import plot_histories
from processes import Processes, start_processes, stop_processes
from torch import nn
from training import Trainer

from apex import amp
from apex.parallel import DistributedDataParallel


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def prefer_reproducible_kernels() -> None:
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


class Run:
    """One call of this program: its parts, and the records of the epochs so far."""

    def __init__(self, args: Namespace, processes: Processes):
        self.args = args
        self.processes = processes
        if processes.is_main and not args.evaluate:  # now, not after the first epoch
            check_writable("--output", args.output)
            for option, file in (("--history", args.history), ("--plot", args.plot)):
                if file:
                    check_writable(option, file.parent)
        self.data: Data = load_data(args, processes)
        self.epochs: list[dict] = []

        if args.seed is not None:
            seed_everything(args.seed)
        network = build_network(args, self.data.classes, processes.device)
        optimizer = build_optimizer(args, network)
        model = network
        if not args.plain:
            model, optimizer = amp.initialize(
                network,
                optimizer,
                opt_level=args.opt_level,
                keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                loss_scale=args.loss_scale,
            )
        self.network: nn.Module = model
        if processes.distributed:
            wrap = nn.parallel.DistributedDataParallel if args.plain else DistributedDataParallel
            model = wrap(model)
        trainer = PlainTrainer if args.plain else Trainer
        self.trainer = trainer(args, processes, model, optimizer)
        # What a checkpoint and the run that resumes it must have in common.
        self.identity = {name: getattr(args, name) for name in ("arch", "opt_level", "optimizer")}
        if args.plain:
            self.identity["opt_level"] += ", plain"
        self.identity["classes"] = self.data.classes

    def batches(self, loader: torch.utils.data.DataLoader) -> Batches:
        return Batches(loader, self.processes.device, self.args.channels_last)

    def resume(self) -> None:
        self.epochs = load_checkpoint(
            self.args.resume,
            self.network,
            self.trainer.optimizer,
            identity=self.identity,
            device=self.processes.device,
            scaling=self.trainer.scaling,
        )
        if not self.args.start_epoch:
            self.args.start_epoch = self.epochs[-1]["epoch"] + 1
        self.epochs = [r for r in self.epochs if r["epoch"] < self.args.start_epoch]

    def evaluate(self) -> None:
        scores = self.trainer.validate(self.batches(self.data.val))
        if self.processes.is_main:
            print(f"validation {scores}")

    def profile(self) -> None:
        profiler = self.trainer.profile(self.batches(self.data.train), self.args.prof)
        if self.processes.is_main:
            profiler.export_chrome_trace(str(self.args.output / "trace.json"))
            device = self.processes.device.type
            order = f"self_{device}_time_total"
            print(profiler.key_averages().table(sort_by=order, row_limit=20))

    def train(self) -> None:
        if self.args.start_epoch >= self.args.epochs and self.processes.is_main:
            print(f"--resume: all {self.args.epochs} epochs are done; --epochs sets their number.")
        train, val = self.batches(self.data.train), self.batches(self.data.val)
        for epoch in range(self.args.start_epoch, self.args.epochs):
            self.data.sampler.set_epoch(epoch)
            if self.args.seed is not None:  # per epoch, so that a resumed run draws the same
                part = epoch * self.processes.world_size + self.processes.rank
                seed_everything(self.args.seed + 1_000_003 * (part + 1))
            trained, images_per_s = self.trainer.train_epoch(train, epoch)
            validated = self.trainer.validate(val)
            if self.processes.is_main:
                self.record(epoch, trained, validated, images_per_s)

    def record(
        self, epoch: int, trained: Scores, validated: Scores, images_per_s: float | None
    ) -> None:
        """Print an epoch's scores, keep them, and write what the command line asks for."""
        speed = f"  {images_per_s:.1f} images/s" if images_per_s else ""
        print(f"epoch {epoch}: training {trained}{speed}; validation {validated}", flush=True)
        best_before = max((record["val_top1"] for record in self.epochs), default=-1.0)
        self.epochs.append(
            {
                "epoch": epoch,
                **{f"train_{name}": value for name, value in vars(trained).items()},
                **{f"val_{name}": value for name, value in vars(validated).items()},
                "images_per_s": images_per_s,
                "loss_scale": self.trainer.loss_scale(),
            }
        )
        self.write(is_best=validated.top1 > best_before)

    def write(self, *, is_best: bool) -> None:
        """Write checkpoint, history and plot."""
        save_checkpoint(
            self.args.output,
            self.network,
            self.trainer.optimizer,
            identity=self.identity,
            epochs=self.epochs,
            is_best=is_best,
            scaling=self.trainer.scaling,
        )
        if self.args.history:
            text = json.dumps({"run": self.identity, "epochs": self.epochs}, indent=1)
            write_atomically(self.args.history, lambda file: file.write(text.encode()))
        if self.args.plot:
            title = f"{self.args.arch}, {self.args.optimizer}"
            plot_histories(self.args.plot, {title: {self.args.opt_level: self.epochs}})


def main() -> None:
    args = parse_arguments()
    if args.deterministic:
        prefer_reproducible_kernels()
    else:
        torch.backends.cudnn.benchmark = True
    run = None
    try:
        run = Run(args, start_processes(args.local_rank))
        if args.resume:
            run.resume()
        if args.evaluate:
            run.evaluate()
        elif args.prof:
            run.profile()
        else:
            run.train()
    except UsageError as error:
        sys.exit(f"main_amp.py: {error}")
    finally:
        # Were torch's DDP the last to hold a group of gloo, it would wait with the GIL in its hands
        # for the group's threads, one of which may be waiting for the GIL.
        run = None
        gc.collect()
        stop_processes()


if __name__ == "__main__":
    main()
