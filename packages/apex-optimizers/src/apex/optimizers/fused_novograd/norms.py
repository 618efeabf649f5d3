"""The running norms of a group: ``group["exp_avg_sq"]``, one number per parameter.

There is a vector for each kind of parameter: 16-bit, float32, and, if there are any, float64. Each
is in the order of the group's parameters. Vectors are float32, and float64 for float64 parameters.
complex64 and complex128 count as float32 and float64.
A parameter that has not taken a step has 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..stepping.buckets import Bucket

NORMS = "exp_avg_sq"

_KINDS = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}
_KINDS |= {torch.complex64: 1, torch.complex128: 2}
_NAMES = ("16-bit", "float32", "float64")

_NONE = torch.zeros(0, device="cpu")

_Place = tuple[int, int]  # kind, position in the kind's vector


class NovoGradBucket(Bucket):
    """A bucket that knows where the norms of its parameters are."""

    kind: int = -1  # not known before the first step
    slots: Tensor | None = None  # positions in the kind's vector; None: the whole vector

    def run(self, values: Sequence[Any]) -> None:
        super().run(values)
        vector, norms = self.group[NORMS][self.kind], values[0]
        if norms is not vector:
            vector[... if self.slots is None else self.slots] = norms.to(vector.device)


class GroupNorms:
    """Keeps the vectors in line with the parameters of their groups, which may change."""

    def __init__(self) -> None:
        # By id of the group: that, and each parameter's place, in order.
        self._known: dict[int, tuple[dict[str, Any], dict[Tensor, _Place]]] = {}

    def forget_others(self, groups: list[dict[str, Any]]) -> None:
        """Forget groups that were removed from the optimizer."""
        if list(self._known) != list(map(id, groups)):
            kept = {id(group): self._known.get(id(group)) for group in groups}
            self._known = {key: known for key, known in kept.items() if known is not None}

    def adopt(self, groups: list[dict[str, Any]]) -> None:
        """Note the places of loaded or copied norms, for the groups' present parameters."""
        for group in groups:
            if NORMS in group and [v.numel() for v in group[NORMS]] == _counts(group["params"]):
                self._known[id(group)] = group, _places(group["params"])

    def align(self, groups: list[dict[str, Any]]) -> None:
        """Move norms to the parameters' present places: a copy does not know the earlier dtypes."""
        for group in groups:
            if NORMS in group and id(group) in self._known:
                self._align(group, _places(group["params"]))

    def place(self, group: dict[str, Any], bucket: NovoGradBucket) -> None:
        """Make the group's vectors, where missing or out of date, and find the bucket's slots."""
        places = _places(group["params"])
        self._align(group, places)
        chosen = [places[param] for param in bucket.params]
        bucket.kind = chosen[0][0]
        positions = [position for _, position in chosen]
        vector = group[NORMS][bucket.kind]
        is_whole = positions == list(range(vector.numel()))
        if is_whole and vector.device == bucket.params[0].device:
            bucket.slots = None
        else:
            bucket.slots = torch.tensor(positions, device=vector.device)

    def _align(self, group: dict[str, Any], places: dict[Tensor, _Place]) -> None:
        vectors, (_, known) = group.get(NORMS), self._known.get(id(group), (group, None))
        if vectors is None:
            group[NORMS] = _zeros(group["params"])
        elif known is None:
            _check_lengths(group, vectors)
        elif known != places:
            group[NORMS] = _moved(group["params"], vectors, known, places)
        self._known[id(group)] = group, places


def conform(
    group: dict[str, Any], saved_group: dict[str, Any], saved_state: dict[Any, Any]
) -> list[Tensor] | None:
    """Saved vectors as this group needs them; None if they were saved before the first step.

    Apex has no numbers for parameters that never had a gradient, and one kind of vector alone may
    come from masters of another dtype.

    Raises:
        ValueError: the number of norms does not fit the parameters.
    """
    params = group["params"]
    has_state = [bool(saved_state.get(index)) for index in saved_group["params"]]
    vectors = saved_group.get(NORMS)
    if vectors is None:
        if any(has_state):
            raise ValueError(
                f"FusedNovoGrad.load_state_dict: the state has moments, but no {NORMS!r}."
            )
        return None
    vectors = [_NONE if vector is None else vector for vector in vectors]
    filled = [vector for vector in vectors if vector.numel()]
    is_single = len(filled) == 1 and filled[0].numel() == len(params)
    result, places = _zeros(params), _places(params)
    for kind, target in enumerate(result):
        indices = [i for i, p in enumerate(params) if places[p][0] == kind]
        started = [i for i in indices if has_state[i]]
        source = vectors[kind] if kind < len(vectors) else _NONE
        if is_single:
            target.copy_(filled[0][indices])
        elif source.numel() == len(indices):
            target.copy_(source)
        elif source.numel() == len(started):
            positions = [places[params[i]][1] for i in started]
            target[positions] = source.to(target)
        else:
            raise ValueError(
                f"FusedNovoGrad.load_state_dict: {NORMS}[{kind}] holds {source.numel()} norms, but "
                f"the group has {len(indices)} {_NAMES[kind]} parameters, {len(started)} of them "
                "with a state."
            )
    return result


def _places(params: list[Tensor]) -> dict[Tensor, _Place]:
    counts = [0] * len(_NAMES)
    places = {}
    for param in params:
        kind = _KINDS[param.dtype]
        places[param] = (kind, counts[kind])
        counts[kind] += 1
    return places


def _counts(params: list[Tensor]) -> list[int]:
    kinds = [_KINDS[param.dtype] for param in params]
    return [kinds.count(kind) for kind in range(3 if 2 in kinds else 2)]


def _zeros(params: list[Tensor]) -> list[Tensor]:
    vectors = []
    for kind, count in enumerate(_counts(params)):
        own = [p.device for p in params if _KINDS[p.dtype] == kind]
        device = (own or [p.device for p in params] or ["cpu"])[0]
        dtype = torch.float64 if kind == 2 else torch.float32
        vectors.append(torch.zeros(count, dtype=dtype, device=device))
    return vectors


def _check_lengths(group: dict[str, Any], vectors: list[Tensor]) -> None:
    lengths, expected = [v.numel() for v in vectors], _counts(group["params"])
    if lengths != expected:
        raise RuntimeError(
            f"FusedNovoGrad.step: {NORMS} of the group holds {lengths} norms, but the group has "
            f"{expected} parameters (16-bit, float32, float64)."
        )


def _moved(
    params: list[Tensor],
    vectors: list[Tensor],
    known: dict[Tensor, _Place],
    places: dict[Tensor, _Place],
) -> list[Tensor]:
    """The vectors for other parameters: those that stay, or take another's place, keep its norm."""
    result = _zeros(params)
    before = list(known)
    for index, param in enumerate(params):
        old = known.get(param)
        if old is None and index < len(before) and before[index] not in places:
            old = known[before[index]]  # replaced by its master, say
        if old is not None:
            kind, position = places[param]
            result[kind][position].copy_(vectors[old[0]][old[1]])
    return result
