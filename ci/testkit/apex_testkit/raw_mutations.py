"""What may be wrong, or merely unusual, with the arguments of a raw operator."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


# Products of these with other sizes wrap around 2**64.
_WILD = (-(2**63), -(2**62), -2, -1, 0, 2**31, 2**61 + 1, 2**62, 2**63 - 1)


def mutate(rng: random.Random, args: dict[str, Any], wild: bool = False) -> str:
    """Change one argument in place; return what was done, for messages.

    Args:
        rng: decides which one, and how.
        args: the arguments by name.
        wild: whether integers may become as large and as small as there are.
    """
    name = rng.choice(list(args))
    value = args[name]
    if isinstance(value, bool):
        args[name] = not value
        return f"{name} negated"
    if isinstance(value, (int, float)):
        choices = [-1, 0, 2, 1e3, math.nan, math.inf] if isinstance(value, float) else [-1, 0, 3]
        if wild and isinstance(value, int):
            choices += _WILD
        args[name] = type(value)(rng.choice(choices))
        return f"{name}={args[name]}"
    tensors = [t for t in _flat([value]) if isinstance(t, Tensor)]
    is_short = isinstance(value, list) and len(tensors) < len(value)
    if is_short or not all(map(is_readable, tensors)):
        return f"{name}: as it was"  # changed already
    others = [v for k, v in args.items() if k != name]
    if wild and isinstance(value, Tensor) and value.dtype == torch.int64 and rng.random() < 0.5:
        args[name] = _some_wild(rng, value)
        return f"{name}: wild"
    if isinstance(value, Tensor):
        how = rng.choice(list(_TENSOR))
        args[name] = _TENSOR[how](rng, value, others)
        return f"{name}: {how}"
    if isinstance(value, list) and value:
        how = rng.choice(["shorter", "longer", "twice", "empty", *_TENSOR, *_TENSOR])
        index = rng.randrange(len(value))
        changed = list(value)
        if how == "shorter":
            del changed[index]
        elif how == "longer":
            changed.append(torch.randn(3).to(value[0].dtype))
        elif how == "twice":
            changed[index] = value[rng.randrange(len(value))]
        elif how == "empty":
            changed.clear()
        else:
            changed[index] = _TENSOR[how](rng, value[index], [value, *others])
        args[name] = changed
        return f"{name}[{index}]: {how}"
    return f"{name}: as it was"


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor is in memory of the CPU, and all of its storage is there."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.numel() == 0 or end <= tensor.untyped_storage().nbytes()


def _some_wild(rng: random.Random, tensor: Tensor) -> Tensor:
    chosen = torch.tensor([rng.choice(_WILD) for _ in range(tensor.numel())], dtype=torch.int64)
    return torch.where(torch.rand(tensor.shape) < 0.5, chosen.view(tensor.shape), tensor)


def _flat(values: list) -> list:
    return [t for value in values for t in (value if isinstance(value, list) else [value])]


def _freed(rng: random.Random, tensor: Tensor, others: list) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def _short(rng: random.Random, tensor: Tensor, others: list) -> Tensor:
    """A view that starts within its storage, and ends beyond it."""
    copy = torch.cat([tensor.reshape(-1), tensor.reshape(-1)])[tensor.numel() :]
    copy.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    return copy.view(tensor.shape)


def _strided(rng: random.Random, tensor: Tensor, others: list) -> Tensor:
    wide = tensor.new_zeros((*tensor.shape, 2))
    wide[..., 0] = tensor
    return wide[..., 0]


def _transposed(rng: random.Random, tensor: Tensor, others: list) -> Tensor:
    if tensor.dim() < 2:
        return tensor.clone()
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _expanded(rng: random.Random, tensor: Tensor, others: list) -> Tensor:
    return tensor.reshape(-1)[:1].expand(tensor.numel()).view(tensor.shape)


def _offset(rng: random.Random, tensor: Tensor, others: list) -> Tensor:
    """The same numbers, amid a larger storage."""
    base = torch.cat([tensor.new_zeros(rng.randrange(1, 9)), tensor.reshape(-1)])
    return base[base.numel() - tensor.numel() :].view(tensor.shape)


def _other(rng: random.Random, tensor: Tensor, others: list) -> Tensor:
    """Another argument, or memory that overlaps one."""
    found = [t for t in _flat(others) if isinstance(t, Tensor) and is_readable(t)]
    if not found:
        return tensor
    other = rng.choice(found)
    shift = rng.choice((0, 0, 1, 2))
    end = tensor.numel() + shift
    if not other.is_contiguous() or other.numel() < end:
        return other
    return other.view(-1)[shift:end].view(tensor.shape)


_TENSOR: dict[str, Callable[[random.Random, Tensor, list], Any]] = {
    "None": lambda rng, tensor, others: None,
    "meta": lambda rng, tensor, others: tensor.to("meta"),
    "freed": _freed,
    "short storage": _short,
    "dtype": lambda rng, tensor, others: tensor.to(rng.choice(_DTYPES)),
    "flat": lambda rng, tensor, others: tensor.reshape(-1).clone(),
    "more": lambda rng, tensor, others: tensor.new_zeros(tensor.numel() + 1),
    "less": lambda rng, tensor, others: tensor.reshape(-1)[1:].clone(),
    "without elements": lambda rng, tensor, others: tensor.new_zeros(0),
    "strided": _strided,
    "transposed": _transposed,
    "expanded": _expanded,
    "offset": _offset,
    "another": _other,
    "sparse": lambda rng, tensor, others: tensor.to_sparse(),
    "inf": lambda rng, tensor, others: tensor / 0 if tensor.is_floating_point() else tensor,
    "requires grad": lambda rng, tensor, others: (
        tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor
    ),
}
