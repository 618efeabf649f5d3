"""``python -m apex.normalization`` shows what the package finds here, and what helps."""

import sys

import torch

from . import FusedLayerNorm
from ._ops import library
from ._shared.native.doctor import main


def example(device: str) -> None:
    """Normalize some rows and compare them with torch's."""
    x = torch.linspace(-3, 4, 700, device=device).reshape(7, 100)
    expected = torch.nn.functional.layer_norm(x, (100,))
    torch.testing.assert_close(FusedLayerNorm(100).to(device)(x), expected)


if __name__ == "__main__":
    sys.exit(main(library, example))
