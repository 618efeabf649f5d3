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
    size = tensors * elements * dtype.itemsize

    def torchs(parameters, max_norm):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)

    for name, factor, passes in (("clipped", 1 - 1e-5, 3), ("in bounds", 1, 1)):
        bound = clip_grad_norm_(parameters, 1e30).item() * (1 if factor < 1 else 2)

        def step(function, factor=factor):
            def call():
                nonlocal bound
                bound *= factor  # a bound that stays would clip once, and never again
                return function(parameters, bound)

            return call

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
