"""Focal loss, forward and backward.

Traffic, in units of the logits' size: the forward reads them (1), the backward reads them again and
writes their gradient (2).
"""

import torch
from torch.nn import functional as F

from apex.contrib.focal_loss.focal_loss import focal_loss
from apex_testkit.bench import chosen_device, compare

# (anchors, classes): a level of a detector with 80 classes, of one with few, and of one with many.
SHAPES = [(49_152, 80), (65_536, 9), (4096, 1203), (192, 80)]


def eager(x, targets, positives):
    t = F.one_hot(targets.clamp(min=-1) + 1, x.shape[1] + 1)[:, 1:].to(x.dtype)
    read = (targets != -2)[:, None]
    bce = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    p = x.sigmoid()
    p_t = p * t + (1 - p) * (1 - t)
    weight = 0.25 * t + 0.75 * (1 - t)
    return (weight * (1 - p_t) ** 2 * bce * read).float().sum() / positives


def run(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype, forward alone and with the backward."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    x = torch.randn(rows, columns, device=device).to(dtype).requires_grad_()
    # One in a hundred has a class, as anchors do.
    targets = torch.randint(0, columns, (rows,), device=device)
    targets[torch.rand(rows, device=device) < 0.99] = -1
    positives = torch.tensor(rows / 100, device=device)
    compiled = torch.compile(eager, dynamic=False)
    ours = lambda x: focal_loss(x, targets, positives, columns, 0.25, 2.0)
    functions = {
        "apex": ours,
        "torch": lambda x: eager(x, targets, positives),
        "torch_compiled": lambda x: compiled(x, targets, positives),
    }
    size = x.numel() * x.element_size()
    for name, moved in (("fwd", size), ("fwd+bwd", 3 * size)):
        steps = {
            peer: (lambda f=f: f(x.detach()))
            if name == "fwd"
            else (lambda f=f: torch.autograd.grad(f(x), x))
            for peer, f in functions.items()
        }
        label = f"{str(dtype).removeprefix('torch.')} {rows}x{columns}"
        compare(f"focal_loss {name}", label, bytes_moved=moved, device=device, **steps)


for dtype in (torch.float32, torch.bfloat16):
    for shape in SHAPES:
        run(*shape, dtype, chosen_device())
