"""The random numbers of ``math/philox.h`` in plain PyTorch, bit for bit; and seeds for them.

Philox4x32-10: Salmon, Moraes, Dror & Shaw 2011, https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["draw_seed", "philox", "uniform_rows"]

_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draw an int64 seed, ``[1]``, from a generator: the device's, which ``manual_seed`` sets."""
    kind = {"dtype": torch.int64, "device": device, "generator": generator}
    return torch.randint(-(2**63), 2**63 - 1, (1,), **kind)


def philox(counter: list[Tensor], key: Tensor) -> list[Tensor]:
    """Return four words of random bits, as int64 in [0, 2^32).

    ``counter`` is four tensors of such words; ``key`` is int64, of any value.
    """
    a, b, c, d = counter
    key0, key1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57  # modulo 2^64
        a, b = ((right >> 32) & _LOW) ^ b ^ key0, right & _LOW
        c, d = ((left >> 32) & _LOW) ^ d ^ key1, left & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return [a, b, c, d]


def uniform_rows(
    seed: Tensor, shape: torch.Size, first: int = 0, rows: int = 0, columns: int = 0
) -> Tensor:
    """The numbers in [0, 1) that kernels use for rows of ``shape``, ``[..., columns]``, in float32.

    Number i has word i % 4 of counter i // 4; every row begins at a multiple of 4. With ``rows``
    and ``columns``, ``[..., rows of shape, columns of shape]`` is cut from matrices
    ``[rows, columns]`` of numbers, behind the ``first`` ones.
    """
    if rows:
        *lead, own_rows, own_columns = shape
        whole = torch.Size((first + math.prod(lead), rows, columns))
        corners = uniform_rows(seed, whole)[first:, :own_rows, :own_columns]
        return corners.reshape(shape)
    *lead, columns = shape
    groups, rows = (columns + 3) // 4, 1
    for size in lead:
        rows *= size
    number = torch.arange(rows * groups, device=seed.device, dtype=torch.int64)
    zero = torch.zeros_like(number)
    words = torch.stack(philox([number & _LOW, number >> 32, zero, zero], seed), -1)
    bits = words.reshape(rows, 4 * groups)[:, :columns].reshape(shape)
    return (bits >> 8).to(torch.float32) * 2.0**-24
