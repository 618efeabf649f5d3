"""``python -m apex.parallel`` shows what the package finds here, and what to do about trouble."""

import sys

import torch

from ..transformer import weight_gradient  # noqa: F401  (they define ops)
from ..transformer.functional import FusedScaleMaskSoftmax  # noqa: F401
from ._ops import library
from ._shared.native.doctor import main
from .syncbn import welford_mean_var


def example(device: str) -> None:
    """Take mean and variance of some channels and compare them with torch's."""
    x = torch.linspace(-3, 4, 420, device=device).reshape(4, 7, 15)
    mean, variance = welford_mean_var(x, False)
    torch.testing.assert_close(mean, x.mean((0, 2)))
    torch.testing.assert_close(variance, x.var((0, 2), unbiased=False))


if __name__ == "__main__":
    sys.exit(main(library, example))
