"""A multilayer perceptron, forward and backward.

Matrix products are nearly all of the time of large layers, so no traffic is counted.
"""

import itertools

import torch

from apex.mlp import MLP
from apex_testkit.bench import chosen_device, compare

# (rows, sizes). The last is so small that calls are all of the time.
SHAPES = {
    torch.float32: [(1024, (1024, 1024, 1024, 512)), (4, (16, 16, 16))],
    torch.bfloat16: [(1024, (1024, 1024, 1024, 512)), (4, (16, 16, 16))],
    torch.float16: [(256, (512, 512, 256))],  # a second, where a CPU has no float16 products
}
ACTIVATIONS = {"relu": torch.nn.ReLU, "sigmoid": torch.nn.Sigmoid}


def run(rows: int, sizes: tuple, activation: str, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    torch.manual_seed(0)
    ours = MLP(sizes, activation=activation).to(device, dtype)
    layers = []
    for i, (columns, wide) in enumerate(itertools.pairwise(sizes)):
        layers += [torch.nn.Linear(columns, wide), ACTIVATIONS[activation]()]
        layers[-2].weight, layers[-2].bias = ours.weights[i], ours.biases[i]
    eager = torch.nn.Sequential(*layers).to(device, dtype)
    x = torch.randn(rows, sizes[0], device=device).to(dtype).requires_grad_()
    dy = torch.randn(rows, sizes[-1], device=device).to(dtype)

    def both(module):
        given = [x, *ours.parameters()]
        return lambda: torch.autograd.grad(module(x), given, dy)

    compare(
        f"mlp {activation} fwd+bwd",
        f"{str(dtype).removeprefix('torch.')} {rows} x {' to '.join(map(str, sizes))}",
        device=device,
        apex=both(ours),
        torch=both(eager),
        torch_compiled=both(torch.compile(eager, dynamic=False)),
    )


for dtype, shapes in SHAPES.items():
    for shape in shapes:
        run(*shape, "relu", dtype, chosen_device())
run(*SHAPES[torch.float32][0], "sigmoid", torch.float32, chosen_device())
