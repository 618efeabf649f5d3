"""Dense layers, and two of them with GELU between: forward and backward, and small ones' calls.

Matrix products are nearly all of the time of large layers, so no traffic is counted.
"""

import torch
from torch.nn import functional as F

from apex.fused_dense import fused_dense_function, fused_dense_gelu_dense_function
from apex_testkit.bench import chosen_device, compare

# (rows, in and out, hidden). The last is so small that calls are all of the time.
SHAPES = {
    torch.float32: [(1024, 1024, 4096), (4, 16, 64)],
    torch.bfloat16: [(1024, 1024, 4096), (4, 16, 64)],
    torch.float16: [(256, 256, 1024)],  # seconds for torch, where a CPU has no float16 products
}


def eager(x, weight1, bias1, weight2, bias2):
    return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)


def run(rows: int, size: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    """Measure one shape and dtype."""
    torch.compiler.reset()  # or the compiler gives up at its eighth shape
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b, device=device) for a, b in ((size, hidden), (hidden, size))]
    parameters = [p.to(dtype).detach().requires_grad_() for l in layers for p in l.parameters()]
    x, dy = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
    x.requires_grad_()
    case = f"{str(dtype).removeprefix('torch.')} {rows} x {size} to {hidden} to {size}"

    def both(function, parameters, dy):
        given = [x, *parameters]
        return lambda: torch.autograd.grad(function(*given), given, dy)

    compare(
        "fused_dense_gelu_dense fwd+bwd",
        case,
        device=device,
        apex=both(fused_dense_gelu_dense_function, parameters, dy),
        torch=both(eager, parameters, dy),
        torch_compiled=both(torch.compile(eager, dynamic=False), parameters, dy),
    )
    dhidden = torch.randn(rows, hidden, device=device).to(dtype)
    compare(
        "fused_dense fwd+bwd",
        case.rpartition(" to ")[0],
        device=device,
        apex=both(fused_dense_function, parameters[:2], dhidden),
        torch=both(F.linear, parameters[:2], dhidden),
    )
    with torch.no_grad():
        compare(
            "fused_dense fwd, no gradients",
            case.rpartition(" to ")[0],
            device=device,
            apex=lambda: fused_dense_function(x, *parameters[:2]),
            torch=lambda: F.linear(x, *parameters[:2]),
        )


for dtype, shapes in SHAPES.items():
    for shape in shapes:
        run(*shape, dtype, chosen_device())
