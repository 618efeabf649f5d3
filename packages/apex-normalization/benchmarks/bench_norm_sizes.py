"""Both norms as modules, against those of torch, from a single short row to 65,536 rows.

At the small end it is calls that are measured: of a module, an autograd function, an operator.
"""

import torch
from torch import nn

from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex_testkit.bench import chosen_device, compare

ROWS = (1, 64, 1024, 65_536)
COLUMNS = (4096, 64, 768, 65_536)
GPU_COLUMNS = (*COLUMNS, 16_384, 262_144)  # up to rows that no block holds
LARGEST = 1 << 26  # elements
NORMS = {"layer_norm": (FusedLayerNorm, nn.LayerNorm), "rms_norm": (FusedRMSNorm, nn.RMSNorm)}


def run(name: str, rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Measure one size and dtype."""
    x = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    modules = [kind(columns, eps=1e-5, device=device, dtype=dtype) for kind in NORMS[name]]
    for parameter in (p for module in modules for p in module.parameters()):
        nn.init.normal_(parameter)

    def forward(module):
        def call():
            with torch.no_grad():
                module(x)

        return call

    def training(module):
        return lambda: torch.autograd.grad(module(x), (x, *module.parameters()), dy)

    case = f"{str(dtype).removeprefix('torch.')} {rows}x{columns}"
    size = x.numel() * x.element_size()
    for op, step, passes in (("fwd", forward, 2), ("fwd+bwd", training, 5)):
        contestants = dict(zip(("apex", "torch"), map(step, modules), strict=True))
        compare(f"{name} {op}", case, bytes_moved=passes * size, device=device, **contestants)


if __name__ == "__main__":
    device = chosen_device()
    for name in NORMS:
        for dtype in (torch.bfloat16, torch.float32):
            for rows in ROWS:
                for columns in GPU_COLUMNS if device == "cuda" else COLUMNS:
                    if rows * columns <= LARGEST:
                        run(name, rows, columns, dtype, device)
