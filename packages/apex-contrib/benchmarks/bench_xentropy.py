"""Cross entropy with label smoothing, forward and backward.

Traffic, in units of the logits' size: the forward pass reads the logits (1), the backward pass
reads them and writes their gradient (2). Losses and labels are small beside that.
"""

import torch
import torch.nn.functional as F

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex_testkit.bench import chosen_device, compare

# (rows, classes): a language model, the same with a vocabulary that no vector width divides, an
# image classifier, and rows too short to vectorize well.
SHAPES = [(2048, 32_000), (1024, 50_257), (4096, 1000), (65_536, 10)]
SMOOTHING = 0.1
NO_PADDING = -100

try:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Liger
except ImportError:  # a peer on GPUs, where it is installed
    Liger = None


def torch_loss(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)


def apex_loss(logits, labels):
    return SoftmaxCrossEntropyLoss.apply(logits, labels, SMOOTHING, NO_PADDING).mean()


def run(rows: int, classes: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype."""
    logits = torch.randn(rows, classes, device=device).to(dtype).requires_grad_()
    labels = torch.randint(classes, (rows,), device=device)

    def step(loss):
        """Forward and backward; the gradient is dropped, so that nothing accumulates."""
        return lambda: torch.autograd.grad(loss(logits, labels), logits)

    peers = {}
    if Liger and device == "cuda":
        # It overwrites its logits by their gradient, and so has logits of its own. Other values
        # take it no other time.
        own = logits.detach().clone().requires_grad_()
        options = (None, NO_PADDING, 0.0, SMOOTHING)
        peers["liger"] = lambda: torch.autograd.grad(Liger.apply(own, labels, *options)[0], own)
    compare(
        "xentropy fwd+bwd",
        f"{str(dtype).removeprefix('torch.')} {rows}x{classes}",
        bytes_moved=3 * logits.numel() * logits.element_size(),
        device=device,
        apex=step(apex_loss),
        torch=step(torch_loss),
        torch_compiled=step(torch.compile(torch_loss, dynamic=False)),
        **peers,
    )


if __name__ == "__main__":
    for dtype in (torch.bfloat16, torch.float32):
        for rows, classes in SHAPES:
            run(rows, classes, dtype, chosen_device())
