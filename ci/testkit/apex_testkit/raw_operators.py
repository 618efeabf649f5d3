"""A valid call of every raw operator, made from its schema and the shapes of its arguments."""

from __future__ import annotations

import importlib
import pkgutil
import random
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .raw_calls import Call

# name: shape of a tensor argument, a letter or digit for each size; behind a colon how it is
# stored: f is what statistics are kept in, the others are of one dtype. D is 2 * E, U is W + 1.
_NORM = {"x": "RC", "dy": "RC", "y": "RC", "weight": "C", "bias": "C", "mean": "R:f", "rstd": "R:f"}
_ADDED = {**_NORM, "residual": "RC", "dsum": "RC", "sum": "RC"}
_OF_CHANNELS = dict.fromkeys(("mean", "inv_std", "weight", "bias", "sum_dy", "sum_dy_xmu"), "C:f")
_GROUP_BN = {**_OF_CHANNELS, "count": "1:count"}
_PARTS = {"mean": "RC:f", "biased_var": "RC:f", "count": "R:count"}
_ROPE = {"x": "BHSD", "dy": "BHSD", "cos": "SD", "sin": "SD", "positions": "S:below S"}
_IMAGE = {**_ROPE, **dict.fromkeys(("cos_h", "sin_h", "cos_w", "sin_w"), "SE")}
_SCORES = {"scores": "BHSC", "mask": "BSC:bool", "keep": "RC:bool"}
_GROUPS = {"x": "RDST", "dy": "RDST", "weight": "D", "bias": "D", "mean": "RE:f", "rstd": "RE:f"}
_JOINT = {
    "f": "BTH",
    "g": "BUH",
    "f_len": "B:upto T",
    "g_len": "B:upto U",
    "keep": "BTUH:bool",
    "dh": "BTUH",
    "batch_offset": None,
}
_LOSS = {
    "x": "BTUC",
    "label": "BW:below C",
    "f_len": "B:upto T",
    "y_len": "B:upto W",
    "grad_loss": "B:f",
    "maxima": "BTU:f",
    "sums_exp": "BTU:f",
    "scores": "BTU2:f",
    "alpha": "BTU:float64",
    "beta": "BTU:float64",
    "batch_offset": None,
}
_XENTROPY = {"logits": "RC", "labels": "R:below C", "grad_losses": "R", "maxima": "R:f"}
SHAPES: dict[str, dict[str, str | None]] = {
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "fast_layer_norm": _NORM,
    "add_layer_norm": _ADDED,
    "add_rms_norm": _ADDED,
    "welford_parallel": _PARTS,
    "batchnorm": _GROUP_BN,
    "relu_bw": _OF_CHANNELS,
    "reduce_bn": _OF_CHANNELS,
    "group_batch_norm_merge": _PARTS,
    "group_batch_norm": _GROUP_BN,
    "rotary_embedding": _ROPE,
    "rotary_embedding_2d": _IMAGE,
    "causal_softmax": {"x": "BSS", "dy": "BSS", "y": "BSS"},
    "masked_softmax": {"x": "BHSC", "mask": "B1SC:bool"},
    "mask_softmax": _SCORES,
    "focal_loss": {"targets": "R:below C", "grad_losses": "R:f"},
    "fused_bias_swiglu": {"input": "RD", "dy": "RE", "bias": "D"},
    "group_norm_nhwc": _GROUPS,
    "index_mul_2d": {"in1": "MC", "idx1": "R:below M"},
    "retained_magnitude": {"magnitudes": "CR", "fours": "M4:below C"},
    "transducer_joint": _JOINT,
    "transducer_loss": _LOSS,
    "softmax_xentropy": {**_XENTROPY, "sums_exp": "R:f"},
    "logit": {**_XENTROPY, **dict.fromkeys(("sums_exp", "targets", "grad_losses"), "R:f")},
}
# Tensors of one number; n: one for each tensor of a list.
_NUMBERS = {
    **dict.fromkeys(("flag", "noop_flag", "overflow", "device_step"), "1:int32"),
    **dict.fromkeys(("growth_tracker", "hysteresis_tracker"), "1:int32"),
    **dict.fromkeys(("found_inf", "device_lr", "inv_scale", "device_scale"), "1:float32"),
    **dict.fromkeys(("grad_scale", "current_scale", "device_max_grad_norm"), "1:float32"),
    **dict.fromkeys(("norm", "gradient_factor", "clip"), "1:float64"),
    "lr": "1:float32",
    "step": "1:int32",
    "global_grad_norm": "1:float64",
    "seed": "1:int64",
    "num_batches": "1:int64",
    "squares": "n2:float64",
    "numbers": "n8:float64",
    "scales": "n3:float32",
    "new_scales": "n3:float32",
    "decays": "n:float64",
    "norms": "n:f",
    "grad_norms": "n:f",
    "param_norms": "n:f",
    "update_norms": "n:f",
    "per_tensor_decay": "n:f",
}
_OF_OPERATOR = {
    ("adam_swa_step", "device_scale"): "1:float64",
    ("apex_amp", "found_inf"): "1:int32",
    ("lamb_apply", "param_norms"): "n:float64",
    ("lamb_apply", "update_norms"): "n:float64",
    ("lamb_stage1", "global_grad_norm"): "1:float32",
}
_FLOATS = {
    "eps": 1e-5,
    "beta1": 0.9,
    "beta2": 0.99,
    "p": 0.25,
    "momentum": 0.9,
    "dampening": 0.0,
    "smoothing": 0.1,
    "alpha": 0.25,
    "gamma": 2.0,
    "weight_decay": 0.01,
    "norm_type": 2.0,
}
_INTS = {"packed_batch": 0, "first": 0, "rows": 0, "blank": 0, "img_w": 2, "only_pass": 0}
_INTS |= {"arg_to_check": -1, "held_grads": 0, "rounding_step": 0}
_SIZES_OF_INTS = {"classes": "C", "groups": "E", "max_f_len": "T", "columns": "C"}
_FLOAT_LISTS = {"lamb_terms": ("exp_avgs", "exp_avg_sqs", "updates")}
_FLOAT_LISTS["lamb_apply"] = ("params", "updates")
# Lists of float32, or of float64 beside float64 params.
_MOMENTS = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters")
_WIDE_LISTS = dict.fromkeys(("adam_step", "adam_step_capturable", "adam_step_held"), _MOMENTS)
_MAY_BE_EMPTY = ("copies", "masters", "remainders", "max_exp_avg_sqs", "averages")
_DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)


def operators() -> dict[str, Any]:
    """All operators of the installed packages that have kernels for CPUs, by their full names."""
    found = {}
    for package in ("amp", "normalization", "parallel", "optimizers", "transformer", "contrib"):
        root = importlib.import_module(f"apex.{package}")
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if module.name.endswith((".ops", "_ops")):
                importlib.import_module(module.name)
    importlib.import_module("amp_C")
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace.startswith("apex_") and not name.endswith("_blaslt"):
            found[schema.name] = getattr(getattr(torch.ops, namespace), name).default
    return dict(sorted(found.items()))


def shapes_of(name: str) -> dict[str, str | None]:
    """The entry of ``SHAPES`` with the longest name that the operator's begins with."""
    fitting = [key for key in SHAPES if name.startswith(key)]
    return SHAPES[max(fitting, key=len)] if fitting else {}


_SUBJECT = re.compile(r"(?:^|: |, | and |\. |of )([a-z]\w*)(?:\[[\d, ]+\])? (?:must|is|has|needs) ")
_BESIDE = re.compile(
    r"the (?:device|dtype|shape|rows|columns|frames|channels|tokens) of ([a-z]\w*)"
)
# Subjects of sentences that are no arguments.
_WORDS = {"the", "which"}
# The one sentence that names no argument: of the dtype that an operator computes in.
_OF_DTYPE = "expected float64, float32, float16 or bfloat16, got "


def check_names(op: Any, text: str) -> None:
    """Raise AssertionError where an error names the operator, or an argument, that is not there."""
    name = op._schema.name.partition("::")[2]
    if "out of memory" in text or op._schema.name in text:  # in torch's words
        return
    assert text.startswith((f"{name}: ", f"{name.removesuffix('_held')}: ")), (
        f"the error does not begin with the operator's name: {text}"
    )
    arguments = {a.name for a in (*op._schema.arguments, *op._schema.returns)}
    if name.endswith("_held"):  # lists that C++ keeps have the names that the step gives them
        step = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_held")).default
        arguments |= {a.name for a in step._schema.arguments}
    body = text.partition(": ")[2]
    named = {*_SUBJECT.findall(body), *_BESIDE.findall(body)} - _WORDS
    assert named <= arguments, f"no arguments of {name}: {sorted(named - arguments)}: {text}"
    is_named = arguments & {*re.findall(r"[a-zA-Z_]\w*", body)}
    assert is_named or body.startswith(_OF_DTYPE), f"no argument of {name} is named: {text}"


class Maker:
    """Makes valid calls of an operator.

    Args:
        op: the operator.
        is_full: give all optional arguments, and no size of 0.

    ``refusal`` is the last error's text.
    """

    def __init__(self, op: Any, is_full: bool = False) -> None:
        self.op, self.is_full = op, is_full
        self.refusal = ""
        self.namespace, _, self.name = op._schema.name.partition("::")
        self.__name__ = op._schema.name

    def __call__(self, rng: random.Random) -> Call:
        self.rng, self.dtype = rng, rng.choice(_DTYPES)
        self._choose_sizes()
        args = {a.name: self._value(a) for a in self.op._schema.arguments}
        written = [a.name for a in self.op._schema.arguments if a.alias_info is not None]
        args = self._fitted(args)
        return Call(self._run_of(args), args, written=written, sees_overlaps=False)

    def _run_of(self, args: dict[str, Any]) -> Callable[..., Any]:
        """The operator; errors must name arguments that it has, and lists that C++ keeps go."""
        held = args.get("held") if self.name.endswith("_step_held") else None

        def run(**given: Any) -> Any:
            try:
                result = self.op(**given)
                if self.name.endswith("_hold"):
                    self._release(result)
                return result
            except RuntimeError as error:
                self.refusal = str(error)
                check_names(self.op, self.refusal)
                raise
            finally:
                if held is not None:
                    self._release(held)

        return run

    def _release(self, held: int) -> None:
        kind = self.name.removesuffix("_step_held").removesuffix("_hold")
        release = getattr(getattr(torch.ops, self.namespace), f"{kind}_release")
        release(torch.zeros(1), held)

    def _choose_sizes(self) -> None:
        none = 0 if not self.is_full and self.rng.random() < 0.03 else 1
        self.sizes = {letter: self.rng.choice((1, 2, 3, 5)) * none for letter in "BHMRSTW"}
        self.sizes |= {"C": self.rng.choice((1, 4, 17, 70)), "E": self.rng.choice((2, 4, 8))}
        self.sizes |= {"D": 2 * self.sizes["E"], "U": self.sizes["W"] + 1}
        count = self.rng.randrange(1, 4) * none
        self.shapes = [self.rng.choice(((3,), (2, 4), (), (65,), (5, 3))) for _ in range(count)]
        self.sizes["n"] = count

    def _value(self, argument: Any) -> Any:
        kind, name = str(argument.type), argument.name
        optional = kind.startswith("Optional") and not self.is_full
        if optional and self.rng.random() < 0.5:
            return None
        if "List[Tensor]" in kind:
            return self._list(name)
        if "Tensor" in kind:
            return self._tensor(name)
        if "bool" in kind:
            return self.rng.random() < 0.5
        if "float" in kind:
            return _FLOATS.get(name, 0.5)
        if name in _SIZES_OF_INTS:
            is_corner = self.name.startswith("mask_softmax_dropout")
            return 0 if is_corner else self.sizes[_SIZES_OF_INTS[name]]
        return _INTS.get(name, self.rng.choice((1, 2, 3)))

    def _list(self, name: str) -> list[Tensor]:
        is_likely_empty = not self.is_full or name == "remainders"
        if name in _MAY_BE_EMPTY and is_likely_empty and self.rng.random() < 0.7:
            return []
        is_float = name in _FLOAT_LISTS.get(self.name, ())
        is_float |= name in _WIDE_LISTS.get(self.name, ()) and self.dtype != torch.float64
        dtype = torch.float32 if is_float else self.dtype
        if name == "copies" and dtype == torch.float32:
            dtype = torch.float16
        return [torch.rand(s, dtype=torch.float64).to(dtype) for s in self.shapes]

    def _tensor(self, name: str) -> Tensor | None:
        own = shapes_of(self.name)
        for key in (self.name, self.namespace):
            if (key, name) in _OF_OPERATOR:
                own = {name: _OF_OPERATOR[key, name]}
        text = own.get(name, _NUMBERS.get(name, "RC"))
        if text is None:
            return None
        shape, _, stored = text.partition(":")
        sizes = [int(s) if s.isdigit() else self.sizes[s] for s in shape]
        if " " in stored:
            kind, limit = stored.split()
            limit = self.sizes[limit] + (kind == "upto")
            return torch.randint(0, max(limit, 1), sizes)
        if stored == "count":
            return torch.randint(1, 9, sizes)
        if stored in ("bool", "int32", "int64"):
            return torch.randint(0, 2, sizes).to(getattr(torch, stored))
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        dtype = {"": self.dtype, "f": wide}.get(stored) or getattr(torch, stored)
        return torch.rand(sizes, dtype=torch.float64).to(dtype)

    def _fitted(self, args: dict[str, Any]) -> dict[str, Any]:
        """What one argument says of another."""
        rng, sizes = self.rng, self.sizes
        if args.get("channel_last") is False:  # [batch, channels, *]
            for name in {"input", "grad_output", "z"} & {*args}:
                if args[name] is not None:
                    args[name] = torch.rand(sizes["R"], sizes["C"], 3).to(self.dtype)
        if "bias" in args and args.get("weight", 1) is None:
            args["bias"] = None
        if "bias_grad" in args and args.get("bias", 1) is None:
            args["bias_grad"] = False
        if "weight_grads" in args and args["weight"] is None:
            args["weight_grads"] = False
        if self.name.startswith("transducer") and rng.random() < 0.4:
            self._pack(args)
        if args.get("remainders"):  # the lower halves of masters whose upper halves are params
            args["scales"] = args["new_scales"] = None
            args["copies"] = self._list("params")
            for name, dtype in (("params", torch.bfloat16), ("copies", torch.bfloat16)):
                args[name] = [t.to(dtype) for t in args[name]]
            args["remainders"] = [t.to(torch.int16) for t in args["remainders"]]
        if args.get("squares") is not None:
            args["only_pass"] = rng.choice((1, 2))
        lists = self._hold(args) if self.name.endswith("_step_held") else args
        has_more = lists.get("copies") or lists.get("masters")
        if "rounding_key" in args and (has_more or self.dtype != torch.bfloat16):
            args["rounding_key"] = None
        return args

    def _pack(self, args: dict[str, Any]) -> None:
        lengths = args["g_len"] if "g_len" in args else args["y_len"] + 1
        ends = (args["f_len"] * lengths).cumsum(0)
        total = int(ends[-1]) if ends.numel() else 0
        args["batch_offset"] = ends
        if "packed_batch" in args:
            args["packed_batch"] = total = total + self.rng.choice((0, 0, 2))
        for name in {"dh", "keep", "x", "maxima", "sums_exp", "scores", "alpha", "beta"}:
            if args.get(name) is not None:
                t = args[name]
                rest = t.shape[3:]
                args[name] = torch.rand(total, *rest).gt(0.5).to(t.dtype)

    def _hold(self, args: dict[str, Any]) -> dict[str, list[Tensor]]:
        """Lists that C++ keeps, by their names; the caller releases them."""
        kind = self.name.removesuffix("_step_held")
        hold = getattr(getattr(torch.ops, self.namespace), f"{kind}_hold").default
        lists = {a.name: self._list(a.name) for a in hold._schema.arguments}
        args["held"], args["grads"] = hold(**lists), lists["grads"]
        return lists
