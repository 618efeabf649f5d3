"""The one place where a numerical tolerance is decided: as accurate as plain PyTorch, or fail."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# Nothing more exact than float64 is at hand to measure float64's own error against, so that error
# is taken from the same formula in float32, scaled by the ratio of the two units. It counts once
# more than `slack`, because truth errs as much.
_FLOAT64_PER_FLOAT32 = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


class _Allowance(NamedTuple):
    total: float  # largest error that any element may have
    slack: float  # how often plain's error may be made
    plain_error: float  # largest error of plain PyTorch
    ulps: float
    ulp: float  # unit in the last place of the largest true value, in actual's dtype


class _Slack(NamedTuple):
    slack: float
    ulps: float
    scale: float


def assert_as_accurate_as(
    reference: Callable,
    actual: Any,
    *args: Any,
    slack: float = 2.0,
    ulps: float = 1.0,
    scale: float = 0.0,
) -> None:
    """Check that ``actual`` is as accurate as plain PyTorch that computes in float32.

    Truth is ``reference(*args)`` in float64.  "Plain" is ``reference(*args)`` in float32 (float64
    for float64 inputs), rounded to the inputs' dtype.  Every element of ``actual`` may be off by
    ``slack`` times plain's largest error, plus ``ulps`` units in the last place of the largest
    true value.  Raise ``ulps`` with the number of times the result is rounded to memory, and say
    why at the call; never raise ``slack``.

    Args:
        reference: takes ``args`` and returns a tensor, None, or a tuple or list of those. It sees
            copies, so it may write to them, and ``requires_grad`` is kept, so it may call
            ``torch.autograd.grad``.
        actual: what the code under test returned, of the same structure. Its dtype decides the
            unit in the last place; where it differs from the inputs' dtype, plain is rounded to
            it. Integers and booleans must be equal.
        args: anything; floating-point tensors inside lists, tuples and dicts are cast.
        slack: factor on plain's largest error.
        ulps: units in the last place that are allowed on top; on a GPU one more, because its exp,
            log and 1 / sqrt(x) err by up to two, and plain and ours may use different ones.
        scale: size of a number that is rounded on the way, where it is above the largest true
            value: 1 for 1 - p with p near 1. The unit in the last place is that of the larger one.

    Infinities and nans must stand where truth has them; a finite truth beyond the range of
    actual's dtype counts as infinity there. For float64 inputs, where plain is truth itself, its
    error is estimated from float32.

    Raises:
        AssertionError: with the largest error, what was allowed and where it is.
    """
    __tracebackhide__ = True
    truth = _detached(reference(*_cast(args, torch.float64)))
    if _has_float64(args):
        rounded = _cast(args, torch.float32)
        plain = _detached(reference(*rounded))
        plain_truth = _detached(reference(*_cast(rounded, torch.float64)))
    else:
        plain = _detached(reference(*_cast(args, torch.float32)))
        plain_truth = truth
    _check(actual, truth, plain, plain_truth, _Slack(slack, ulps, scale), name="output")


def _check(actual, truth, plain, plain_truth, slack, name):
    """Walk the structure of the outputs; compare tensors."""
    __tracebackhide__ = True
    if isinstance(truth, (tuple, list)):
        if not isinstance(actual, (tuple, list)) or len(actual) != len(truth):
            raise AssertionError(f"{name}: expected {len(truth)} values, got {_describe(actual)}")
        for i, (a, t, p, pt) in enumerate(zip(actual, truth, plain, plain_truth, strict=True)):
            _check(a, t, p, pt, slack, f"{name}[{i}]")
        return
    if truth is None or actual is None:
        if truth is not actual:
            raise AssertionError(f"{name}: expected {_describe(truth)}, got {_describe(actual)}")
        return
    if not isinstance(actual, torch.Tensor) or actual.shape != truth.shape:
        raise AssertionError(f"{name}: expected {_describe(truth)}, got {_describe(actual)}")
    actual = actual.detach()
    if not truth.is_floating_point() or not actual.is_floating_point():
        _check_equal(actual, truth, name)
    elif actual.numel():
        if actual.is_cuda:
            slack = slack._replace(ulps=slack.ulps + 1)
        allowance = _allowance(actual.dtype, truth, plain, plain_truth, *slack)
        _check_non_finite(actual, truth, name)
        _check_error(actual, truth, allowance, name)


def _allowance(dtype, truth, plain, plain_truth, slack, ulps, scale) -> _Allowance:
    is_estimate = plain_truth is not truth
    if not is_estimate:
        plain = plain.to(dtype)
    error = _error(plain, plain_truth, plain.dtype)
    error = error[plain.isfinite() & plain_truth.isfinite()]
    plain_error = error.max().item() if error.numel() else 0.0
    if is_estimate:
        plain_error *= _FLOAT64_PER_FLOAT32
        slack += 1
        if dtype != torch.float64:  # a narrower result than its inputs: one rounding more
            rounded = truth.to(dtype)
            error = _error(rounded, truth, dtype)[rounded.isfinite()]
            plain_error += error.max().item() if error.numel() else 0.0
    finite = truth[truth.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    ulp = _ulp(min(max(largest, scale), torch.finfo(dtype).max), dtype)
    return _Allowance(slack * plain_error + ulps * ulp, slack, plain_error, ulps, ulp)


def _ulp(value: float, dtype: torch.dtype) -> float:
    """Unit in the last place of ``value`` in ``dtype``; the smallest subnormal near zero."""
    info = torch.finfo(dtype)
    exponent = math.frexp(max(value, info.tiny))[1] - 1
    return info.eps * math.ldexp(1.0, exponent)


def _error(values, truth, dtype) -> torch.Tensor:
    """Absolute error in float64; what overflows ``dtype`` counts as its largest number."""
    limit = torch.finfo(dtype).max
    return (values.double().clamp(-limit, limit) - truth.clamp(-limit, limit)).abs()


def _check_non_finite(actual, truth, name):
    __tracebackhide__ = True
    for what, test in (("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        expected, got = test(truth), test(actual)
        # A finite truth may round to infinity: _check_error decides about those.
        wrong = expected & ~got if what != "nan" else expected != got
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ from truth "
                f"in being {what}; the first at {where}: got {actual[tuple(where)].item()}, "
                f"truth {truth[tuple(where)].item()} ({_describe(actual)})"
            )


def _check_error(actual, truth, allowance, name):
    __tracebackhide__ = True
    error = _error(actual, truth, actual.dtype)
    error[truth.isnan() | (actual == truth)] = 0.0
    # An infinity where truth is far below the range is no rounding, whatever plain's error is.
    is_wrong = (error > allowance.total) | (actual.isinf() & ~_overflows(truth, actual.dtype))
    if not is_wrong.any():
        return
    where = torch.where(is_wrong, error, -1.0).flatten().argmax().item()
    index = [int(i) for i in torch.unravel_index(torch.tensor(where), actual.shape)]
    raise AssertionError(
        f"{name}: largest error {error.flatten()[where].item():.3e} at {index}: "
        f"got {actual.flatten()[where].item():.9g}, truth {truth.flatten()[where].item():.9g}.\n"
        f"Allowed {allowance.total:.3e} = {allowance.slack:g} x {allowance.plain_error:.3e} "
        f"(plain PyTorch's largest error) + {allowance.ulps:g} x {allowance.ulp:.3e} "
        f"(ulp of the largest true value).\n"
        f"{int(is_wrong.sum())} of {is_wrong.numel()} elements exceed it ({_describe(actual)})."
    )


def _overflows(truth, dtype) -> torch.Tensor:
    """Whether ``truth`` is infinite, or near enough to the end of ``dtype`` to round there."""
    info = torch.finfo(dtype)
    return truth.abs() >= info.max * (1 - info.eps)


def _check_equal(actual, truth, name):
    __tracebackhide__ = True
    wrong = actual != truth
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, the first at "
            f"{list(where)}: got {actual[where].item()}, truth {truth[where].item()}"
        )


def _cast(value, dtype):
    """Copy ``value`` with every floating-point tensor in ``dtype``; keep requires_grad."""
    if isinstance(value, torch.Tensor):
        target = dtype if value.is_floating_point() else value.dtype
        return value.detach().to(target, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(_cast(v, dtype) for v in value)
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    return value


def _has_float64(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.float64
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return False
    return any(_has_float64(v) for v in value)


def _detached(value):
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return [_detached(v) for v in value]
    return value


def _describe(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    return repr(value)


def assert_same_bits(call: Callable[[], Sequence[torch.Tensor]]) -> None:
    """``call`` gives the same tensors with one, two and three threads; a fixture restores them."""
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(call())
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
