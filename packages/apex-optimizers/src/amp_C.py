"""Apex's kernel module under its old name: multi-tensor functions with positional arguments.

Every function is called ``op(chunk_size, noop_flag, tensor_lists, *args)``, usually through
:data:`apex.multi_tensor_apply.multi_tensor_applier`. ``chunk_size`` has no effect. ``noop_flag`` is
int32 with one element; functions set it, never clear it. Lists may be empty: nothing is done then.

Importing this module raises ImportError where its kernels cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import apex.multi_tensor_apply as _multi_tensor_apply
import apex.optimizers as _optimizers
from apex.multi_tensor_apply import multi_tensor_axpby as _axpby
from apex.multi_tensor_apply import multi_tensor_l2norm as _l2norm
from apex.multi_tensor_apply import multi_tensor_scale as _scale
from apex.optimizers._ops import library as _library
from apex.optimizers.fused_adam.ops import adam_step as _adam_step
from apex.optimizers.fused_adam.ops import adam_step_capturable as _adam_step_capturable
from apex.optimizers.fused_sgd.ops import sgd_step as _sgd_step

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
]

_Lists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, scale: float
) -> None:
    """``out = in * scale`` for lists ``[in, out]``; flag 1 where an input is inf or NaN.

    Any combination of float32, float16, bfloat16 and float64, one dtype a list. See
    :func:`apex.multi_tensor_apply.multi_tensor_scale`.
    """
    inputs, outputs = _checked("multi_tensor_scale", tensor_lists, ("in", "out"))
    if inputs:
        _scale(inputs, outputs, noop_flag, float(scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """``out = a * x + b * y`` for lists ``[x, y, out]``; flag 1 where an operand is inf or NaN.

    ``arg_to_check`` is 0 for x, 1 for y, -1 for both. See
    :func:`apex.multi_tensor_apply.multi_tensor_axpby`.
    """
    xs, ys, outputs = _checked("multi_tensor_axpby", tensor_lists, ("x", "y", "out"))
    if xs:
        _axpby(xs, ys, outputs, noop_flag, float(a), float(b), arg_to_check)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: _Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Euclidean norm of lists ``[x]``: all elements [1], and per tensor [n], or [0] if not asked.

    See :func:`apex.multi_tensor_apply.multi_tensor_l2norm`.
    """
    (inputs,) = _checked("multi_tensor_l2norm", tensor_lists, ("x",))
    if inputs:
        return _l2norm(inputs, noop_flag, bool(per_tensor))
    norm = torch.zeros(1, device=noop_flag.device)
    return norm, norm.new_empty(0)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """One SGD step for lists ``[grads, params, momentum_buffers]``, or with 16-bit copies.

    With a fourth list, ``params`` are float32 and their new values also go, rounded, to that list
    of float16 or bfloat16. Gradients are multiplied by ``scale``. Nothing is done where the flag is
    set. See :func:`apex.optimizers.fused_sgd.ops.sgd_step`.
    """
    names = ("grads", "params", "momentum_buffers", "copies")
    names = names if len(tensor_lists) == 4 else names[:3]
    grads, params, buffers, *copies = _checked("multi_tensor_sgd", tensor_lists, names)
    if not params:
        return
    _sgd_step(
        params,
        grads,
        buffers if momentum != 0 else [],
        copies[0] if copies else [],
        float(lr),
        None,
        float(momentum),
        float(dampening),
        float(wd),
        bool(nesterov),
        bool(wd_after_momentum),
        bool(first_run),
        float(scale),
        noop_flag,
    )


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One Adam (``mode`` 0) or AdamW (1) step for lists ``[grads, params, exp_avgs, exp_avg_sqs]``.

    The moments are float32 (for float64 parameters also float64). The flag is not looked at. See
    :func:`apex.optimizers.fused_adam.ops.adam_step`.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs")
    grads, params, exp_avgs, exp_avg_sqs = _checked("multi_tensor_adam", tensor_lists, names)
    if not params:
        return
    _adam_step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        float(lr),
        beta1,
        beta2,
        eps,
        weight_decay,
        int(step),
        bool(bias_correction),
        _is_decoupled(mode),
    )


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """:func:`multi_tensor_adam` whose changing numbers are tensors on the device.

    ``lr`` and ``inv_scale`` are float32, ``step`` is int32. Gradients are multiplied by
    ``inv_scale`` and written back. Nothing is done where the flag is set. See
    :func:`apex.optimizers.fused_adam.ops.adam_step_capturable`.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs")
    lists = _checked("multi_tensor_adam_capturable", tensor_lists, names)
    numbers = (beta1, beta2, eps, weight_decay, bool(bias_correction), _is_decoupled(mode))
    _capturable([*lists, []], noop_flag, lr, step, inv_scale, numbers)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: _Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """:func:`multi_tensor_adam_capturable` with a fifth list of float32 masters, which are updated
    instead of the parameters; those receive them rounded.
    """
    names = ("grads", "params", "exp_avgs", "exp_avg_sqs", "masters")
    lists = _checked("multi_tensor_adam_capturable_master", tensor_lists, names)
    numbers = (beta1, beta2, eps, weight_decay, bool(bias_correction), _is_decoupled(mode))
    _capturable(lists, noop_flag, lr, step, inv_scale, numbers)


def _capturable(
    lists: list[list[Tensor]],
    noop_flag: Tensor,
    lr: Tensor,
    step: Tensor,
    inv_scale: Tensor,
    numbers: tuple,
) -> None:
    grads, params, exp_avgs, exp_avg_sqs, masters = lists
    if params:
        found_inf = noop_flag.to(torch.float32)
        moments = (exp_avgs, exp_avg_sqs)
        _adam_step_capturable(
            params, grads, *moments, masters, lr, step, inv_scale, found_inf, *numbers
        )


def _is_decoupled(mode: int) -> bool:
    if mode not in (0, 1):
        raise RuntimeError(f"mode must be 0 (Adam) or 1 (AdamW), got {mode}.")
    return mode == 1


def _checked(op: str, tensor_lists: _Lists, names: tuple[str, ...]) -> list[list[Tensor]]:
    """The lists as lists; the operators check the tensors in them."""
    if len(tensor_lists) != len(names):
        raise RuntimeError(
            f"{op}: tensor_lists.size() != depth: expected {len(names)} lists "
            f"({', '.join(names)}), got {len(tensor_lists)}."
        )
    lists = [list(tensors) for tensors in tensor_lists]
    lengths = {name: len(tensors) for name, tensors in zip(names, lists, strict=True)}
    if len(set(lengths.values())) > 1:
        raise RuntimeError(f"{op}: Size mismatch among tensor lists: their lengths are {lengths}.")
    return lists


def _require_kernels() -> None:
    """Raise ImportError with the remedy if an op of this module cannot run on this machine."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    lists, optimizers = (Path(m.__file__).parent for m in (_multi_tensor_apply, _optimizers))
    for folder in (
        lists / "multi_tensor_scale",
        lists / "multi_tensor_axpby",
        lists / "multi_tensor_l2norm",
        optimizers / "fused_sgd",
        optimizers / "fused_adam",
    ):
        if not _library.available(folder, device_type):
            raise ImportError(
                f"amp_C: the kernels of {folder.name} for {device_type} are neither prebuilt in "
                "this installation of apex-optimizers nor can they be compiled here. Install a "
                "wheel with kernels for this platform; or install ninja and a compiler "
                f"({'nvcc or hipcc' if device_type == 'cuda' else 'such as g++ 11 or later'}), "
                "and do not set APEX_JIT=0.",
                name="amp_C",
            )


_require_kernels()
