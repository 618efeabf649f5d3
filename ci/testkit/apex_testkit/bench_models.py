"""Lists of parameters that optimizers are timed on."""

import itertools
from collections.abc import Callable

import torch

# Element counts of parameters, and how often each occurs: torchvision's resnet50, 25.6 M in all,
# and BERT-base, 110 M.
_RESNET50 = {
    64: 14, 128: 16, 256: 34, 512: 22, 1024: 14, 2048: 8, 1000: 1,
    4096: 1, 9408: 1, 16384: 6, 32768: 1, 36864: 3, 65536: 7, 131072: 2, 147456: 4, 262144: 10,
    524288: 3, 589824: 6, 1048576: 7, 2048000: 1, 2097152: 1, 2359296: 3,
}  # fmt: skip
_BERT_BASE = {23_440_896: 1, 2_359_296: 24, 589_824: 49, 393_216: 1, 3_072: 12, 1_536: 1, 768: 111}

RESNET50 = [n for n, count in _RESNET50.items() for _ in range(count)]
BERT_BASE = [n for n, count in _BERT_BASE.items() for _ in range(count)]


def models(device: str, **first: list[int]) -> dict[str, list[int]]:
    """Cases and their element counts: ``first``, then many tiny, many small and two large ones."""
    return {
        **first,
        "10,000 x 100": [100] * 10_000,
        "norms 400 x 1k": [1_000] * 400,
        "mlp 2 x 10M": [10_000_000] * 2,
        **({"mlp 2 x 200M": [200_000_000] * 2} if device == "cuda" else {}),
    }


def params_with_grads(
    sizes: list[int], device: str, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """Random parameters of so many elements, each with a random gradient."""
    params = [torch.nn.Parameter(torch.randn(n, device=device).to(dtype)) for n in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def compiled_peer(
    cls: type[torch.optim.Optimizer], sizes: list[int], device: str, **options: object
) -> dict[str, Callable[[], object]]:
    """The compiled step of an optimizer of torch's; empty for long lists, which take too long."""
    if len(sizes) > 200:
        return {}
    lr = torch.tensor(1e-3, device=device)  # compiled once for all learning rates
    optimizer = cls(params_with_grads(sizes, device), lr=lr, weight_decay=0.01, **options)
    return {"torch_compiled": torch.compile(optimizer.step)}


def with_new_grads(
    params: list[torch.nn.Parameter], step: Callable[[], object]
) -> Callable[[], None]:
    """``step``, before which every parameter is given another gradient, as by a backward pass."""
    own = [[p.grad for p in params], [torch.randn_like(p) for p in params]]
    turns = itertools.cycle(own)

    def renewed() -> None:
        for param, grad in zip(params, next(turns), strict=True):
            param.grad = grad
        step()

    return renewed
