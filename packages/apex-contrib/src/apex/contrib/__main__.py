"""``python -m apex.contrib`` shows what the package finds here, and what to do about trouble."""

import sys

import torch

from . import (  # noqa: F401  (they define the ops)
    clip_grad,
    dense_blaslt,
    dense_epilogue,
    focal_loss,
    fused_bias_swiglu,
    group_norm,
    groupbn,
    index_mul_2d,
    layer_norm,
    linear_cross_entropy,
    multihead_attn,
    optimizers,
    transducer,
)
from ._ops import library
from ._shared.native.doctor import main
from .openfold_triton import adam_swa  # noqa: F401
from .optimizers import distributed_adam  # noqa: F401
from .sparsity import retained_magnitude  # noqa: F401
from .xentropy import SoftmaxCrossEntropyLoss


def example(device: str) -> None:
    """Take the cross entropy of some rows and compare it with torch's."""
    logits = torch.linspace(-3, 4, 700, device=device).reshape(7, 100)
    labels = torch.arange(7, device=device)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, None)
    torch.testing.assert_close(losses, expected)


if __name__ == "__main__":
    sys.exit(main(library, example))
