"""Checks that an op is a good citizen of torch: its schema and fake kernel, and torch.compile."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .accuracy import assert_as_accurate_as


def opcheck_samples(op: Any, samples: Iterable[tuple | dict]) -> None:
    """Run all of ``torch.library.opcheck`` on ``op`` for each sample.

    Args:
        op: an OpOverload, as ``library.define`` returns it.
        samples: positional arguments as a tuple, or keyword arguments as a dict. At least one.

    Raises:
        AssertionError: naming the sample and what opcheck found.
        ValueError: there is no sample.
    """
    __tracebackhide__ = True
    count = 0
    for count, sample in enumerate(samples, start=1):
        args, kwargs = ((), sample) if isinstance(sample, dict) else (sample, {})
        try:
            torch.library.opcheck(op, args, kwargs)
        except Exception as error:
            raise AssertionError(
                f"{op}: sample {count - 1} {_describe(sample)}: {error}"
            ) from error
    if count == 0:
        raise ValueError(f"opcheck_samples: no sample for {op}")


def assert_compiles(
    fn: Callable, *args: Any, backend: str = "inductor", ulps: float = 0.0, dynamic=None
) -> None:
    """Check that ``torch.compile(fn, fullgraph=True)`` returns what ``fn`` returns.

    Outputs, and the gradients of every argument that requires one, must be equal bit for bit;
    ``ulps`` allows that many units in the last place of the largest value, for functions in which
    the compiler may round differently (say why at the call).

    Args:
        fn: takes ``args``, returns a tensor or a tuple of tensors. It must not write to them.
        args: tensors that require a gradient get one.
        backend: of torch.compile.
        ulps: see above.
        dynamic: of torch.compile.
    """
    __tracebackhide__ = True
    expected = _outputs_and_grads(fn, args)
    torch.compiler.reset()
    compiled = torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic)
    actual = _outputs_and_grads(compiled, args)
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        if (e is None) != (a is None):
            raise AssertionError(f"value {i}: eager gave {e}, compiled gave {a}")
        if e is None:
            continue
        if e.dtype != a.dtype or e.shape != a.shape:
            raise AssertionError(
                f"value {i}: eager gave {e.dtype} {list(e.shape)}, "
                f"compiled gave {a.dtype} {list(a.shape)}"
            )
        if ulps:
            assert_as_accurate_as(lambda x: x, a, e, ulps=ulps)
        else:
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


def _outputs_and_grads(fn, args) -> list[torch.Tensor | None]:
    """Return fn's outputs, then the gradient of each argument that requires one."""
    args = [a.detach().requires_grad_(a.requires_grad) if _is_tensor(a) else a for a in args]
    outputs = fn(*args)
    outputs = [outputs] if _is_tensor(outputs) else list(outputs)
    inputs = [a for a in args if _is_tensor(a) and a.requires_grad]
    results: list[torch.Tensor | None] = [o.detach() for o in outputs]
    differentiable = [o for o in outputs if o.requires_grad]
    if inputs and differentiable:
        generator = torch.Generator().manual_seed(0)
        cotangents = [
            torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in differentiable
        ]
        results += torch.autograd.grad(differentiable, inputs, cotangents, allow_unused=True)
    return results


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def _describe(sample) -> str:
    """Print a sample with tensors as dtype and shape."""
    if isinstance(sample, torch.Tensor):
        return f"{str(sample.dtype).removeprefix('torch.')}{list(sample.shape)}"
    if isinstance(sample, (tuple, list)):
        return "(" + ", ".join(_describe(s) for s in sample) + ")"
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in sample.items()) + "}"
    return repr(sample)
