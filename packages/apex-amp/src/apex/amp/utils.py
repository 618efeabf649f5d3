"""Helpers that cast arguments and replace functions, for scripts that import them.

amp's own casts go through torch's autocast and need none of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .casting.flat_weights import cast_into, flat_size
from .casting.functions import static_or_class_method
from .compat import is_floating_point
from .handle import AmpHandle

Cast = Callable[..., Any]
_VERSION = "_amp_cast_of_version"  # attribute of a cached cast


def is_cuda_enabled() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...] | None:
    """The CUDA that torch was built for, as numbers; None without one."""
    version = torch.version.cuda
    return None if version is None else tuple(int(part) for part in version.split("."))


def is_nested(x: Any) -> bool:
    """Whether ``x`` is a tuple or list."""
    return isinstance(x, (tuple, list))


def is_fp_tensor(x: Any) -> bool:
    """Whether ``x`` is a floating-point tensor, or a tuple or list of nothing but those."""
    return all(map(is_fp_tensor, x)) if is_nested(x) else is_floating_point(x)


def should_cache(x: Any) -> bool:
    """Whether casts of ``x`` are worth keeping: float32 parameters, or a list of only those."""
    if is_nested(x):
        return all(map(should_cache, x))
    return isinstance(x, nn.Parameter) and x.dtype is torch.float32


def type_string(x: Tensor) -> str:
    """The name of the tensor's type, such as ``HalfTensor``, on whatever device."""
    return x.type().rpartition(".")[2]


def collect_fp_tensor_types(args: Iterable[Any], kwargs: dict[str, Any]) -> list[str]:
    """The types of all floating-point tensors among the arguments, each once, in order."""
    types: dict[str, None] = {}

    def collect(x: Any) -> None:
        if is_nested(x):
            for item in x:
                collect(item)
        else:
            types[type_string(x)] = None

    for x in (*args, *kwargs.values()):
        if is_fp_tensor(x):
            collect(x)
    return list(types)


def _maybe_cast(x: Any, dtype: torch.dtype, name: str, verbose: bool) -> Any:
    if is_nested(x):
        items = [_maybe_cast(item, dtype, name, verbose) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if not is_floating_point(x) or x.dtype is dtype:
        return x
    if verbose:
        _print_cast(x.dtype, dtype, name)
    return x.to(dtype)


def _print_cast(before: torch.dtype, after: torch.dtype, name: str) -> None:
    names = (str(dtype).removeprefix("torch.") for dtype in (before, after))
    print(f"{'->'.join(names)} ({name})")


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """``x`` in float16, if it is a floating-point tensor; the items of a tuple or list."""
    return _maybe_cast(x, torch.float16, name, verbose)


def maybe_bfloat16(x: Any, name: str = "", verbose: bool = False) -> Any:
    """As :func:`maybe_half` in bfloat16."""
    return _maybe_cast(x, torch.bfloat16, name, verbose)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """As :func:`maybe_half` in float32."""
    return _maybe_cast(x, torch.float32, name, verbose)


def casted_args(cast_fn: Cast, args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Cast the floating-point arguments: returns the positional ones, changes ``kwargs``."""
    for key, value in kwargs.items():
        if is_fp_tensor(value):
            kwargs[key] = cast_fn(value)
    return [cast_fn(x) if is_fp_tensor(x) else x for x in args]


def cached_cast(cast_fn: Cast, x: Any, cache: dict[Tensor, Tensor]) -> Any:
    """``cast_fn(x)``, from the cache if what is there is still the cast of ``x``.

    A cast is out of date if ``x`` was changed in place since. It is also out of date if only one of
    the two needs a gradient, unless gradients are off.

    Args:
        cast_fn: such as :func:`maybe_half`.
        x: a parameter, or a tuple or list of parameters.
        cache: parameter -> its cast.

    Raises:
        RuntimeError: the cache holds a cast of another tensor.
    """
    if is_nested(x):
        return type(x)([cached_cast(cast_fn, item, cache) for item in x])
    cached = cache.get(x)
    if cached is not None and _is_valid(cached, x):
        return cached
    cast = cast_fn(x)
    if cast is not x:
        setattr(cast, _VERSION, x._version)
        cache[x] = cast
    return cast


def _is_valid(cached: Tensor, x: Tensor) -> bool:
    if x.requires_grad and cached.requires_grad:
        source = cached.grad_fn.next_functions[0][0]
        if getattr(source, "variable", x) is not x:
            raise RuntimeError(
                "amp: the cache holds the cast of another tensor. Do not write to handle.cache."
            )
    if torch.is_grad_enabled() and x.requires_grad != cached.requires_grad:
        return False
    return getattr(cached, _VERSION, None) == x._version


def verbosify(cast_fn: Cast, fn_name: str, verbose: bool) -> Cast:
    """``cast_fn`` that prints its casts, with the function's name, if ``verbose``."""
    return functools.partial(cast_fn, name=fn_name, verbose=verbose) if verbose else cast_fn


def as_inplace(fns: Iterable[str]) -> Iterator[str]:
    """The names with an underscore appended."""
    return (name + "_" for name in fns)


def has_func(mod: Any, fn: str) -> bool:
    """Whether a module, class or dict has the name."""
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Any:
    """The value of a name in a module, class or dict."""
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    """Set the value of a name in a module, class or dict."""
    if isinstance(mod, dict):
        mod[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)


def set_func_save(handle: AmpHandle, mod: Any, fn: str, new_fn: Any) -> None:
    """As :func:`set_func`, until the handle is deactivated."""
    method = static_or_class_method(mod, fn)
    handle._save_func(mod, fn, get_func(mod, fn))
    # A class would bind a bare function to its instances.
    set_func(mod, fn, new_fn if method is None else staticmethod(new_fn))


def synthesize_flattened_rnn_weights(
    fp32_weights: Sequence[Sequence[Tensor]],
    fp16_flat_tensor: Tensor,
    rnn_fn: str = "",
    verbose: bool = False,
) -> list[list[Tensor]]:
    """As :func:`new_synthesize_flattened_rnn_weights` for one list of weights per layer."""
    weights = [weight for layer in fp32_weights for weight in layer]
    dtype = fp16_flat_tensor.dtype
    pieces = new_synthesize_flattened_rnn_weights(weights, fp16_flat_tensor, rnn_fn, dtype, verbose)
    remaining = iter(pieces)
    return [[next(remaining) for _ in layer] for layer in fp32_weights]


def new_synthesize_flattened_rnn_weights(
    fp32_weights: Sequence[Tensor],
    fp16_flat_tensor: Tensor,
    rnn_fn: str = "",
    dtype: torch.dtype = torch.float16,
    verbose: bool = False,
) -> list[Tensor]:
    """Cast the weights of recurrent layers into one flat tensor, as cuDNN wants them.

    Args:
        fp32_weights: if they are pieces of one tensor, as ``flatten_parameters`` makes them, they
            keep their places in it; else they follow one another.
        fp16_flat_tensor: one-dimensional, large enough for that; overwritten.
        rnn_fn: a name to print.
        dtype: of ``fp16_flat_tensor``.
        verbose: print the casts.

    Returns:
        Pieces of ``fp16_flat_tensor``; gradients reach the weights.

    Raises:
        TypeError: ``fp16_flat_tensor`` is of another dtype.
        ValueError: it is too small.
    """
    if fp16_flat_tensor.dtype is not dtype:
        raise TypeError(
            f"new_synthesize_flattened_rnn_weights: fp16_flat_tensor is {fp16_flat_tensor.dtype}, "
            f"expected {dtype}; pass the dtype that is meant as dtype."
        )
    size = flat_size(fp32_weights)
    if fp16_flat_tensor.numel() < size:
        raise ValueError(
            f"new_synthesize_flattened_rnn_weights: fp16_flat_tensor has "
            f"{fp16_flat_tensor.numel()} elements, but the weights take {size}."
        )
    if verbose:
        for weight in fp32_weights:
            _print_cast(weight.dtype, dtype, rnn_fn)
    return cast_into(fp16_flat_tensor, fp32_weights)
