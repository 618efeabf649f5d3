"""Arguments, micro-batches, timers and writers of a test script, set once and read everywhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..microbatches import build_num_microbatches_calculator
from ..pipeline_parallel._timers import _Timer
from ..pipeline_parallel._timers import _Timers as Timers
from .arguments import parse_args

__all__ = [
    "Timers",
    "_Timer",
    "get_adlr_autoresume",
    "get_args",
    "get_current_global_batch_size",
    "get_num_microbatches",
    "get_tensorboard_writer",
    "get_timers",
    "set_global_variables",
    "update_num_microbatches",
]

# By name; what is missing was not set.
_values: dict[str, Any] = {}


def _get(name: str) -> Any:
    _ensure_var_is_initialized(_values.get(name), name)
    return _values[name]


def get_args() -> Any:
    """The namespace of :func:`~apex.transformer.testing.arguments.parse_args`."""
    return _get("args")


def get_num_microbatches() -> int:
    """Micro-batches of the current global batch."""
    return _get("num microbatches calculator").get()


def get_current_global_batch_size() -> int:
    """Samples of the current global batch."""
    return _get("num microbatches calculator").get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, *, consistency_check: bool = True) -> None:
    """Adjust both to the samples that all ranks have consumed."""
    _get("num microbatches calculator").update(consumed_samples, consistency_check)


def get_tensorboard_writer() -> Any:
    """The writer of the last rank, or None."""
    return _values.get("tensorboard writer")


def get_adlr_autoresume() -> Any:
    """The object that resumes jobs on a cluster, or None."""
    return _values.get("adlr autoresume")


def get_timers() -> Timers:
    """The timers."""
    return _get("timers")


def set_global_variables(
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] = {},
    ignore_unknown_args: bool = False,
) -> Any:
    """Parse the arguments, make everything that follows from them, and return them.

    Arguments are those of ``parse_args``. ``RuntimeError`` if it was called before.
    """
    if _values:
        raise RuntimeError("set_global_variables: it was called before")
    try:
        args = _parse_args(extra_args_provider, args_defaults, ignore_unknown_args)
        _build_num_microbatches_calculator(args)
        _set_tensorboard_writer(args)
        _set_adlr_autoresume(args)
        _set_timers()
    except BaseException:
        _values.clear()  # so that it can be called again
        raise
    return args


# The steps of it, by Apex's names, for scripts that take some of them only.
def _set(name: str, value: Any) -> Any:
    _ensure_var_is_not_initialized(_values.get(name), name)
    _values[name] = value
    return value


def _parse_args(
    extra_args_provider: Callable[..., Any] | None = None,
    defaults: Mapping[str, Any] = {},
    ignore_unknown_args: bool = False,
) -> Any:
    return _set("args", parse_args(extra_args_provider, defaults, ignore_unknown_args))


def _build_num_microbatches_calculator(args: Any) -> None:
    calculator = build_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )
    _set("num microbatches calculator", calculator)


def _set_tensorboard_writer(args: Any) -> None:
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)
        _set("tensorboard writer", writer)


def _set_adlr_autoresume(args: Any) -> None:
    if args.adlr_autoresume:
        sys.path.append(os.environ.get("SUBMIT_SCRIPTS", "."))
        from userlib.auto_resume import AutoResume

        _set("adlr autoresume", AutoResume())


def _set_timers() -> None:
    _set("timers", Timers())


def _ensure_var_is_initialized(var: Any, name: str) -> None:
    """Raise RuntimeError if ``var`` is None."""
    if var is None:
        raise RuntimeError(f"{name}: call set_global_variables first")


def _ensure_var_is_not_initialized(var: Any, name: str) -> None:
    """Raise RuntimeError if ``var`` is not None."""
    if var is not None:
        raise RuntimeError(f"{name}: it was set before; call set_global_variables once")
