"""Generator and discriminator of DCGAN (Radford et al. 2015), for square images of 16 x 2^k."""

import torch
from torch import nn


class Generator(nn.Sequential):
    """Noise [N, noise, 1, 1] -> images [N, channels, size, size] in [-1, 1].

    ``width`` is the number of features before the last layer; it doubles with each one before.
    """

    def __init__(self, size: int, noise: int, width: int, channels: int):
        doublings = _doublings(size)
        features = width * 2**doublings
        layers = [nn.ConvTranspose2d(noise, features, 4, 1, 0, bias=False)]
        for _ in range(doublings):
            layers += [nn.BatchNorm2d(features), nn.ReLU(True)]
            layers += [nn.ConvTranspose2d(features, features // 2, 4, 2, 1, bias=False)]
            features //= 2
        layers += [nn.BatchNorm2d(features), nn.ReLU(True)]
        layers += [nn.ConvTranspose2d(features, channels, 4, 2, 1, bias=False), nn.Tanh()]
        super().__init__(*layers)
        self.apply(initialize_weights)


class Discriminator(nn.Sequential):
    """Images [N, channels, size, size] -> logits [N, 1, 1, 1] of being real.

    There is no sigmoid at the end: the loss is ``binary_cross_entropy_with_logits``, because
    ``binary_cross_entropy`` of float16 probabilities would overflow, and amp refuses it.
    """

    def __init__(self, size: int, width: int, channels: int):
        features = width
        layers = [nn.Conv2d(channels, features, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
        for _ in range(_doublings(size)):
            layers += [nn.Conv2d(features, 2 * features, 4, 2, 1, bias=False)]
            features *= 2
            layers += [nn.BatchNorm2d(features), nn.LeakyReLU(0.2, True)]
        layers += [nn.Conv2d(features, 1, 4, 1, 0, bias=False)]
        super().__init__(*layers)
        self.apply(initialize_weights)


def _doublings(size: int) -> int:
    """How often 8 is doubled to give ``size``; 16, 32, 64 and 128 are the usual sizes."""
    doublings = size.bit_length() - 4
    if doublings < 1 or 8 * 2**doublings != size:
        raise ValueError(f"--imageSize: expected 16, 32, 64, 128 or the like, got {size}")
    return doublings


def initialize_weights(module: nn.Module) -> None:
    """Normal weights of standard deviation 0.02, as in the paper."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def noise_like(images: torch.Tensor, features: int) -> torch.Tensor:
    """A generator's input for as many images."""
    return torch.randn(len(images), features, 1, 1, device=images.device)
