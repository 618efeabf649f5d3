"""A language model's head and its loss, forward and backward, and the memory that they take.

Three matrix products take nearly all of the time. A peer that stores the logits has them, their
gradient and, in 16 bits, the same in float32; the peak of memory stands beside each case.
"""

import torch
import torch.nn.functional as F

from apex.contrib.xentropy import linear_cross_entropy
from apex_testkit.bench import chosen_device, compare

# (tokens, features, classes): vocabularies of Llama 2, GPT-2, Llama 3 and Gemma; on a CPU tokens
# and features are fewer than models have.
SHAPES = {
    "cpu": [(2048, 512, 32_000), (2048, 512, 50_257), (1024, 512, 128_256), (1024, 256, 256_000)],
    "cuda": [
        (8192, 4096, 32_000),
        (8192, 1024, 50_257),
        (8192, 4096, 128_256),
        (8192, 2304, 256_000),
    ],
}

try:
    from liger_kernel.ops.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyFunction as Liger,
    )
except ImportError:  # a peer on GPUs, where it is installed
    Liger = None


def plain(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def chunked(hidden, weight, labels):
    """torch's own, from 2.13 on."""
    return F.linear_cross_entropy(
        hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions(), reduction="mean"
    )


def run(tokens: int, features: int, classes: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype."""
    hidden = torch.randn(tokens, features, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=device) / features**0.5).to(dtype)
    weight.requires_grad_()
    labels = torch.randint(classes, (tokens,), device=device)

    def step(loss):
        return lambda: torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))

    contestants = {"apex": linear_cross_entropy, "torch": plain}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        contestants["torch_chunked"] = chunked
    if Liger and device == "cuda":
        contestants["liger"] = lambda *given: Liger.apply(*given)[0]
    compare(
        "linear cross entropy fwd+bwd",
        f"{str(dtype).removeprefix('torch.')} {tokens}x{features}x{classes}",
        device=device,
        **{name: step(loss) for name, loss in contestants.items()},
    )


if __name__ == "__main__":
    device = chosen_device()
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES[device]:
            run(*shape, dtype, device)
