"""Train a GPT on docstrings, with tensor, pipeline, sequence and data parallelism by flags.

    python train.py
    torchrun --standalone --nproc-per-node=2 train.py --tensor-model-parallel-size=2
    torchrun --standalone --nproc-per-node=4 train.py --tensor-model-parallel-size=2 \
        --pipeline-model-parallel-size=2 --sequence-parallel
    torchrun --standalone --nproc-per-node=4 train.py --optimizer=DistributedFusedAdam
    python train.py --plain  # the same in torch's own operations

Ranks that these sizes leave over are replicas, which share the batch.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import newest, save
from data import Text, write_text
from layout import (
    clip_gradients,
    complete_gradients,
    layout,
    mean_of_losses,
    start_processes,
    stop_processes,
)
from model import Shape, Stage, mean_loss
from optimizers import CLASSES, load, make_optimizer
from plain import Gpt, losses_of
from torch import Tensor, nn

from apex.transformer import parallel_state
from apex.transformer.failures import explained
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func
from apex.transformer.pipeline_parallel.schedules.common import (
    _get_params_for_weight_decay_optimization,
)
from apex.transformer.pipeline_parallel.utils import print_rank_0, setup_microbatch_calculator

LARGEST_NORM = 1.0  # of the gradients
WARM_UP = 0.05  # of all steps


def forward_step(batch: list[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
    """A micro-batch [rows, sequence + 1] through this stage; what the last stage does with it."""
    tokens, targets = batch[0][:, :-1], batch[0][:, 1:]

    def loss(logits: Tensor) -> tuple[Tensor, Tensor]:
        value = mean_loss(logits, targets)
        return value, value.detach()

    return model(tokens), loss


class Trainer:
    """Model and optimizer of this rank, and the losses so far."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.shape = Shape(
            args.layers,
            args.hidden,
            args.heads,
            args.sequence,
            args.sequence_parallel,
            args.dtype == "bfloat16",
        )
        replicas = parallel_state.get_data_parallel_world_size()
        wraps = replicas > 1 and args.optimizer != "DistributedFusedAdam"
        (model,) = build_model(Stage, wrap_with_ddp=wraps, shape=self.shape, seed=args.seed)
        if args.plain:  # with the same weights
            same = Gpt(self.shape).to(device)
            same.load_state_dict(model.state_dict())
            model = same
        norms = (FusedLayerNorm, nn.LayerNorm)
        groups = _get_params_for_weight_decay_optimization(model, no_weight_decay_modules=norms)
        self.optimizer = make_optimizer(args.optimizer, groups, model, args.sequence_parallel)
        self.model, self.stage = model, model.module if wraps else model
        self.text = Text(args.text, args.sequence)
        self.schedule = get_forward_backward_func(
            None, parallel_state.get_pipeline_model_parallel_world_size()
        )
        self.history: list[dict[str, float]] = []

    def loss(self, part: str, step: int, *, forward_only: bool = False) -> float:
        """Of one global batch, averaged; without ``forward_only``, gradients too."""
        args = self.args
        rows = self.text.batch(part, step, args.global_batch_size)
        dtype = getattr(torch, args.dtype)
        if args.plain:
            batch = rows.to(self.device), self.model, args.micro_batch_size, dtype
            return mean_of_losses(losses_of(*batch, backward=not forward_only), self.device)
        mine = rows.chunk(parallel_state.get_data_parallel_world_size())
        losses = self.schedule(
            forward_step,
            [mine[parallel_state.get_data_parallel_rank()].to(self.device)],
            self.model,
            forward_only=forward_only,
            tensor_shape=(args.sequence, args.micro_batch_size, args.hidden),
            dtype=dtype,
            sequence_parallel_enabled=args.sequence_parallel,
        )
        return mean_of_losses(losses, self.device)

    def step(self) -> dict[str, float]:
        """One update; the record of it."""
        step = len(self.history)
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss("train", step)
        if self.args.plain:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM).item()
        else:
            complete_gradients(self.model)
            norm = clip_gradients(self.model, self.optimizer, LARGEST_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        seconds = time.perf_counter() - begun
        tokens = self.args.global_batch_size * self.args.sequence
        self.history.append(
            {"step": step, "loss": loss, "norm": norm, "tokens_per_s": tokens / seconds}
        )
        return self.history[-1]

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        warm_up = max(1, round(WARM_UP * self.args.steps))
        if step < warm_up:
            return self.args.lr * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.args.steps - warm_up)
        return self.args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The mean over the same few batches of held-out text at every call."""
        batches = range(self.args.validation_batches)
        return sum(self.loss("validation", b, forward_only=True) for b in batches) / len(batches)

    def run(self) -> dict[str, Any]:
        """All options that change what is computed, and how the model is divided."""
        names = "layers hidden heads sequence sequence_parallel dtype seed steps lr text_bytes"
        names += " micro_batch_size global_batch_size"
        tensor, pipeline, _ = layout().items()  # checkpoints are of any number of replicas
        return {name: getattr(self.args, name) for name in names.split()} | dict((tensor, pipeline))

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on."""
        state = {
            "run": self.run(),
            "history": self.history,
            "model": self.stage.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        save(self.args.output, len(self.history), state)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        state = newest(self.args.output, self.run(), self.device)
        if state is not None:
            self.stage.load_state_dict(state["model"])
            load(self.optimizer, state["optimizer"])
            self.history = state["history"]
            print_rank_0(f"continues after step {len(self.history)}")


def set_up_batches(args: argparse.Namespace) -> None:
    """Tell the schedules, once per process."""
    replicas = parallel_state.get_data_parallel_world_size()
    setup_microbatch_calculator(
        dist.get_rank(), None, args.global_batch_size, args.micro_batch_size, replicas
    )


def train(trainer: Trainer) -> None:
    args = trainer.args
    until = min(args.steps, args.stop_after or args.steps)
    while len(trainer.history) < until:
        record = trainer.step()
        done = len(trainer.history)
        if done % args.validate_every == 0 or done == args.steps:
            record["validation_loss"] = trainer.validation_loss()
        if done % args.print_every == 0 or done == until or "validation_loss" in record:
            report(trainer.history[-args.print_every :], args.steps)
        if done % args.save_every == 0 or done == until:
            trainer.save()
        if dist.get_rank() == 0 and "validation_loss" in record:
            write_history(args, trainer)
    if dist.get_rank() == 0:
        write_history(args, trainer)


def report(records: list[dict[str, float]], steps: int) -> None:
    """A line about the last steps."""
    last, number = records[-1], len(records)
    loss = sum(r["loss"] for r in records) / number
    speed = number / sum(1 / r["tokens_per_s"] for r in records)
    done = int(last["step"]) + 1
    text = f"step {done}/{steps}  loss {loss:.4f}  norm {last['norm']:.3f}  {speed:,.0f} tokens/s"
    if "validation_loss" in last:
        text += f"  validation {last['validation_loss']:.4f}"
    print_rank_0(text)


def write_history(args: argparse.Namespace, trainer: Trainer) -> None:
    """Write history.json, and the plot if it is asked for."""
    record = {"run": trainer.run(), "steps": trainer.history}
    (args.output / "history.json").write_text(json.dumps(record, indent=1))
    if args.plot:
        from plot import plot_losses  # matplotlib is needed for this alone

        plot_losses(args.plot, trainer.history)


def main() -> None:
    args = parse_arguments()
    device = start_processes(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    try:
        check(args)
        set_up_batches(args)
        args.text = args.output / f"text-{args.text_bytes}.bin"
        if dist.get_rank() == 0:
            args.output.mkdir(parents=True, exist_ok=True)
            write_text(args.text, args.text_bytes)
        with explained("waiting for rank 0 to write the text"):
            dist.barrier()
        trainer = Trainer(args, device)
        print_rank_0(f"{layout()}, {args.text.stat().st_size:,} bytes of text")
        trainer.resume()
        train(trainer)
    finally:
        stop_processes()


def check(args: argparse.Namespace) -> None:
    """End the program if sizes do not fit."""
    tensor, pipeline, data = layout().values()
    rules = [
        (args.plain and tensor * pipeline * data > 1, "--plain: expected one process"),
        (args.plain and args.optimizer != "AdamW", f"--plain: {args.optimizer} is not torch's"),
        (args.layers % pipeline, f"--layers: {args.layers} are not divisible by {pipeline} stages"),
        (args.heads % tensor, f"--heads: {args.heads} are not divisible by {tensor} ranks"),
        (
            args.hidden % (2 * args.heads),
            "--hidden: must be an even multiple of --heads",
        ),
        (
            args.global_batch_size % (args.micro_batch_size * data),
            f"--global-batch-size: {args.global_batch_size} is not divisible by {data} replicas x "
            f"micro-batches of {args.micro_batch_size}",
        ),
        (
            args.sequence_parallel and (tensor == 1 or args.sequence % tensor),
            f"--sequence-parallel: {args.sequence} tokens on {tensor} tensor-parallel ranks",
        ),
    ]
    for wrong, message in rules:
        if wrong:
            raise SystemExit(message)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def number(name: str, default: int | None, text: str) -> None:
        parser.add_argument(name, type=positive, default=default, help=f"{text}; %(default)s")

    number("--tensor-model-parallel-size", 1, "ranks that share each layer")
    number("--pipeline-model-parallel-size", 1, "stages that the layers are divided into")
    parser.add_argument("--sequence-parallel", action="store_true", help="divide norms, too")
    number("--layers", 4, "of attention and perceptron")
    number("--hidden", 128, "features")
    number("--heads", 4, "of attention")
    number("--sequence", 128, "bytes that the model sees at once")
    number("--micro-batch-size", 4, "sequences that pass through the stages together")
    number("--global-batch-size", 16, "sequences of a step, over all replicas")
    number("--steps", 300, "updates in all, which the learning rate follows")
    number("--stop-after", None, "updates after which to stop early, with a checkpoint")
    text = f"a checkpoint of one goes on with any; {CLASSES[0]}, with --plain AdamW"
    parser.add_argument("--optimizer", choices=CLASSES, help=text)
    parser.add_argument("--plain", action="store_true", help="torch's own operations and AdamW")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest; %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of weights; %(default)s")
    number("--text-bytes", 2_000_000, "of docstrings")
    number("--validate-every", 50, "steps")
    number("--validation-batches", 4, "global batches of held-out text")
    number("--print-every", 20, "steps")
    number("--save-every", 100, "steps")
    parser.add_argument("--output", type=Path, default=Path("gpt_output"), help="%(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="losses; needs matplotlib")
    args = parser.parse_args(arguments)
    args.optimizer = args.optimizer or ("AdamW" if args.plain else CLASSES[0])
    return args


if __name__ == "__main__":
    sys.exit(main())
