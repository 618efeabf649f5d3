"""``python -m apex.amp`` shows what the package finds here, and what to do about trouble."""

import sys

import torch

from ._ops import library
from ._shared.native.doctor import main
from .multi_tensor import scale_


def example(device: str) -> None:
    """Unscale gradients and look for infinite ones."""
    gradients = [torch.ones(n, device=device) for n in (1, 7, 100)]
    found_inf = torch.zeros(1, dtype=torch.int32, device=device)
    scale_(gradients, found_inf, 0.5)
    torch.testing.assert_close(gradients[2], torch.full_like(gradients[2], 0.5))
    gradients[1][3] = torch.inf
    scale_(gradients, found_inf, 0.5)
    torch.testing.assert_close(found_inf, torch.ones_like(found_inf))


if __name__ == "__main__":
    sys.exit(main(library, example))
