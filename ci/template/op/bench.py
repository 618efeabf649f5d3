"""my_op. Traffic per element: read x, write y."""

import torch

from apex.my_package.my_op import my_op
from apex_testkit.bench import compare

for dtype in (torch.float32, torch.bfloat16):
    for rows, columns in ((4096, 4096), (65_536, 64)):
        x = torch.randn(rows, columns, dtype=dtype)
        compare(
            "my_op",
            f"{str(dtype).removeprefix('torch.')} {rows}x{columns}",
            bytes_moved=2 * x.numel() * x.element_size(),
            apex=lambda x=x: my_op(x),
            torch=lambda x=x: x * x.mean(-1, keepdim=True),
        )
