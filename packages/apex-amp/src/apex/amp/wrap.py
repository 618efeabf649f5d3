"""Wrappers around functions of a module that cast arguments while a handle's casts are on.

For scripts that import them; amp's own casts go through torch's autocast. A wrapped function is
restored when the handle is deactivated. Do not use them on functions inside of a compiled model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import utils
from .casting.casts import HALVES
from .casting.flat_weights import flat_size
from .casting.rnn_functions import replaceable_functions
from .handle import AmpHandle

Function = Callable[..., Any]


def make_cast_wrapper(
    orig_fn: Function, cast_fn: utils.Cast, handle: AmpHandle, try_caching: bool = False
) -> Function:
    """``orig_fn`` with its floating-point arguments cast.

    Args:
        orig_fn: any function.
        cast_fn: such as :func:`apex.amp.utils.maybe_half`.
        handle: decides whether to cast, and has the cache.
        try_caching: keep the casts of parameters in ``handle.cache``.
    """

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        if try_caching and handle.has_cache:
            args = tuple(_from_cache(cast_fn, x, handle) for x in args)
            kwargs = {k: _from_cache(cast_fn, x, handle) for k, x in kwargs.items()}
        new_args = utils.casted_args(cast_fn, args, kwargs)
        return orig_fn(*new_args, **kwargs)

    return wrapper


def _from_cache(cast_fn: utils.Cast, x: Any, handle: AmpHandle) -> Any:
    return utils.cached_cast(cast_fn, x, handle.cache) if utils.should_cache(x) else x


def cached_cast(
    mod: Any,
    fn: str,
    cast_fn: utils.Cast,
    handle: AmpHandle,
    try_caching: bool = False,
    verbose: bool = False,
) -> None:
    """Wrap ``mod.fn``, if there is one, by :func:`make_cast_wrapper`."""
    if utils.has_func(mod, fn):
        cast_fn = utils.verbosify(cast_fn, fn, verbose)
        wrapper = make_cast_wrapper(utils.get_func(mod, fn), cast_fn, handle, try_caching)
        utils.set_func_save(handle, mod, fn, wrapper)


def make_promote_wrapper(
    orig_fn: Function, cast_fn: utils.Cast, handle: AmpHandle | None = None
) -> Function:
    """``orig_fn`` with its floating-point arguments cast to the widest dtype among them.

    Args:
        orig_fn: any function.
        cast_fn: used where that is float32.
        handle: decides whether to cast; None: always.
    """

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if handle is not None and not handle.is_active():
            return orig_fn(*args, **kwargs)
        cast = _to_widest((*args, *kwargs.values()), cast_fn)
        if cast is None:
            return orig_fn(*args, **kwargs)
        new_args = utils.casted_args(cast, args, kwargs)
        return orig_fn(*new_args, **kwargs)

    return wrapper


def promote(mod: Any, fn: str, handle: AmpHandle, verbose: bool = False) -> None:
    """Wrap ``mod.fn`` by :func:`make_promote_wrapper`."""
    cast_fn = utils.verbosify(utils.maybe_float, fn, verbose)
    wrapper = make_promote_wrapper(utils.get_func(mod, fn), cast_fn, handle)
    utils.set_func_save(handle, mod, fn, wrapper)


def sequence_promote(mod: Any, fn: str, handle: AmpHandle, verbose: bool = False) -> None:
    """Wrap ``mod.fn``: the tensors in its first argument are cast to the widest of their dtypes."""
    orig_fn = utils.get_func(mod, fn)
    cast_fn = utils.verbosify(utils.maybe_float, fn, verbose)

    @functools.wraps(orig_fn)
    def wrapper(seq: Any, *args: Any, **kwargs: Any) -> Any:
        cast = _to_widest(seq, cast_fn) if handle.is_active() else None
        if cast is not None:
            seq = [cast(x) if utils.is_fp_tensor(x) else x for x in seq]
        return orig_fn(seq, *args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


def promote_match_arg0(mod: Any, fn: str, handle: AmpHandle, verbose: bool = False) -> None:
    """Wrap ``mod.fn``, if there is one: all arguments are cast to the dtype of the first.

    The wrapper raises ``TypeError`` if the first is no tensor.
    """
    if not utils.has_func(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)
    casts = {
        torch.float16: utils.maybe_half,
        torch.bfloat16: utils.maybe_bfloat16,
        torch.float32: utils.maybe_float,
    }

    @functools.wraps(orig_fn)
    def wrapper(arg0: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(arg0, torch.Tensor):
            raise TypeError(
                f"{fn}: the first argument must be a tensor, got {type(arg0).__name__}."
            )
        if not handle.is_active() or arg0.dtype not in casts:
            return orig_fn(arg0, *args, **kwargs)
        cast_fn = utils.verbosify(casts[arg0.dtype], fn, verbose)
        new_args = utils.casted_args(cast_fn, args, kwargs)
        return orig_fn(arg0, *new_args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


def err_if_any_half(
    mod: Any, fn: str, handle: AmpHandle, custom_err_msg: str | None = None
) -> None:
    """Wrap ``mod.fn``, if there is one: ``NotImplementedError`` for a 16-bit argument."""
    if not utils.has_func(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if handle.is_active() and _has_halves(_dtypes((*args, *kwargs.values()))):
            raise NotImplementedError(custom_err_msg or _refusal(fn, "an argument"))
        return orig_fn(*args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


def err_if_arg0_half(mod: Any, fn: str, handle: AmpHandle, verbose: bool = False) -> None:
    """Wrap ``mod.fn``, if there is one: ``NotImplementedError`` for a first argument in 16 bits.

    With any other the rest of the arguments is cast to float32.
    """
    if not utils.has_func(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)
    cast_fn = utils.verbosify(utils.maybe_float, fn, verbose)

    @functools.wraps(orig_fn)
    def wrapper(arg0: Any, *args: Any, **kwargs: Any) -> Any:
        if not handle.is_active():
            return orig_fn(arg0, *args, **kwargs)
        if _has_halves(_dtypes((arg0,))):
            raise NotImplementedError(_refusal(fn, "the first argument"))
        new_args = utils.casted_args(cast_fn, args, kwargs)
        return orig_fn(arg0, *new_args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


def rnn_cast(backend: Any, fn: str, handle: AmpHandle, verbose: bool = False) -> None:
    """Wrap ``backend.fn``, if there is one, as :func:`new_rnn_cast` does; in float16."""
    if utils.has_func(backend, fn):
        wrapper = _rnn_wrapper(utils.get_func(backend, fn), utils.maybe_half, handle, fn, verbose)
        utils.set_func_save(handle, backend, fn, wrapper)


def new_rnn_cast(fn: str, cast_fn: utils.Cast, handle: AmpHandle, verbose: bool = False) -> None:
    """Wrap one of the functions of torch's recurrent layers.

    Its weights are cast into one flat tensor, in which they have the places they had.

    Args:
        fn: one of :data:`.rnn_compat.RNN_NAMES`.
        cast_fn: such as :func:`apex.amp.utils.maybe_half`.
        handle: decides whether to cast.
        verbose: print casts.
    """
    functions = replaceable_functions(handle)
    wrapper = _rnn_wrapper(utils.get_func(functions, fn), cast_fn, handle, fn, verbose)
    utils.set_func_save(handle, functions, fn, wrapper)
    table = torch.nn.modules.rnn._rnn_impls
    if utils.has_func(table, fn.upper()):
        utils.set_func_save(handle, table, fn.upper(), wrapper)


def _rnn_wrapper(
    orig_fn: Function, cast_fn: utils.Cast, handle: AmpHandle, fn: str, verbose: bool
) -> Function:
    dtype = cast_fn(torch.empty(0)).dtype
    cast_fn = utils.verbosify(cast_fn, fn, verbose)

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        lists = [i for i, x in enumerate(args) if utils.is_nested(x)]
        if not handle.is_active() or not lists:
            return orig_fn(*args, **kwargs)
        weights = args[lists[-1]]  # an LSTM's states precede them
        new_args = utils.casted_args(cast_fn, args[: lists[-1]], {})
        if any(weight.dtype is not dtype for weight in weights):
            flat = weights[0].new_empty(flat_size(weights), dtype=dtype)
            weights = utils.new_synthesize_flattened_rnn_weights(weights, flat, fn, dtype, verbose)
        return orig_fn(*new_args, weights, *args[lists[-1] + 1 :], **kwargs)

    return wrapper


def disable_casts(mod: Any, fn: str, handle: AmpHandle) -> None:
    """Wrap ``mod.fn``, if there is one: it runs without casts."""
    if not utils.has_func(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)

    @functools.wraps(orig_fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with handle._disable_casts():
            return orig_fn(*args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


def _refusal(fn: str, which: str) -> str:
    return (
        f"amp: {fn} computes in float32 and cannot return that where {which} is in 16 bits. Call "
        ".float() on it, or put `with amp.disable_casts():` around the call."
    )


def _dtypes(values: Any) -> list[torch.dtype]:
    found = []
    for x in values:
        if utils.is_nested(x):
            found += _dtypes(x)
        elif utils.is_fp_tensor(x):
            found.append(x.dtype)
    return found


def _has_halves(dtypes: list[torch.dtype]) -> bool:
    return any(dtype in HALVES for dtype in dtypes)


def _to_widest(values: Any, cast_fn: utils.Cast) -> utils.Cast | None:
    """A cast to the widest dtype, or None if there is one dtype only."""
    dtypes = set(_dtypes(values))
    if len(dtypes) < 2:
        return None
    widest = functools.reduce(torch.promote_types, dtypes)
    if widest is torch.float32:
        return cast_fn
    return functools.partial(utils._maybe_cast, dtype=widest, name="", verbose=False)
