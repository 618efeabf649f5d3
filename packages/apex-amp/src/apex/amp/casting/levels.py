"""The options behind an opt level: their defaults for O0 to O5, and the rules for overrides."""

from __future__ import annotations

from typing import Any

import torch

from .._amp_state import warn_or_err

_PATCH_DTYPES = {"O1": torch.float16, "O4": torch.bfloat16}
_PATCHING = "/".join(_PATCH_DTYPES)


class Properties:
    """The options in force, and the rules that say which of them an opt level allows.

    Attributes (all are checked on assignment):
        enabled: False if amp does nothing.
        opt_level: "O0" to "O5".
        cast_model_type: dtype that parameters and inputs are cast to, or None.
        patch_torch_functions: whether functions cast their arguments (autocast).
        patch_torch_functions_type: float16 or bfloat16, the dtype of those casts.
        keep_batchnorm_fp32: whether affine batch norms stay in float32 in a cast model.
        master_weights: whether optimizers step on float32 copies of 16-bit parameters.
        loss_scale: a number or "dynamic".

    Raises:
        AttributeError: an unknown option is read.
        RuntimeError: an assigned value does not go with the opt level; with
            ``_amp_state.hard_override`` a warning is printed instead.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        defaults = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "patch_torch_functions_type": None,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
        }
        object.__setattr__(self, "options", defaults)

    def _update_options_dict(self, new_options: dict[str, Any]) -> None:
        """Set options without checking their values; an unknown name is a ``ValueError``."""
        unknown = [name for name in new_options if name not in self.options]
        if unknown:
            raise ValueError(
                f"amp: unknown option {unknown[0]!r}; expected one of {', '.join(self.options)}."
            )
        self.options.update(new_options)

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            object.__setattr__(self, name, value)
            return
        rule = getattr(self, f"_checked_{name}", None)
        if rule is None:
            self.options[name] = value
            return
        keep, checked = rule(value)
        if keep:
            self.options[name] = checked

    @property
    def _patches(self) -> bool:
        return self.opt_level in _PATCH_DTYPES

    def _checked_cast_model_type(self, value: Any) -> tuple[bool, Any]:
        if value and not isinstance(value, torch.dtype):
            raise TypeError(
                "amp.initialize: cast_model_type must be a torch.dtype, False or None, got "
                f"{value!r}."
            )
        if value and not value.is_floating_point:
            raise TypeError(
                f"amp.initialize: cast_model_type must be a floating-point dtype, got {value}."
            )
        if self._patches and value and value is not torch.float32:
            warn_or_err(
                f"amp.initialize: cast_model_type={value} does not go with opt_level "
                f"{self.opt_level}, which leaves the model in float32 and casts the arguments of "
                "functions. Use O2, O3 or O5 to cast the model."
            )
        return True, value

    def _checked_patch_torch_functions(self, value: Any) -> tuple[bool, Any]:
        if not self._patches and value:
            warn_or_err(
                f"amp.initialize: patch_torch_functions={value} does not go with opt_level "
                f"{self.opt_level}; only {_PATCHING} cast the arguments of functions."
            )
        return True, value

    def _checked_patch_torch_functions_type(self, value: Any) -> tuple[bool, Any]:
        expected = _PATCH_DTYPES.get(self.opt_level)
        if value is expected:
            return True, value
        warn_or_err(
            f"amp.initialize: patch_torch_functions_type must be {expected} at opt_level "
            f"{self.opt_level}, got {value}. O1 is for float16, O4 for bfloat16."
        )
        return False, value

    def _checked_keep_batchnorm_fp32(self, value: Any) -> tuple[bool, Any]:
        if self._patches:
            if value is not None:
                warn_or_err(
                    f"amp.initialize: keep_batchnorm_fp32={value!r} does not go with opt_level "
                    f"{self.opt_level}, where the whole model is float32. Leave it out."
                )
            return True, value
        if isinstance(value, str):
            value = {"True": True, "False": False}.get(value, value)
        if value is not None and not isinstance(value, bool):
            raise AssertionError(
                "amp.initialize: keep_batchnorm_fp32 must be a bool, 'True', 'False' or None, "
                f"got {value!r}."
            )
        return True, value

    def _checked_master_weights(self, value: Any) -> tuple[bool, Any]:
        if self._patches and value is not None:
            warn_or_err(
                f"amp.initialize: master_weights={value} does not go with opt_level "
                f"{self.opt_level}, where the weights themselves are float32. Leave it out."
            )
        return True, value

    def _checked_loss_scale(self, value: Any) -> tuple[bool, Any]:
        return True, value if value == "dynamic" else float(value)


class OptLevel:
    """A named set of defaults; called with a :class:`Properties`, it fills and returns it."""

    name: str
    brief: str
    more: str
    defaults: dict[str, Any]

    def __call__(self, properties: Properties) -> Properties:
        values = {"enabled": True, "opt_level": self.name, **self.defaults}
        properties._update_options_dict(values)
        return properties


def _defaults(
    cast: torch.dtype | None,
    patch: torch.dtype | None,
    keep_batchnorm_fp32: bool | None,
    master_weights: bool | None,
    loss_scale: float | str,
) -> dict[str, Any]:
    return {
        "cast_model_type": cast,
        "patch_torch_functions": patch is not None,
        "patch_torch_functions_type": patch,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }


class O0(OptLevel):
    """Everything in float32: the baseline that the other levels are compared with."""

    name = "O0"
    brief = "O0:  Pure FP32 training.\n"
    more = "Model and inputs are cast to float32, and nothing else is changed. The baseline."
    defaults = _defaults(torch.float32, None, None, False, 1.0)


_LEAVING = (
    "Casts end with amp._amp_state.handle._deactivate(), not by restoring functions of torch."
)


class O1(OptLevel):
    """float32 weights; functions that gain by it run in float16 (autocast)."""

    name = "O1"
    brief = "O1:  Casts the arguments of functions to FP16 where that is fast and safe.\n"
    more = (
        "Weights stay float32. Convolutions and matrix products run in float16, functions that\n"
        "need range or precision in float32. The loss is scaled dynamically. The usual choice.\n"
        f"{_LEAVING}"
    )
    defaults = _defaults(None, torch.float16, None, None, "dynamic")


class O2(OptLevel):
    """A float16 model with float32 batch norms and float32 master weights."""

    name = "O2"
    brief = "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n"
    more = (
        "The model and its inputs are cast to float16, except for batch norms. Optimizers step\n"
        "on float32 copies of the weights. The loss is scaled dynamically."
    )
    defaults = _defaults(torch.float16, None, True, True, "dynamic")


class O3(OptLevel):
    """Everything in float16: an upper bound on speed; few models train well at it."""

    name = "O3"
    brief = "O3:  Pure FP16 training."
    more = (
        "The whole model is cast to float16, without master weights or loss scaling. An upper\n"
        "bound on speed; keep_batchnorm_fp32=True may add to it and to stability."
    )
    defaults = _defaults(torch.float16, None, False, False, 1.0)


class O4(OptLevel):
    """O1 with bfloat16, which needs no loss scaling."""

    name = "O4"
    brief = "O4:  Casts the arguments of functions to BFLOAT16 where that is fast and safe.\n"
    more = f"As O1 in bfloat16, whose range is that of float32: the loss is not scaled.\n{_LEAVING}"
    defaults = _defaults(None, torch.bfloat16, None, None, 1.0)


class O5(OptLevel):
    """O2 with bfloat16, which needs no loss scaling."""

    name = "O5"
    brief = "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.\n"
    more = "As O2 in bfloat16, whose range is that of float32: the loss is not scaled."
    defaults = _defaults(torch.bfloat16, None, True, True, 1.0)


opt_levels: dict[str, OptLevel] = {level.name: level() for level in (O3, O2, O1, O0, O4, O5)}
"""Every opt level by its name, as ``amp.initialize`` takes it; ``opt_levels["O1"].brief``
describes it."""
