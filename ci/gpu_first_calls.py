"""What a first step of FusedAdam takes, and later ones: a process of ci/gpu.py, one line.

APEX_BENCH_DEVICE is cuda or cpu; APEX_CUDA_COMPILER and APEX_CACHE_DIR decide where kernels come
from.
"""

import os
import time

import torch

from apex.optimizers import FusedAdam

LATER = 1000


def main() -> None:
    device = os.environ.get("APEX_BENCH_DEVICE", "cuda")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    parameter = torch.nn.Parameter(torch.ones(1000, device=device))
    parameter.grad = torch.full_like(parameter, 3.0)
    optimizer = FusedAdam([parameter], lr=1e-3, weight_decay=0.0)
    wait()
    start = time.perf_counter()
    optimizer.step()
    wait()
    first = time.perf_counter() - start
    # Adam's first step is the learning rate, whatever the gradient.
    expected = torch.full_like(parameter, 1 - 1e-3)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)
    start = time.perf_counter()
    for _ in range(LATER):
        optimizer.step()
    wait()
    later = (time.perf_counter() - start) / LATER
    print(f"first step {1e3 * first:.1f} ms, later ones {1e6 * later:.1f} us each")


if __name__ == "__main__":
    main()
