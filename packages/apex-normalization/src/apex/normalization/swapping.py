"""``from_torch``: puts fused normalization in the place of a model's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ._shared.native.operands import FLOATS
from .fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from .fused_layer_norm.checks import rms_eps
from .fused_layer_norm.formulas import layer_norm_reference, rms_norm_reference

_LOOKS_LIKE_A_NORM = re.compile(r"(RMS|Layer)_?Norm", re.IGNORECASE)
# Attributes under which RMS norms keep their eps: Llama's and T5's, Gemma's and others', Flax's.
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
# Methods that a class may have of its own: the fused modules' do the same, or nothing of note. The
# forwards are looked at by themselves; Python 3.14 keeps annotations in the last.
_REPLACED = {
    "__init__",
    "__repr__",
    "extra_repr",
    "reset_parameters",
    "forward",
    "__annotate_func__",
}


class _NotSwapped(Exception):
    """Says why a module stays."""


@dataclass(frozen=True)
class Swaps:
    """What :func:`from_torch` did.

    Attributes:
        model: the model; a new module only where the model itself was a norm.
        swapped: the name of each module that was replaced, and the class it had.
        kept: the name of each norm that was not replaced, and why.
    """

    model: nn.Module
    swapped: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, kept {len(self.kept)}"]
        lines += [f"  swapped {name or '(root)'}: {old}" for name, old in self.swapped.items()]
        lines += [f"  kept {name or '(root)'}: {reason}" for name, reason in self.kept.items()]
        return "\n".join(lines)


def from_torch(model: nn.Module, *, memory_efficient: bool = False, mixed: bool = False) -> Swaps:
    """Replace a model's layer and RMS norms by fused ones, in place.

    Replaced are :class:`torch.nn.LayerNorm`, :class:`torch.nn.RMSNorm`, and modules of other
    libraries that are RMS norms: whose class is called ``...RMSNorm`` or ``...LayerNorm``, which
    have a one-dimensional ``weight``, an ``eps`` (or ``variance_epsilon``, ``epsilon``) and nothing
    else, and which return ``x / sqrt(mean(x ** 2) + eps) * weight`` for random numbers of two to
    four dimensions, trained or not. Norms that multiply by ``1 + weight`` instead, as Gemma's and
    subclasses of torch's called LayerNorm1P, become modules with ``zero_centered_gamma``.
    Parameters stay the same objects: optimizers, ties between modules and ``requires_grad`` are
    untouched.

    Not replaced are modules with another ``forward``, or one that takes more than its input, with
    methods that would be lost, with hooks, or with parametrizations.

    Args:
        model: any module; the root may be a norm itself, see :attr:`Swaps.model`.
        memory_efficient: of the new modules.
        mixed: make the variants that return the weight's dtype, where there is a weight. The others
            return the input's, as torch's do, or a 16-bit weight's where the input is wider.

    Returns:
        What was replaced, and what was not and why.

    Note:
        Under autocast the fused modules return the autocast dtype, torch's float32. Under amp's O1
        and O4 both return float32.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> print(from_torch(model))
        swapped 1, kept 0
          swapped 1: LayerNorm
    """
    swaps = Swaps(model)
    made: dict[nn.Module, nn.Module] = {}  # a module that is used twice stays one

    def replacement(name: str, module: nn.Module) -> nn.Module:
        if not _looks_like_a_norm(module):
            return module
        try:
            if module not in made:
                made[module] = _fused(module, memory_efficient, mixed)
        except _NotSwapped as reason:
            swaps.kept[name] = f"{type(module).__name__} {reason}"
            return module
        swaps.swapped[name] = type(module).__name__
        return made[module]

    for prefix, parent in list(model.named_modules()):
        for name, child in list(parent._modules.items()):
            if child is not None:
                new = replacement(f"{prefix}.{name}" if prefix else name, child)
                if new is not child:
                    setattr(parent, name, new)
    root = replacement("", model)
    return swaps if root is model else Swaps(root, swaps.swapped, swaps.kept)


def _looks_like_a_norm(module: nn.Module) -> bool:
    if isinstance(module, (FusedLayerNorm, FusedRMSNorm)):
        return False
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return True
    has_children = next(module.children(), None) is not None
    return not has_children and bool(_LOOKS_LIKE_A_NORM.search(type(module).__name__))


def _fused(module: nn.Module, memory_efficient: bool, mixed: bool) -> nn.Module:
    """Return a fused module with the parameters and the mode of ``module``."""
    _check_hooks(module)
    _check_instance(module)
    if isinstance(module, nn.LayerNorm):
        centered = _check_torch(module, nn.LayerNorm, {"weight", "bias"})
        kind, eps, shape = FusedLayerNorm, module.eps, module.normalized_shape
    elif isinstance(module, nn.RMSNorm):
        centered = _check_torch(module, nn.RMSNorm, {"weight"})
        kind, eps, shape = FusedRMSNorm, module.eps, module.normalized_shape
    else:
        eps, centered = _check_rms_norm(module)
        kind, shape = FusedRMSNorm, module.weight.shape
    weight, bias = module.weight, getattr(module, "bias", None)
    options = {"memory_efficient": memory_efficient, "device": "meta"}
    options["zero_centered_gamma"] = centered
    if kind is FusedLayerNorm:
        options["bias"] = bias is not None
    if weight is None:
        options["elementwise_affine"] = False
    elif mixed:
        kind = {FusedLayerNorm: MixedFusedLayerNorm, FusedRMSNorm: MixedFusedRMSNorm}[kind]
    fused = kind(shape, eps, **options)
    for name in ("weight", "bias"):
        if getattr(fused, name, None) is not None:
            setattr(fused, name, getattr(module, name))
    # What its owner or its library noted on it, such as `variance_epsilon`.
    vars(fused).update({k: v for k, v in vars(module).items() if k not in vars(fused)})
    return fused.train(module.training)


def _check_hooks(module: nn.Module) -> None:
    hooks = [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
    if hooks:
        raise _NotSwapped("has hooks, which would be lost")


def _check_instance(module: nn.Module) -> None:
    """Refuse what was put on the instance and runs in place of its class's, such as a forward."""
    own = sorted(k for k, v in vars(module).items() if callable(v) and hasattr(nn.Module, k))
    if own:
        raise _NotSwapped(f"has its own {', '.join(own)}, set on the module, which would be lost")


def _check_methods(module: nn.Module, base: type[nn.Module]) -> None:
    """Refuse methods that callers may rely on: public ones, and others than those of ``base``."""
    kinds = (FunctionType, classmethod, staticmethod, property)
    lost = {
        name
        for cls in type(module).__mro__
        if cls not in base.__mro__
        for name, value in vars(cls).items()
        if isinstance(value, kinds) and name not in _REPLACED
        # A private one beside torch's serves the class's own forward.
        if not name.startswith("_") or hasattr(base, name)
    }
    if lost:
        raise _NotSwapped(f"has methods of its own, which would be lost: {', '.join(sorted(lost))}")


def _check_torch(module: nn.Module, base: type[nn.Module], names: set[str]) -> bool:
    """Return whether a module of torch's class multiplies by ``1 + weight``."""
    if set(module._parameters) != names or module._modules or module._buffers:
        raise _NotSwapped(f"has other parameters or modules than torch.nn.{base.__name__}")
    _check_methods(module, base)
    if any(p is not None and p.dtype not in FLOATS for p in module.parameters()):
        raise _NotSwapped("has parameters in a dtype that kernels do not take")
    if type(module).forward is base.forward:
        return False
    is_own = f"has a forward of its own, not that of torch.nn.{base.__name__}"
    if module.weight is None or not _counts_from_one(module, base):
        raise _NotSwapped(is_own)
    return True


def _counts_from_one(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether an own forward of torch's class is the class's, of ``1 + weight``."""
    _check_arguments(module)
    _check_is_there(module.weight)
    if base is nn.LayerNorm:
        return _zero_centered_gamma(module, layer_norm_reference, module.eps) is True
    eps = rms_eps(module.weight, module.eps)
    return _zero_centered_gamma(module, rms_norm_reference, eps) is True


def _check_arguments(module: nn.Module) -> None:
    arguments = list(inspect.signature(module.forward).parameters)
    if len(arguments) != 1:
        raise _NotSwapped(f"has a forward with other arguments than its input: {arguments}")


def _check_is_there(weight: Tensor) -> None:
    if weight.is_meta:
        raise _NotSwapped("has its weight on the meta device, so its results cannot be tested")


def _check_rms_norm(module: nn.Module) -> tuple[float, bool]:
    """Return the eps of a module that is an RMS norm by its parts and by what it computes, and
    whether that is a product with ``1 + weight``.
    """
    _check_arguments(module)
    _check_methods(module, nn.Module)
    weight = getattr(module, "weight", None)
    names = [name for name, p in module._parameters.items() if p is not None]
    buffers = list(module.buffers())
    if names != ["weight"] or buffers or weight.dim() != 1 or weight.dtype not in FLOATS:
        raise _NotSwapped("has other parameters or buffers than a one-dimensional weight")
    found = (getattr(module, name) for name in _EPS_NAMES if hasattr(module, name))
    eps = next((e for e in found if isinstance(e, float)), None)
    if eps is None:
        raise _NotSwapped(f"has none of {', '.join(_EPS_NAMES)} as a float")
    _check_is_there(weight)
    centered = _zero_centered_gamma(module, rms_norm_reference, eps)
    if centered is None:
        raise _NotSwapped(
            "computes something else than x / sqrt(mean(x ** 2) + eps) times weight or 1 + weight"
        )
    return eps, centered


@torch.no_grad()
def _zero_centered_gamma(
    module: nn.Module, reference: Callable[..., Any], eps: float
) -> bool | None:
    """Whether a module computes ``reference`` of ``1 + weight`` or of its weight; None: of neither.

    Tries it in both modes on random rows of several shapes, with random parameters.
    """
    generator = torch.Generator().manual_seed(0)
    weight, left = module.weight, {False, True}

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    given = {k: p for k, p in module._parameters.items() if p is not None}
    trial = {name: random(p.shape).to(p) for name, p in given.items()}
    names = ("weight", "bias") if reference is layer_norm_reference else ("weight",)
    wide = [trial[name].double().flatten() if name in trial else None for name in names]
    # Of every three rows one is so large and one so small that eps tells.
    scales = torch.tensor([1.0, 100.0, max(eps, 1e-12) ** 0.5], device="cpu")
    scales = scales.reshape(3, *[1] * weight.dim())
    was_training = module.training
    try:
        for rows in ((3,), (2, 3), (2, 4, 3)):
            x = (random((*rows, *weight.shape)) * scales).to(weight)
            for mode in (True, False):
                y = torch.func.functional_call(module.train(mode), trial, (x,))
                for centered in tuple(left):
                    expected = reference(x.double(), *wide, weight.numel(), eps, centered)[0]
                    if not _is_close(y, expected, x):
                        left.remove(centered)
                if not left:
                    return None
    except Exception:  # whatever a forward of unknown arguments raises
        return None
    finally:
        module.train(was_training)
    return min(left, default=None)


def _is_close(y: Any, expected: Tensor, x: Tensor) -> bool:
    """Whether ``y`` is ``expected``, but rounded to the dtype of ``x`` after four operations."""
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return False
    unit = 4 * torch.finfo(x.dtype).eps
    return torch.allclose(y.double(), expected, rtol=unit, atol=unit * expected.abs().max().item())
