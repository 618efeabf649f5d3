"""Small float16 products on the CPU: of a linear layer, ours against torch's and through float32.

`forward` is the layer with its bias, `dx` and `dw` the two products of its backward. amp takes ours
up to `cpu_float16._FEW` multiplications, and goes through float32 beyond.
"""

import torch

from apex.amp.casting.float16_product import float16_product
from apex_testkit.bench import chosen_device, compare

SHAPES = ((4, 8, 8), (32, 16, 16), (32, 32, 32), (64, 64, 64), (128, 64, 64), (1, 256, 256))

if __name__ == "__main__" and chosen_device() == "cpu":
    for rows, inputs, outputs in SHAPES:
        x, dy = torch.randn(rows, inputs).half(), torch.randn(rows, outputs).half()
        weight, bias = torch.randn(outputs, inputs).half(), torch.randn(outputs).half()
        for name, added, a, b in (
            ("forward", bias, x, weight.t()),
            ("dx", None, dy, weight),
            ("dw", None, dy.t(), x),
        ):

            def torchs(added=added, a=a, b=b):
                return torch.mm(a, b) if added is None else torch.addmm(added, a, b)

            def through_float32(added=added, a=a, b=b, run=torchs):
                wide = None if added is None else added.float()
                return run(wide, a.float(), b.float()).half()

            compare(
                f"float16_product {name}",
                f"{rows}x{inputs}x{outputs}",
                apex=lambda added=added, a=a, b=b: float16_product(added, a, b),
                torch=torchs,
                through_float32=through_float32,
            )
