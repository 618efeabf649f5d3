"""``python -m apex.optimizers`` shows what the package finds here, and what to do about trouble."""

import sys

import amp_C  # noqa: F401  (it imports every op)
import torch

from . import FusedAdam
from ._ops import library
from ._shared.native.doctor import main


def example(device: str) -> None:
    """Take a step of Adam and compare it with torch's."""
    ours, theirs = (torch.nn.Parameter(torch.ones(100, device=device)) for _ in range(2))
    for parameter, optimizer in ((ours, FusedAdam), (theirs, torch.optim.AdamW)):
        parameter.grad = torch.linspace(-1, 1, 100, device=device)
        optimizer([parameter], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(ours, theirs)


if __name__ == "__main__":
    sys.exit(main(library, example))
