"""Cross entropy with label smoothing, forward and backward, of a language model's logits.

Traffic: the forward pass reads the logits; the backward pass reads them and writes a gradient.
"""

import torch
import torch.nn.functional as F
from apex_testkit.bench import compare

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

SMOOTHING = 0.1
NO_PADDING = -100


def torch_loss(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)


def apex_loss(logits, labels):
    return SoftmaxCrossEntropyLoss.apply(logits, labels, SMOOTHING, NO_PADDING).mean()


def stepper(loss, logits, labels):
    def step():
        return torch.autograd.grad(loss(logits, labels), logits)

    return step


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"2048 x 32000": (2048, 32_000), "4096 x 1000": (4096, 1000), "65536 x 10": (65_536, 10)}

for shape, (rows, classes) in SHAPES.items():
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(rows, classes, device=DEVICE).to(dtype).requires_grad_()
        labels = torch.randint(classes, (rows,), device=DEVICE)
        compare(
            "softmax_xentropy",
            f"{shape} {str(dtype).removeprefix('torch.')}",
            bytes_moved=3 * logits.numel() * logits.element_size(),
            device=DEVICE,
            apex=stepper(apex_loss, logits, labels),
            torch_eager=stepper(torch_loss, logits, labels),
            torch_compiled=stepper(torch.compile(torch_loss), logits, labels),
        )
