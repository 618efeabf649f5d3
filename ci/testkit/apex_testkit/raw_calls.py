"""Random calls of raw operators, valid and changed: each does what a float64 formula says, or it
raises an error in words of its own and has changed nothing.

``APEX_RAW_CALLS`` sets the number of calls of one test, for long runs by hand.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .raw_mutations import is_readable, mutate

CALLS = int(os.environ.get("APEX_RAW_CALLS", "150"))

# Of calls with random numbers: a wrong formula or stray memory is off by more.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
_NOT_OURS = re.compile(r"API call failed|ScalarType \d+|INTERNAL ASSERT|please file|std::|vector::")


@dataclass(repr=False)  # the memory of arguments may be freed: pytest must not print them
class Call:
    """One call of an operator.

    Args:
        run: takes ``args`` by name.
        args: tensors, lists of tensors, and numbers.
        expected: from the arguments, tensors in float64, to the values in float64 that arguments
            must have after the call, by name, and to results under ``"result"``. What it leaves out
            is not compared. None: only errors and memory are checked.
        written: names of the arguments that the call writes to.
        sees_overlaps: whether it refuses to write to memory that is also another argument's. Of
            steps of optimizers, which do not, results are then not compared.
    """

    run: Callable[..., Any]
    args: dict[str, Any]
    expected: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    written: Sequence[str] = ()
    sees_overlaps: bool = True
    mutations: list[str] = field(default_factory=list)


def run_random_calls(
    makers: Sequence[Callable[[random.Random], Call]],
    seed: int,
    calls: int = CALLS,
    wild: bool = False,
) -> Counter:
    """Make calls and check each; return how many did what.

    Args:
        makers: each makes a valid call.
        calls: how many.
        wild: mutate integers, and tensors of them, with the largest and smallest ones too.
    """
    __tracebackhide__ = True
    counts: Counter = Counter()
    for number in range(calls):
        rng = random.Random(f"{seed} {number}")
        # torch.manual_seed notes the stack for GPUs, which takes a third of a call's time.
        torch.default_generator.manual_seed(rng.randrange(2**31))
        maker = rng.choice(makers)
        call = maker(rng)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            call.mutations.append(mutate(rng, call.args, wild))
        try:
            done = check_call(call)
            counts[done] += 1
            counts[done, maker.__name__] += 1
        except AssertionError as error:
            shown = {k: _shown(v) for k, v in call.args.items()}
            raise AssertionError(
                f"call {number} of seed {seed}, {maker.__name__} changed by {call.mutations}: "
                f"{error}\narguments: {shown}"
            ) from error
    return counts


def check_call(call: Call) -> str:
    """Make a call; return "done", or "refused" if it raised and changed nothing."""
    __tracebackhide__ = True
    storages = _storages(call.args)
    before = {key: storage.clone() for key, storage in storages.items()}
    wanted = _wanted(call)
    versions = {name: [t._version for t in _tensors(call.args[name])] for name in call.written}
    try:
        with torch.no_grad():
            result = call.run(**call.args)
    except _REFUSALS as error:
        text = str(error)
        if type(error).__name__ == "BuildError" or _NOT_OURS.search(text):
            raise AssertionError(f"refused in words that are not ours: {text}") from error
        for key, storage in _storages(call.args).items():
            assert torch.equal(storage, before[key]), f"refused, but memory has changed: {text}"
        return "refused"
    assert not isinstance(wanted, Exception), f"accepted what no formula takes: {wanted!r}"
    written = {_key(t) for name in call.written for t in _tensors(call.args[name])}
    for key, storage in _storages(call.args).items():
        assert key in written or torch.equal(storage, before[key]), "a read argument has changed"
    for name, old in versions.items():
        new = [t._version for t in _tensors(call.args[name])]
        assert all(n > o for n, o in zip(new, old, strict=True)), f"{name}: versions did not rise"
    for name, values in wanted.items():
        actual = result if name == "result" else call.args[name]
        for a, w in zip(_tensors(actual), _tensors(values), strict=True):
            _assert_close(name, a, w)
    return "done"


def _wanted(call: Call) -> dict[str, Any] | Exception:
    tensors = [t for value in call.args.values() for t in _tensors(value)]
    readable = all(map(is_readable, tensors))
    if call.expected is None or not readable:
        return {}
    if not call.sees_overlaps and len({_key(t) for t in tensors}) < len(tensors):
        return {}
    try:
        return call.expected({name: _wide(value) for name, value in call.args.items()})
    except ArithmeticError:  # numbers for which the formula is not meant
        return {}
    except (LookupError, AttributeError, *_REFUSALS) as error:  # not even a formula takes these
        return error


def _assert_close(name: str, actual: Tensor, wanted: Tensor) -> None:
    __tracebackhide__ = True
    if actual.numel() == 0 and wanted.numel() == 0:
        return
    tolerance = _TOLERANCE.get(actual.dtype, 0.0)
    wide = actual.detach().double()
    # What the dtype cannot hold, it rounds to inf as the formula's value would be.
    wanted = wanted.reshape(wide.shape)
    if actual.dtype.is_floating_point:
        wanted = wanted.to(actual.dtype).double()
    torch.testing.assert_close(
        wide, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64, copy=True)
    if isinstance(value, list):
        # Tensors at one index of lists agree in their number of elements, not in shape.
        return [_wide(i).reshape(-1) if isinstance(i, Tensor) else i for i in value]
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for t in value if isinstance(t, Tensor)] if isinstance(value, (list, tuple)) else []


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _storages(args: dict[str, Any]) -> dict[int, Tensor]:
    """Bytes of all memory that arguments refer to."""
    found = {}
    for tensor in (t for value in args.values() for t in _tensors(value)):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found[_key(tensor)] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return found


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} {value.layout} {value.device}"
    return [_shown(v) for v in value] if isinstance(value, list) else value
