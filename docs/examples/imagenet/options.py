"""Command line of the ImageNet example."""

import argparse
import difflib
import math
import os
from pathlib import Path

from torchvision import models

OPT_LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = ("sgd", "fused_sgd", "fused_adam", "adamw")
PLAIN = {"fused_sgd": "sgd", "fused_adam": "adamw"}  # torch's own
PLAIN_LEVELS = ("O0", "O1", "O4")  # what torch.amp has, too
AUGMENTATIONS = ("imagenet", "shift", "none")
SCHEDULES = ("step", "cosine")

# Learning rates for a global batch of 256; SGD's is that of Goyal et al. 2017.
DEFAULT_LR = {"sgd": 0.1, "fused_sgd": 0.1, "fused_adam": 1e-3, "adamw": 1e-3}

AUGMENTATION_HELP = "imagenet: random crop and flip; shift: random shift by up to an eighth"
LR_HELP = "for a global batch of 256, scaled to the real one; 0.1, or 0.001 for Adam"
SCHEDULE_HELP = "step: a tenth after 30, 60 and 80 epochs (default); cosine: to zero at the end"
WARMUP_HELP = "epochs in which the learning rate rises from zero; %(default)s"
LEVEL_HELP = (
    "O0: fp32; O1, O4: fp16 or bf16 by function; O2, O5: fp16 or bf16 model with fp32 masters; "
    "O3: all fp16; %(default)s"
)
RANK_HELP = "torch.distributed.run gives it in the environment"

# Their training output is a tuple of the main and the auxiliary logits, not one tensor.
WITH_AUXILIARY_LOGITS = ("googlenet", "inception_v3")


class UsageError(ValueError):
    """What the user gave cannot be run; the message says what to change."""


def architectures() -> list[str]:
    """Names of torchvision's classification models that return one tensor of logits."""
    return [n for n in models.list_models(module=models) if n not in WITH_AUXILIARY_LOGITS]


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text}")
    return value


def non_negative_int(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text}")
    return value


def non_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number >= 0, got {text}")
    return value


def loss_scale(text: str) -> str:
    """``dynamic`` or a positive number, left as text: `amp.initialize` takes both."""
    if text == "dynamic":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected 'dynamic' or a number > 0, got {text!r}")
    return text


def architecture(text: str) -> str:
    known = architectures()
    if text in known:
        return text
    if text in WITH_AUXILIARY_LOGITS:
        raise argparse.ArgumentTypeError(
            f"{text} returns auxiliary logits, which this example lacks"
        )
    near = difflib.get_close_matches(text, known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}"
    raise argparse.ArgumentTypeError(f"torchvision has no model {text!r}{hint}")


def image_folder(text: str) -> Path:
    path = Path(text)
    missing = [name for name in ("train", "val") if not (path / name).is_dir()]
    if missing:
        raise argparse.ArgumentTypeError(
            f"{text} must hold the folders train/ and val/ with one folder of images per class; "
            f"missing: {', '.join(missing)}"
        )
    return path


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and images").add_argument
    add(
        "-a", "--arch", type=architecture, default="resnet18", help="torchvision model; %(default)s"
    )
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--image-size", type=positive_int, default=224, metavar="PIXELS", help="%(default)s")
    add("--augment", choices=AUGMENTATIONS, default="imagenet", help=AUGMENTATION_HELP)
    add(
        "--batch-size", "--b", "-b", type=positive_int, default=256, help="per process; %(default)s"
    )
    add("--workers", "-j", type=non_negative_int, default=4, help="that load images; %(default)s")
    add("--channels-last", action="store_true", help="keep images and weights in NHWC memory")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=positive_int, default=90, help="in all; %(default)s")
    add("--start-epoch", type=non_negative_int, default=0, help="first one; --resume sets it too")
    add("--optimizer", choices=OPTIMIZERS, default="fused_sgd", help="%(default)s")
    add("--lr", "--learning-rate", type=non_negative_float, help=LR_HELP)
    add("--momentum", type=non_negative_float, default=0.9, help="of SGD; %(default)s")
    add("--weight-decay", "--wd", type=non_negative_float, default=1e-4, help="%(default)s")
    add("--schedule", choices=SCHEDULES, default="step", help=SCHEDULE_HELP)
    add("--warmup-epochs", type=non_negative_float, default=5, help=WARMUP_HELP)
    add("--seed", type=non_negative_int, help="fixes weights, order and augmentation of images")
    add("--deterministic", action="store_true", help="reproducible kernels, and a seed (0)")


def _add_amp_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("precision and processes").add_argument
    add("--opt-level", choices=OPT_LEVELS, default="O1", help=LEVEL_HELP)
    add("--plain", action="store_true", help="torch.amp and torch's optimizers, not Apex's")
    add("--keep-batchnorm-fp32", choices=("True", "False"), help="overrides the level's choice")
    add("--loss-scale", type=loss_scale, help="a number or 'dynamic'; overrides the level's choice")
    add("--sync_bn", "--sync-bn", action="store_true", help="batch norm over all processes")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    add("--local_rank", "--local-rank", type=non_negative_int, default=local_rank, help=RANK_HELP)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to do and to write").add_argument
    add("--evaluate", "-e", action="store_true", help="evaluate on val/ and exit")
    add("--prof", type=positive_int, metavar="STEPS", help="profile so many, trace.json, exit")
    add("--resume", type=existing_file, metavar="CHECKPOINT", help="continue from it")
    add("--output", type=Path, default=Path("."), metavar="DIR", help="of checkpoints; %(default)s")
    add("--history", type=Path, metavar="FILE.json", help="scores of every epoch")
    add("--plot", type=Path, metavar="FILE.png", help="curves of loss and accuracy")
    add("--print-freq", "-p", type=positive_int, default=10, metavar="STEPS", help="%(default)s")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; a bad value ends the program with status 2.

    ``lr`` of the result is the learning rate for a global batch of 256.
    """
    parser = argparse.ArgumentParser(description="Train an image classifier with apex.amp.")
    parser.add_argument("data", type=image_folder, metavar="DIR", help="holds train/ and val/")
    _add_model_options(parser)
    _add_training_options(parser)
    _add_amp_options(parser)
    _add_output_options(parser)
    args = parser.parse_args(arguments)
    if args.start_epoch >= args.epochs and not (args.evaluate or args.prof):
        parser.error(
            f"argument --start-epoch: {args.start_epoch} leaves nothing to train of --epochs "
            f"{args.epochs}, which counts from 0"
        )
    if args.plain:
        args.optimizer = PLAIN.get(args.optimizer, args.optimizer)
        if args.opt_level not in PLAIN_LEVELS:
            expected = ", ".join(PLAIN_LEVELS)
            parser.error(f"argument --plain: expected --opt-level {expected}, got {args.opt_level}")
        if args.keep_batchnorm_fp32 or args.loss_scale or args.sync_bn:
            parser.error("argument --plain: the loss scale and batch norm are torch's own")
    if args.lr is None:
        args.lr = DEFAULT_LR[args.optimizer]
    if args.deterministic and args.seed is None:
        args.seed = 0
    return args
