"""Images to imitate: a torchvision data set, a folder, or shapes that need no file."""

from argparse import Namespace

import torch
from torch.utils.data import DataLoader, Dataset


class Disks(Dataset):
    """Coloured disks on a dark ground, drawn from the index: no file, no download."""

    def __init__(self, size: int, count: int):
        self.size, self.count = size, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.count:
            raise IndexError(index)
        random = torch.Generator().manual_seed(index)
        x, y, radius = (torch.rand(3, generator=random) * 0.4 + 0.3).tolist()
        colour = torch.rand(3, 1, 1, generator=random) + 0.2
        line = torch.linspace(0, 1, self.size)
        distance = ((line[:, None] - y) ** 2 + (line - x) ** 2).sqrt()
        return (colour * (distance < radius * 0.6)).clamp(max=1) * 2 - 1


def load_images(args: Namespace) -> tuple[DataLoader, int]:
    """Batches of images in [-1, 1], and their number of channels.

    Raises:
        ValueError: there is no full batch, and so nothing to train on.
    """
    dataset = Disks(args.imageSize, 4 * args.batchSize if args.dry_run else 4096)
    if args.dataset != "fake":
        dataset = _of_torchvision(args)
    loader = DataLoader(
        dataset,
        args.batchSize,
        shuffle=True,
        drop_last=True,
        num_workers=0 if args.dry_run else args.workers,
        persistent_workers=args.workers > 0 and not args.dry_run,
        generator=torch.Generator().manual_seed(args.manualSeed),
    )
    if not len(loader):
        raise ValueError(
            f"--batchSize: {args.batchSize} is more than the {len(dataset)} images of --dataset "
            f"{args.dataset}"
        )
    first = dataset[0]
    return loader, (first if isinstance(first, torch.Tensor) else first[0]).shape[0]


def _of_torchvision(args: Namespace) -> Dataset:
    from torchvision import datasets, transforms

    resize = [transforms.Resize(args.imageSize), transforms.CenterCrop(args.imageSize)]
    rescale = transforms.Lambda(lambda image: image * 2 - 1)
    transform = transforms.Compose([*resize, transforms.ToTensor(), rescale])
    if args.dataset == "folder":
        return datasets.ImageFolder(args.dataroot, transform)
    classes = {"cifar10": datasets.CIFAR10, "mnist": datasets.MNIST}
    return classes[args.dataset](args.dataroot, download=True, transform=transform)
