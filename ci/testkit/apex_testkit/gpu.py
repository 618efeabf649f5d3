"""Checks of what only a GPU can get wrong: streams, CUDA graphs, several devices.

Each takes a function of tensors that returns tensors (a tuple or list) and writes to none of its
arguments, and runs it on arguments that lie on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Outputs = Sequence[Tensor]

# About 50 ms at 2 GHz: far longer than it takes to launch what follows.
_SLEEP_CYCLES = 100_000_000


def assert_repeatable(function: Callable[..., Outputs], *arguments: Any) -> None:
    """Check that two calls give the same bits: no result hangs on the order of threads."""
    __tracebackhide__ = True
    expected = function(*arguments)
    _assert_same("the second call", function(*arguments), expected)


def assert_runs_on_current_stream(function: Callable[..., Outputs], *arguments: Any) -> None:
    """Check that the work is ordered after what the current stream does before it.

    The arguments' values arrive late in the stream, behind a sleep. Work on any other stream would
    read what lay there before, which are NaNs. The default stream is tried, and one beside it.
    """
    __tracebackhide__ = True
    expected = function(*arguments)
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        late = [_spoiled(a) if isinstance(a, Tensor) else a for a in arguments]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_SLEEP_CYCLES)
            _copy_values(late, arguments)
            actual = function(*late)
        stream.synchronize()
        _assert_same(f"on {stream}", actual, expected)


def assert_captures(function: Callable[..., Outputs], *arguments: Any) -> None:
    """Check that a CUDA graph of the function, replayed on new values, gives what a call gives."""
    __tracebackhide__ = True
    static = [_copy(a) for a in arguments]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # loads kernels and warms the allocator, as capture needs it
        function(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*static)
    for scale in (1.0, -0.5):
        fresh = [_scaled(a, scale) for a in arguments]
        _copy_values(static, fresh)
        graph.replay()
        torch.cuda.synchronize()
        _assert_same(f"replayed on {scale} times the values", captured, function(*fresh))


def assert_runs_on_other_device(function: Callable[..., Outputs], *arguments: Any) -> None:
    """Check that tensors of cuda:1 are worked on there while cuda:0 is the current device."""
    __tracebackhide__ = True
    expected = function(*arguments)
    moved = [_copy(a, "cuda:1") for a in arguments]
    with torch.cuda.device(0):
        actual = function(*moved)
    elsewhere = [str(a.device) for a in actual if a.device != torch.device("cuda:1")]
    if elsewhere:
        raise AssertionError(f"of tensors on cuda:1 came results on {elsewhere[0]}")
    _assert_same("on cuda:1", [a.to("cuda:0") for a in actual], expected)


def _copy(argument: Any, device: str | None = None) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    copy = argument.detach().to(device) if device else argument.detach().clone()
    return copy.requires_grad_(argument.requires_grad)


def _scaled(argument: Any, scale: float) -> Any:
    if not isinstance(argument, Tensor) or not argument.is_floating_point():
        return argument
    return (argument.detach() * scale).requires_grad_(argument.requires_grad)


def _spoiled(argument: Tensor) -> Tensor:
    wrong = torch.nan if argument.is_floating_point() else 0
    return torch.full_like(argument.detach(), wrong).requires_grad_(argument.requires_grad)


def _copy_values(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if isinstance(target, Tensor):
                target.copy_(source)


def _assert_same(what: str, actual: Outputs, expected: Outputs) -> None:
    __tracebackhide__ = True
    if len(actual) != len(expected):
        raise AssertionError(f"{what}: expected {len(expected)} results, got {len(actual)}")
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            a,
            e,
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text, index=index: f"{what}, result {index}: {text}",
        )
