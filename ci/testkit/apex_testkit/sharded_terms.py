"""A model whose gradients are exact, for random sequences of distributed optimizers' calls.

Gradients are sums of small integers, so every rank knows the sum over all ranks without rounding.
"""

import torch
from torch import Tensor, nn

SHAPES = ((), (3,), (2, 3), (0,), (40,), (5, 30), (2, 3, 2, 2))


class Fails(torch.autograd.Function):
    """Raises when gradients come back to it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("this backward fails")


class Term(nn.Module):
    """The inner product of a parameter and an input."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.param = nn.Parameter(value)
        self.seen = None  # the value that the last forward had

    def forward(self, factor: Tensor) -> Tensor:
        self.seen = self.param.detach().clone()
        return (self.param.double() * factor).sum()


class Terms(nn.Module):
    """A sum with a term for each parameter that is used, in any order."""

    def __init__(self, params: list[tuple[torch.dtype, int]], rank: int):
        super().__init__()
        self.terms = nn.ModuleList(
            Term(first_value(shape, 10 * index + rank).to(dtype))
            for index, (dtype, shape) in enumerate(params)
        )

    @property
    def params(self) -> list[nn.Parameter]:
        """Of all terms."""
        return [term.param for term in self.terms]

    def forward(self, seed: int, rank: int, used: list[int], fails_at: int | None = None) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for position, index in enumerate(used):
            if position == fails_at:
                total = Fails.apply(total.requires_grad_())
            term = self.terms[index]
            total = total + term(factor(seed, rank, index, term.param.shape))
        if fails_at == len(used):
            total = Fails.apply(total)
        return total


def first_value(shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(SHAPES[shape], generator=generator)
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def factor(seed: int, rank: int, index: int, shape: torch.Size) -> Tensor:
    """The gradient of a parameter: integers from -3 to 3, float64."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + index)
    return torch.randint(-3, 4, shape, generator=generator).double()


def chosen(mask: int, params: list[nn.Parameter]) -> list[int]:
    """Indices of the parameters whose bits are set; of one that requires a gradient at least."""
    used = [index for index in range(len(params)) if mask >> index & 1]
    wanted = [index for index, param in enumerate(params) if param.requires_grad]
    if wanted and not set(used) & set(wanted):
        used.append(wanted[mask % len(wanted)])
    return used[::-1] if mask % 3 == 0 else used


class Sums:
    """What all ranks have added up since gradients were cleared, in float64, by rank."""

    def __init__(self, world: int, params: list[nn.Parameter]):
        self.parts = [
            [torch.zeros(param.shape, dtype=torch.float64) for param in params]
            for _ in range(world)
        ]

    def add(
        self, seed: int, used: list[list[int]], params: list[nn.Parameter], scale: float = 1.0
    ) -> None:
        """Add the gradients of a backward pass with the parameters that each rank used."""
        for rank, mine in enumerate(used):
            for index in mine:
                if params[index].requires_grad:
                    own = factor(seed, rank, index, params[index].shape) * scale
                    self.parts[rank][index] = self.parts[rank][index] + own

    def totals(self) -> list[Tensor]:
        """By parameter, over all ranks."""
        return [sum(parts) for parts in zip(*self.parts, strict=True)]

    def are_hardly_exact(self) -> bool:
        """Whether one more backward pass may need more bits than a bfloat16 has."""
        found = (part for mine in self.parts for part in mine if part.numel())
        return any(part.abs().max() > 24 for part in found)


def norm(tensors: list[Tensor]) -> float:
    """Euclidean norm of all elements."""
    return sum(t.double().square().sum().item() for t in tensors) ** 0.5
