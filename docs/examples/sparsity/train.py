"""Train a ResNet-18 on handwritten digits, prune it to two of four weights, and train it on.

Needs no data and no GPU. It ends in a table, and fails if the pruned network is less accurate than
the dense one by more than a point, or if masks change when training is saved and resumed, by one
process or by two.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from apex.contrib.sparsity import ASP
from apex.contrib.sparsity.permutation_lib import Permutation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INK = 16  # the scans' darkest level; 0 is paper
IMAGE_SIZE = 32  # pixels
BATCH_SIZE = 64
PROCESSES = 2  # that resume together
LARGEST_SHIFT = 2  # pixels, of an image that is trained on
LARGEST_ACCURACY_LOSS = 1.0  # percentage points


def load_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images ``[N, 3, 32, 32]`` and digits ``[N]``, to train on and to validate with.

    1797 scans of 8x8 pixels, which scikit-learn's wheel contains: E. Alpaydin, C. Kaynak, Optical
    Recognition of Handwritten Digits, UCI 1998.
    """
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / INK - 0.5
    images = F.interpolate(small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bicubic").expand(
        -1, 3, -1, -1
    )
    targets = torch.tensor(digits.target)
    train, val = train_test_split(
        torch.arange(len(targets)), test_size=1 / 3, stratify=targets, random_state=0
    )
    return tuple((images[part].to(DEVICE), targets[part].to(DEVICE)) for part in (train, val))


class Training:
    """A network, its optimizer, and how far they are.

    Args:
        epochs: of which the learning rate goes down to 0.
        seed: of the order of images, and of their shifts, in each epoch.
    """

    def __init__(self, network: nn.Module, lr: float, epochs: int, seed: int) -> None:
        self.network, self.lr, self.epochs, self.seed, self.epoch = network, lr, epochs, seed, 0
        options = {"lr": lr, "momentum": 0.9, "weight_decay": 1e-4}
        self.optimizer = torch.optim.SGD(network.parameters(), **options)

    def run(self, data: tuple[Tensor, Tensor], until: int) -> None:
        """Train up to the end of epoch ``until``; processes divide each batch."""
        images, targets = data
        rank, processes = 0, 1
        if distributed.is_initialized():
            rank, processes = distributed.get_rank(), distributed.get_world_size()
        self.network.train()
        while self.epoch < until:
            random = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
            batches = torch.randperm(len(images), generator=random).split(BATCH_SIZE)[:-1]
            for number, batch in enumerate(batches):
                self.set_lr(self.epoch + number / len(batches))
                shift = torch.randint(-LARGEST_SHIFT, LARGEST_SHIFT + 1, (2,), generator=random)
                share = batch[rank::processes]
                shifted = images[share].roll(shift.tolist(), (2, 3))
                self.optimizer.zero_grad()
                F.cross_entropy(self.network(shifted), targets[share]).backward()
                self.optimizer.step()
            self.epoch += 1

    def set_lr(self, epoch: float) -> None:
        """It rises in the first half epoch, and then follows a cosine."""
        factor = 0.5 * (1 + math.cos(math.pi * epoch / self.epochs)) * min(1, 0.1 + 2 * epoch)
        self.optimizer.param_groups[0]["lr"] = self.lr * factor

    def save(self, path: Path) -> None:
        """Write everything to go on from here; masks are buffers of the network."""
        state = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"epoch": self.epoch}, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location=DEVICE)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]


@torch.no_grad()
def accuracy(network: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Top-1 in %."""
    images, targets = data
    network.eval()
    right = [
        network(i).argmax(1).eq(t)
        for i, t in zip(images.split(256), targets.split(256), strict=True)
    ]
    return 100 * float(torch.cat(right).float().mean())


def masks(network: nn.Module) -> dict[str, Tensor]:
    """Copies of all masks."""
    buffers = network.named_buffers()
    return {name: buffer.clone() for name, buffer in buffers if name.endswith("_mma_mask")}


def wrong_masks(network: nn.Module, expected: dict[str, Tensor]) -> list[str]:
    """Names of masks that differ, and of those under which a weight is not 0."""
    wrong = []
    for name, mask in masks(network).items():
        weight = network.get_parameter(name.replace("__weight_mma_mask", "weight"))
        runs = (weight.detach().movedim(1, -1).reshape(-1, 4) != 0).sum(1)
        if not torch.equal(mask, expected[name]) or weight[~mask].any() or runs.max() > 2:
            wrong.append(name)
    return wrong


def prune(training: Training, args: argparse.Namespace) -> float:
    """Prune the network of a training; return what is kept of the magnitudes, in %."""
    ASP.init_model_for_pruning(training.network, verbosity=1, allow_permutation=args.permute)
    ASP.init_optimizer_for_pruning(training.optimizer)
    weights = [
        p for n, p in training.network.named_parameters() if n.endswith("weight") and p.dim() > 1
    ]
    before = sum(float(p.detach().abs().sum()) for p in weights)
    ASP.compute_sparse_masks()
    return 100 * sum(float(p.detach().abs().sum()) for p in weights) / before


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prune a ResNet-18 to 2:4; minutes on two cores.")
    add = parser.add_argument
    add("--output", type=Path, default=Path("output"), metavar="DIR")
    add("--epochs", type=int, default=6, metavar="N", help="of the dense network")
    add("--finetune-epochs", type=int, default=4, metavar="N", help="of the pruned one")
    add("--lr", type=float, default=0.03)
    add("--seed", type=int, default=0)
    add("--escape-attempts", type=int, default=2, metavar="N", help="of each search")
    add("--no-permute", dest="permute", action="store_false", help="keep the order of channels")
    args = parser.parse_args()
    if args.finetune_epochs < 2:
        parser.error("--finetune-epochs: at least 2, because training is resumed between them")
    return args


def build(args: argparse.Namespace) -> Training:
    """What a new process begins with: a network with masks to load, and its optimizer."""
    ASP.reset()
    network = resnet18(num_classes=10).to(DEVICE)
    ASP.init_model_for_pruning(network, verbosity=0)
    return Training(network, args.lr, args.finetune_epochs, args.seed + 1)


def resume(
    args: argparse.Namespace,
    train: tuple[Tensor, Tensor],
    wrap: Callable[[nn.Module], nn.Module] = lambda network: network,
) -> nn.Module:
    """What a new process would do: build, load, and train to the end."""
    resumed = build(args)
    network = resumed.network
    resumed.load(args.output / "checkpoint.pt")
    ASP.init_optimizer_for_pruning(resumed.optimizer)
    resumed.network = wrap(network)
    resumed.run(train, args.finetune_epochs)
    return network


def resume_distributed(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """Resume as one of several processes; save the network that all of them end with."""
    torch.set_num_threads(max(1, torch.get_num_threads() // PROCESSES))
    distributed.init_process_group(
        "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(minutes=2),
    )
    network = resume(args, load_data()[0], DistributedDataParallel)
    mine = nn.utils.parameters_to_vector(network.parameters()).detach()
    first = mine.clone()
    distributed.broadcast(first, 0)
    if not torch.equal(mine, first):
        raise RuntimeError(f"the weights of process {rank} differ from those of process 0")
    if rank == 0:
        torch.save(network.state_dict(), args.output / "distributed.pt")
    distributed.destroy_process_group()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, prune, train on; do the second half of that again from a checkpoint, in two ways."""
    train, val = load_data()
    torch.manual_seed(args.seed)
    network = resnet18(num_classes=10).to(DEVICE)
    Training(network, args.lr, args.epochs, args.seed).run(train, args.epochs)
    record: dict[str, Any] = {"dense_top1": accuracy(network, val)}

    # The same learning rates again: Mishra et al. 2021, section 4.
    pruned = Training(network, args.lr, args.finetune_epochs, args.seed + 1)
    Permutation.set_search_options({"escape_attempts": args.escape_attempts})
    begun_s = time.perf_counter()
    record["kept_magnitude"] = prune(pruned, args)
    record["prune_s"] = time.perf_counter() - begun_s
    record["permuted_weights"] = len(Permutation.get_permutation_stats()[0])
    record["pruned_top1"] = accuracy(network, val)
    expected = masks(network)
    pruned.run(train, args.finetune_epochs // 2)
    pruned.save(args.output / "checkpoint.pt")
    pruned.run(train, args.finetune_epochs)
    record["finetuned_top1"] = accuracy(network, val)

    resumed = resume(args, train)
    record["resumed_top1"] = accuracy(resumed, val)
    both = zip(network.parameters(), resumed.parameters(), strict=True)
    record["resumed_is_equal"] = all(torch.equal(a, b) for a, b in both)

    with tempfile.TemporaryDirectory() as folder:
        arguments = (args, Path(folder, "rendezvous").as_uri())
        multiprocessing.spawn(resume_distributed, arguments, PROCESSES)
    divided = build(args).network
    state = torch.load(args.output / "distributed.pt", weights_only=True, map_location=DEVICE)
    divided.load_state_dict(state)
    record["distributed_top1"] = accuracy(divided, val)
    networks = (network, resumed, divided)
    record["wrong_masks"] = [name for n in networks for name in wrong_masks(n, expected)]
    return record


def main() -> None:
    args = parse_arguments()
    begun_s = time.perf_counter()
    args.output.mkdir(parents=True, exist_ok=True)
    record = run(args) | {"seconds": time.perf_counter() - begun_s}
    (args.output / "result.json").write_text(json.dumps(record, indent=1))
    for name, value in record.items():
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        print(f"{name:<18}{shown:>10}")
    if record["wrong_masks"]:
        sys.exit(f"train.py: masks do not hold: {', '.join(record['wrong_masks'])}")
    ends = (record[f"{name}_top1"] for name in ("finetuned", "resumed", "distributed"))
    loss = record["dense_top1"] - min(ends)
    if loss > LARGEST_ACCURACY_LOSS:
        sys.exit(f"train.py: {loss:.2f} points lost, allowed are {LARGEST_ACCURACY_LOSS}.")


if __name__ == "__main__":
    main()
