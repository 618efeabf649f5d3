"""What an optimizer's step operator takes, by the names in its schema."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._ops import library

_NOT_TRACEABLE = (
    "apex_optimizers::{} works on tensors that only C++ knows, so it cannot be traced, and has no "
    "meaning for meta or fake tensors. Use {}, whose schema names all that it changes."
)
_MUTATION = re.compile(r"\(\w!\)")

# What operators refuse, in their own words.
_RANGES = {
    "beta1": "in [0, 1)",
    "beta2": "in [0, 1)",
    "eps": ">= 0",
    "momentum": ">= 0",
}


class Step:
    """The operator of an optimizer's step, and where the numbers that it takes are found.

    A schema has lists of tensors and, after them, numbers: ``FusedOptimizer.arguments`` gives these
    by the schema's names.

    Args:
        op: the operator, called ``<name>_step``.
        file: ``__file__`` of a module in the operator's folder.
        holds: whether C++ in that folder can hold lists, too.
        launch: is called instead of ``op``, with the same lists and numbers.
        before: what ``launch`` takes behind the lists and before the numbers of ``op``, in the
            grammar of schemas.
        without: numbers of ``op`` that ``launch`` or a bucket adds.
        known_as: numbers that are found under another name than the schema's.
    """

    def __init__(
        self,
        op: Any,
        file: str,
        *,
        holds: bool = False,
        launch: Callable[..., None] | None = None,
        before: str = "",
        without: Sequence[str] = (),
        **known_as: str,
    ) -> None:
        self.name, self.folder = op.name().partition("::")[2], Path(file).parent
        taken = library.schemas[self.name].partition("(")[2].rpartition(") ->")[0].split(", ")
        lists = [argument for argument in taken if "[] " in argument]
        rest = taken[len(lists) :]
        own = [argument.partition("=")[0].split(" ") for argument in rest]
        self.numbers = [argument.split(" ") for argument in before.split(", ") if argument]
        self.numbers += [(kind, name) for kind, name in own if name not in without]
        names = [known_as.get(name, name) for _, name in self.numbers]
        self.read: Callable[[dict[str, Any]], tuple[Any, ...]] = operator.itemgetter(*names)
        self.flags = [i for i, (kind, _) in enumerate(self.numbers) if kind == "bool"]
        self.unset = {name: None for kind, name in self.numbers if kind.endswith("?")}
        self.launch = launch or op._op  # without a frame of torch's
        self.writes_gradients = _MUTATION.search(lists[1]) is not None
        self.held = HeldOps(self.name, lists, rest, file) if holds else None

    def check(self, values: Sequence[Any]) -> None:
        """Raise for the first number that the operator would refuse.

        It does that by itself, but by then buckets before this one have been stepped.
        """
        for (kind, name), value in zip(self.numbers, values, strict=True):
            number = float(value) if kind == "float" else 0.0
            wanted = _RANGES.get(name)
            if wanted and not (number >= 0 and (number < 1 or wanted == ">= 0")):
                raise RuntimeError(f"{self.name}: {name} must be {wanted}, got {number:g}.")


class HeldOps:
    """The operators of one step operator on held lists; C++ for them is in the same folder.

    ``hold`` keeps handles on the tensors of all lists of the step operator, of which any may be
    empty, and returns their number. They live until ``release``. Python's cycle collector does not
    see these handles, so a tensor that refers to the owner of the lists would never be freed.
    ``step`` takes that number, the number under which gradients are held or 0, the gradients (or,
    where they are held, one of them), and the other arguments of the step operator. Checks, errors
    and results are the same; an unknown number raises RuntimeError. Pointers, sizes and dtypes are
    read anew in each call, so ``param.data = ...`` is noticed. ``count`` returns how many sets of
    lists are held.

    Args:
        plain_name: the step operator, called ``<name>_step``; the others are ``<name>_hold`` and so
            on.
        lists, rest: its arguments, as its schema has them.
        file: ``__file__`` of a module in the operator's folder.
    """

    def __init__(self, plain_name: str, lists: list[str], rest: list[str], file: str) -> None:
        self._plain_name, self._file = plain_name, file
        self.lists = len(lists)
        name, given = plain_name.removesuffix("_step"), _MUTATION.sub("", ", ".join(lists))
        self.hold = self._define(f"{name}_hold", f"({given}) -> int")
        self.release = self._define(f"{name}_release", "(Tensor like, int held) -> ()")
        self.count = self._define(f"{name}_held_count", "(Tensor like) -> int")
        taken = ", ".join(["int held", "int held_grads", "Tensor[] grads", *rest])
        self.step = self._define(f"{name}_step_held", f"({taken}) -> ()")

    def _define(self, name: str, signature: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(_NOT_TRACEABLE.format(name, self._plain_name))

        refuse.__doc__ = (
            f"See :class:`apex.optimizers.stepping.step.HeldOps` of ``{self._plain_name}``."
        )
        return library.define(name + signature, self._file)(refuse)
