"""Train a DCGAN in mixed precision: two models, two optimizers, three losses with a scaler each."""

import argparse
import os
import random
from pathlib import Path

import torch
from data import load_images
from networks import Discriminator, Generator, noise_like
from torch import nn
from torch.nn import functional as F

from apex import amp

# Loss scalers: the three losses differ in size, and so do the scales that suit them.
REAL_LOSS, FAKE_LOSS, GENERATOR_LOSS = range(3)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dataset", default="cifar10", choices=["cifar10", "mnist", "folder", "fake"])
    add("--dataroot", default="./", help="of the data set; %(default)s")
    add("--workers", type=int, default=2, help="processes that load images; %(default)s")
    add("--batchSize", type=int, default=64, help="%(default)s")
    add("--imageSize", type=int, default=64, help="height and width; %(default)s")
    add("--nz", type=int, default=100, help="size of the noise; %(default)s")
    add("--ngf", type=int, default=64, help="width of the generator; %(default)s")
    add("--ndf", type=int, default=64, help="width of the discriminator; %(default)s")
    add("--niter", type=int, default=25, help="epochs; %(default)s")
    add("--lr", type=float, default=0.0002, help="%(default)s")
    add("--beta1", type=float, default=0.5, help="of Adam; %(default)s")
    add("--opt_level", "--opt-level", default="O1", help="O0 to O5; %(default)s")
    add("--outf", type=Path, default=Path("output"), help="folder to write to; %(default)s")
    add("--resume", type=Path, help="checkpoint to go on from")
    add("--manualSeed", type=int, default=random.randrange(10_000), help="default: a random one")
    add("--dry-run", "--dry_run", action="store_true", help="two batches, one epoch, small models")
    args = parser.parse_args()
    if args.dry_run:
        args.niter, args.imageSize, args.batchSize = 1, 16, min(args.batchSize, 8)
        args.ngf, args.ndf, args.nz = 8, 8, 16
    return args


class Gan:
    """Both models and optimizers, as amp has initialized them."""

    def __init__(self, args: argparse.Namespace, channels: int, device: torch.device):
        discriminator = Discriminator(args.imageSize, args.ndf, channels).to(device)
        generator = Generator(args.imageSize, args.nz, args.ngf, channels).to(device)
        optimizers = [
            # 1e-8, the default, is 0 in float16: O3 has 16-bit states.
            torch.optim.Adam(m.parameters(), lr=args.lr, betas=(args.beta1, 0.999), eps=1e-7)
            for m in (discriminator, generator)
        ]
        (self.discriminator, self.generator), (self.optimizer_d, self.optimizer_g) = amp.initialize(
            [discriminator, generator], optimizers, opt_level=args.opt_level, num_losses=3
        )
        self.noise_features = args.nz

    def train_discriminator(self, real: torch.Tensor, fake: torch.Tensor) -> float:
        """One step on both of its losses; each has a backward pass and a loss scaler of its own."""
        self.optimizer_d.zero_grad()
        losses = []
        for images, is_real, loss_id in ((real, 1.0, REAL_LOSS), (fake.detach(), 0.0, FAKE_LOSS)):
            loss = bce(self.discriminator(images), is_real)
            with amp.scale_loss(loss, self.optimizer_d, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
            losses.append(loss.item())
        self.optimizer_d.step()  # skipped if either loss overflowed
        return sum(losses)

    def train_generator(self, fake: torch.Tensor) -> float:
        """One step; the gradients that reach the discriminator on the way are not for it."""
        self.optimizer_g.zero_grad()
        loss = bce(self.discriminator(fake), 1.0)
        with amp.scale_loss(loss, self.optimizer_g, loss_id=GENERATOR_LOSS) as scaled_loss:
            scaled_loss.backward()
        self.optimizer_g.step()
        return loss.item()

    def train_step(self, real: torch.Tensor) -> tuple[float, float]:
        """The losses of the discriminator and of the generator."""
        fake = self.generator(noise_like(real, self.noise_features))
        return self.train_discriminator(real, fake), self.train_generator(fake)

    def parts(self) -> dict:
        """What a checkpoint holds: all that has a ``state_dict``, amp's loss scalers too."""
        return {
            "discriminator": self.discriminator,
            "generator": self.generator,
            "optimizer_d": self.optimizer_d,
            "optimizer_g": self.optimizer_g,
            "amp": amp,
        }


def bce(logits: torch.Tensor, target: float) -> torch.Tensor:
    logits = logits.float().flatten()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def save(path: Path, state: dict) -> None:
    """Write a checkpoint under another name, then rename it: it is whole or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@torch.no_grad()
def save_samples(path: Path, generator: nn.Module, noise: torch.Tensor) -> None:
    from torchvision.utils import save_image

    save_image(generator(noise).float(), str(path), nrow=8, normalize=True, value_range=(-1, 1))


def main() -> None:
    args = parse_arguments()
    print(f"seed {args.manualSeed}")
    torch.manual_seed(args.manualSeed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader, channels = load_images(args)
    gan = Gan(args, channels, device)
    fixed_noise = torch.randn(64, args.nz, 1, 1, device=device)
    args.outf.mkdir(parents=True, exist_ok=True)
    first_epoch = 0
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        # Loss scales and the states' dtypes are the level's.
        if state.get("opt_level") != args.opt_level:
            raise ValueError(
                f"--resume: {args.resume} was saved at opt level {state.get('opt_level')}, but "
                f"this run has {args.opt_level}"
            )
        for name, part in gan.parts().items():
            part.load_state_dict(state[name])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, args.niter):
        for i, batch in enumerate(loader):
            images = batch if isinstance(batch, torch.Tensor) else batch[0]
            loss_d, loss_g = gan.train_step(images.to(device))
            if i % 50 == 0 or args.dry_run:
                scales = [s["loss_scale"] for s in amp.state_dict().values()]
                print(
                    f"[{epoch}/{args.niter}][{i}/{len(loader)}] "
                    f"loss_D {loss_d:.4f} loss_G {loss_g:.4f} loss scales {scales}",
                    flush=True,
                )
            if args.dry_run and i == 1:
                break
        save_samples(args.outf / f"samples_{epoch:03}.png", gan.generator, fixed_noise)
        states = {name: part.state_dict() for name, part in gan.parts().items()}
        state = {**states, "opt_level": args.opt_level, "epoch": epoch}
        save(args.outf / "checkpoint.pt", state)


if __name__ == "__main__":
    main()
