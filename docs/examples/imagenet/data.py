"""Image folders, augmentation, and batches that arrive on the device while it computes."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from options import UsageError
from processes import Processes
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import datasets, transforms

# Mean and standard deviation of ImageNet's training images, in units of a pixel's 0 to 255.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


@dataclass
class Data:
    """This process's share of both sets; every process has as many training batches."""

    train: DataLoader
    val: DataLoader
    sampler: DistributedSampler
    classes: int


def load_data(args: Namespace, processes: Processes) -> Data:
    """Loaders of (uint8 [batch, 3, size, size], int64 [batch]) from ``args.data``.

    Raises:
        UsageError: train/ and val/ differ in classes, or train/ has no full batch per process,
            unless it is only for ``args.evaluate``.
    """
    train = image_folder(args.data / "train", train_transform(args.augment, args.image_size))
    val = image_folder(args.data / "val", val_transform(args.augment, args.image_size))
    if train.classes != val.classes:
        differing = sorted(set(train.classes) ^ set(val.classes))
        raise UsageError(f"{args.data}: train/ and val/ differ in the classes {differing}.")
    global_batch = args.batch_size * processes.world_size
    if len(train) < global_batch and not args.evaluate:
        raise UsageError(
            f"--batch-size: {args.batch_size} images on each of {processes.world_size} processes "
            f"make {global_batch}, but {args.data / 'train'} holds {len(train)} images."
        )

    sampler = DistributedSampler(
        train, processes.world_size, processes.rank, seed=args.seed or 0, drop_last=True
    )
    # Every image once: a padded sampler would count some twice.
    mine = Subset(val, range(processes.rank, len(val), processes.world_size))
    return Data(
        train=loader(train, args, sampler=sampler, drop_last=True),
        val=loader(mine, args),
        sampler=sampler,
        classes=len(train.classes),
    )


def loader(dataset: Dataset, args: Namespace, **options) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        **options,
    )


def image_folder(path: Path, transform: Callable) -> datasets.ImageFolder:
    try:
        return datasets.ImageFolder(str(path), transform)
    except FileNotFoundError as error:  # a class without images, or no class at all
        raise UsageError(f"{path} must hold one folder of images per class: {error}") from error


def train_transform(augment: str, size: int) -> Callable:
    """Pixels stay uint8: a quarter of the bytes to copy, normalized on the device."""
    steps = {
        "imagenet": [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()],
        "shift": [transforms.Resize((size, size)), transforms.RandomCrop(size, padding=size // 8)],
        "none": [transforms.Resize((size, size))],
    }
    return transforms.Compose([*steps[augment], transforms.PILToTensor()])


def val_transform(augment: str, size: int) -> Callable:
    if augment == "imagenet":
        steps = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    else:
        steps = [transforms.Resize((size, size))]
    return transforms.Compose([*steps, transforms.PILToTensor()])


class Batches:
    """Yields (float32 [batch, 3, size, size], int64 [batch]) of a loader on ``device``.

    On a GPU the next batch is copied and normalized on a side stream during the current step.
    """

    def __init__(self, loader: DataLoader, device: torch.device, channels_last: bool):
        self.loader = loader
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.device = device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(STD, device=device).view(1, 3, 1, 1)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.stream is None:
            for images, labels in self.loader:
                yield self.normalized(images), labels
            return
        ready = None
        for batch in self.loader:
            upcoming = self.copied_aside(batch)
            if ready is not None:
                yield self.handed_over(ready)
            ready = upcoming
        if ready is not None:
            yield self.handed_over(ready)

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(self.device, non_blocking=True)
        images = images.to(torch.float32, memory_format=self.memory_format)
        return images.sub_(self.mean).div_(self.std)

    def copied_aside(self, batch: list[torch.Tensor]) -> tuple:
        with torch.cuda.stream(self.stream):
            images = self.normalized(batch[0])
            labels = batch[1].to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return images, labels, done

    def handed_over(self, batch: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels, done = batch
        current = torch.cuda.current_stream()
        current.wait_event(done)
        for tensor in (images, labels):
            tensor.record_stream(current)  # else the side stream could reuse its memory too early
        return images, labels
