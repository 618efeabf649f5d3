"""clip_grad_norm_ of a model's gradients; torch's function with its foreach kernels.

Traffic, in units of the gradients' size: the norm reads them (1), clipping reads and writes them
(2). Where nothing has to be clipped, Apex does not write; torch multiplies by 1.
"""

import torch

from apex.contrib.clip_grad import clip_grad_norm_
from apex_testkit.bench import chosen_device, compare

# (tensors, elements of each): small layers, a model in the caches, one beyond them, two matrices.
SHAPES = [(300, 64), (100, 10_000), (64, 1 << 20), (2, 1 << 24)]


def run(tensors: int, elements: int, dtype: torch.dtype, device: str) -> None:
    """Measure one list of gradients, clipped at every call and never."""
    parameters = [torch.nn.Parameter(torch.empty(0, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.data = torch.zeros(elements, device=device, dtype=dtype)
        parameter.grad = torch.randn(elements, device=device).to(dtype)
    norm = clip_grad_norm_(parameters, 1e30).item()
    size = tensors * elements * dtype.itemsize
    # Just above the norm's rounding error, so that repeated calls do not shrink the gradients.
    for name, max_norm, passes in (("clipped", norm * 0.9999, 3), ("in bounds", norm * 2, 1)):

        def step(function, max_norm=max_norm):
            def call():
                parameters[0].grad.mul_(1)
                return function(parameters, max_norm)

            return call

        def torchs(parameters, max_norm):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)

        compare(
            f"clip_grad_norm_ {name}",
            f"{str(dtype).removeprefix('torch.')} {tensors} of {elements}",
            bytes_moved=passes * size,
            device=device,
            apex=step(clip_grad_norm_),
            torch=step(torchs),
        )


for dtype in (torch.float32, torch.bfloat16):
    for shape in SHAPES:
        run(*shape, dtype, chosen_device())
