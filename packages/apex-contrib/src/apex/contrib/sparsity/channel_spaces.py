"""Sets of channels that can only be permuted together, and the tensors that have them.

A space is the channels that a layer makes, and all that is added to them, normalizes them, or reads
them: its readers are siblings, its makers co-parents. Whoever finds a use of channels that depends
on their order freezes the space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class Size:
    """A number times unknown sizes, which are dimensions of nodes: equal ones are the same."""

    number: int
    unknown: tuple[tuple[str, int], ...] = ()

    def __mul__(self, other: Size) -> Size:
        unknown = tuple(sorted((*self.unknown, *other.unknown)))
        return Size(self.number * other.number, unknown)


@dataclass(frozen=True)
class Channels:
    """A tensor whose dimension ``axis`` (negative) is one space, or several that are concatenated.

    ``sizes`` are those of all dimensions, or None where not even their number is known.
    """

    spaces: tuple[int, ...]
    axis: int
    sizes: tuple[Size, ...] | None

    @property
    def dims(self) -> int | None:
        """The number of dimensions, or None where it is not known."""
        return None if self.sizes is None else len(self.sizes)

    def with_spaces(self, spaces: Iterable[int]) -> Channels:
        return replace(self, spaces=tuple(spaces))


@dataclass(frozen=True)
class Attended:
    """What MultiheadAttention returns: its first part has channels, the other has none."""

    channels: Channels


@dataclass
class Space:
    """``size`` channels; each ``atom`` of them is permuted like the first. Frozen: for a reason."""

    size: int
    atom: int
    frozen: str | None = None


@dataclass
class Use:
    """A dimension of a tensor, made of parts: a space, and how many of its channels.

    ``reads``: the tensor is a weight, and these are the channels that it reads.
    """

    name: str
    tensor: Tensor
    dim: int
    parts: list[tuple[int, int]] = field(default_factory=list)
    reads: bool = False


def key_of(tensor: Tensor) -> Any:
    """The same for tensors of the same memory, such as tied weights."""
    where = tensor.data_ptr() if tensor.device.type != "meta" else 0
    return (tensor.device, where) if where else id(tensor)


class ChannelSpaces:
    """All spaces of a network, and the uses of each."""

    def __init__(self) -> None:
        self._spaces: list[Space] = []
        self._merged: list[int] = []  # into which space each went
        self._uses: dict[tuple[Any, int], Use] = {}
        self._frozen: dict[tuple[Any, int], str] = {}  # dimensions of tensors, and why

    def new(self, size: int, atom: int | None = None) -> int:
        """Add a space; return its number."""
        self._spaces.append(Space(size, atom or size))
        self._merged.append(len(self._merged))
        return len(self._merged) - 1

    def root(self, number: int) -> int:
        """The number of the space that this one went into."""
        while self._merged[number] != number:
            number = self._merged[number]
        return number

    def __getitem__(self, number: int) -> Space:
        return self._spaces[self.root(number)]

    def roots(self) -> list[int]:
        """All spaces, in the order of the network."""
        return [n for n, merged in enumerate(self._merged) if n == merged]

    def size(self, channels: Channels) -> int:
        return sum(self[space].size for space in channels.spaces)

    def freeze(self, channels: Channels, reason: str) -> None:
        """Forbid to permute these channels."""
        for space in channels.spaces:
            self[space].frozen = self[space].frozen or reason

    def freeze_dim(self, tensor: Tensor | None, dim: int, reason: str) -> None:
        """Forbid to permute a dimension of a tensor, by whatever other use it has."""
        if tensor is not None:
            self._frozen.setdefault((key_of(tensor), dim), reason)

    def freeze_tensor(self, tensor: Tensor | None, reason: str) -> None:
        if tensor is not None and not is_lazy(tensor):
            for dim in range(tensor.dim()):
                self.freeze_dim(tensor, dim, reason)

    def merge(self, one: int, other: int) -> None:
        """Make one space of two, which must be equal in size."""
        one, other = sorted((self.root(one), self.root(other)))
        if one == other:
            return
        left, right = self._spaces[one], self._spaces[other]
        if left.size != right.size:
            raise ValueError(f"{left.size} and {right.size} channels cannot be the same")
        left.atom = gcd(left.atom, right.atom)
        left.frozen = left.frozen or right.frozen
        self._merged[other] = one

    def merge_channels(self, one: Channels, other: Channels) -> bool:
        """Let two tensors have the same channels; False, and both are frozen, where they cannot."""
        sizes = [[self[space].size for space in c.spaces] for c in (one, other)]
        if sizes[0] != sizes[1] or one.axis != other.axis:
            for channels in (one, other):
                self.freeze(channels, "meets channels of other sizes, or in another dimension")
            return False
        for left, right in zip(one.spaces, other.spaces, strict=True):
            self.merge(left, right)
        return True

    def limit_atom(self, space: int, atom: int) -> None:
        """Let each ``atom`` channels be permuted like the first."""
        self[space].atom = gcd(self[space].atom, atom)

    def attach(
        self,
        name: str,
        tensor: Tensor | None,
        dim: int,
        channels: Channels,
        reads: bool = False,
    ) -> None:
        """Say that a dimension of a tensor has these channels."""
        if tensor is None:
            return
        lengths = [self[space].size for space in channels.spaces]
        self.attach_parts(name, tensor, dim, channels, lengths, reads)

    def attach_parts(
        self,
        name: str,
        tensor: Tensor,
        dim: int,
        channels: Channels,
        lengths: list[int],
        reads: bool = False,
    ) -> None:
        """The same, of a tensor that has fewer: of a grouped convolution, those of one group."""
        if sum(lengths) != tensor.shape[dim]:
            self.freeze(channels, f"{name} has {tensor.shape[dim]} channels")
            self.freeze_dim(tensor, dim, "has channels of another size")
            return
        parts = list(zip(channels.spaces, lengths, strict=True))
        use = self._uses.setdefault((key_of(tensor), dim), Use(name, tensor, dim, parts))
        use.reads |= reads
        if [length for _, length in use.parts] != lengths:
            self.freeze(channels, f"{name} has other channels elsewhere")
            self.freeze_dim(tensor, dim, "has other channels elsewhere")
            return
        for (known, _), (space, _) in zip(use.parts, parts, strict=True):
            if self[known].size != self[space].size:
                self.freeze(channels, f"{name} has other channels elsewhere")
                self.freeze_dim(tensor, dim, "has other channels elsewhere")
            else:
                self.merge(known, space)

    def made_by(
        self, name: str, weight: Tensor, atom: int | None = None, dim: int = 0
    ) -> tuple[int, ...]:
        """The spaces of a weight's rows: new ones, unless the weight made channels before."""
        use = self._uses.get((key_of(weight), dim))
        if use is not None:
            return tuple(space for space, _ in use.parts)
        made = (self.new(weight.shape[dim], atom),)
        self.attach(name, weight, dim, Channels(made, -1, None))
        return made

    def finish(self) -> None:
        """Freeze the spaces of whatever dimension of a tensor is frozen."""
        for key, reason in self._frozen.items():
            if use := self._uses.get(key):
                self.freeze(Channels(tuple(s for s, _ in use.parts), -1, None), reason)

    def use_of(self, tensor: Tensor, dim: int) -> Use | None:
        """The use of a tensor's dimension, if it has known channels."""
        return self._uses.get((key_of(tensor), dim))

    def uses(self) -> Iterator[Use]:
        """All uses, in the order of the network."""
        yield from self._uses.values()

    def new_order(self, use: Use, permutations: dict[int, list[int]]) -> Tensor | None:
        """The order of a use's channels, int64, or None where it stays.

        Args:
            permutations: by space, of its atom.
        """
        parts, begin, moves = [], 0, False
        for space, length in use.parts:
            permutation = permutations.get(self.root(space))
            if permutation is None:
                parts.append(torch.arange(begin, begin + length))
            else:
                moves = True
                atom = torch.tensor(permutation)
                starts = torch.arange(begin, begin + length, len(permutation))
                parts.append((starts[:, None] + atom).flatten())
            begin += length
        return torch.cat(parts) if moves else None
