"""What torch asks of each Formula of the norms beyond a forward and a backward."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from apex.normalization import fused_add_layer_norm, fused_add_rms_norm
from apex.normalization.fused_add_norm import ops as add_ops
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    decompositions,
    fused_layer_norm_affine,
    fused_rms_norm_affine,
    ops,
)
from apex_testkit.formulas import CHECKS, Case, check_sharded

EPS = 1e-3


def operands(count, dtype, device, columns):
    """Rows, a weight and a bias; the weight is not zero, as a backward from the output needs."""
    rows = torch.randn(count, 4, columns, device=device, dtype=dtype).unbind()
    weight, bias = torch.randn(2, columns, device=device, dtype=dtype)
    return rows, torch.copysign(weight.abs() + 0.5, weight), bias


def of_x(dtype, device, columns=7):
    (x,), weight, bias = operands(1, dtype, device, columns)
    return x, weight, bias


def of_sum(dtype, device, columns=7):
    (x, residual), weight, bias = operands(2, dtype, device, columns)
    return x, residual, weight, bias


def layer_norm(x, weight, bias):
    """Not torch's, whose forward-mode derivative of the weight's gradient is wrong (2.13)."""
    deviation = x - x.mean(-1, keepdim=True)
    return deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS) * weight + bias


def sum_and_norm(norm):
    """Both outputs in one number."""

    def function(*arguments):
        y, total = norm(*arguments)
        return y + total.cos()

    return function


def norm_case(function, arguments, oracle, **options):
    return Case(
        function,
        arguments,
        oracle,
        decompositions=decompositions,
        ulps=3,
        wide=arguments,
        **options,
    )


def cases(**options):
    """Each norm, with weights that count from zero, or from one with ``zero_centered_gamma``."""
    origin = int(options.get("zero_centered_gamma", False))
    return {
        "layer_norm": norm_case(
            lambda x, w, b: FusedLayerNormAffineFunction.apply(
                x, w, b, x.shape[-1], EPS, **options
            ),
            of_x,
            lambda x, w, b: layer_norm(x, origin + w, b),
            grads=(0, 1, 2),
            rows=(0,),
            operators=(ops.layer_norm_forward, ops.layer_norm_backward),
        ),
        "rms_norm": norm_case(
            lambda x, w: FusedRMSNormAffineFunction.apply(x, w, x.shape[-1], EPS, **options),
            lambda *given: of_x(*given)[:2],
            lambda x, w: F.rms_norm(x, x.shape[-1:], origin + w, EPS),
            grads=(0, 1),
            rows=(0,),
            operators=(ops.rms_norm_forward, ops.rms_norm_backward),
        ),
        "add_layer_norm": norm_case(
            sum_and_norm(lambda *a: fused_add_layer_norm(*a, EPS, prenorm=True, **options)),
            of_sum,
            sum_and_norm(lambda x, r, w, b: (layer_norm(x + r, origin + w, b), x + r)),
            grads=(0, 1, 2, 3),
            rows=(0, 1),
            operators=(add_ops.add_layer_norm_forward, add_ops.add_layer_norm_backward),
        ),
        "add_rms_norm": norm_case(
            sum_and_norm(lambda *a: fused_add_rms_norm(*a, EPS, prenorm=True, **options)),
            lambda *given: of_sum(*given)[:3],
            sum_and_norm(lambda x, r, w: (F.rms_norm(x + r, x.shape[-1:], origin + w, EPS), x + r)),
            grads=(0, 1, 2),
            rows=(0, 1),
            operators=(add_ops.add_rms_norm_forward, add_ops.add_rms_norm_backward),
        ),
    }


CASES = {
    "layer_norm without weights": norm_case(
        lambda x: FusedLayerNormFunction.apply(x, x.shape[-1], EPS),
        lambda *given: of_x(*given)[:1],
        lambda x: F.layer_norm(x, x.shape[-1:], None, None, EPS),
        grads=(0,),
        rows=(0,),
        operators=(ops.layer_norm_forward, ops.layer_norm_backward),
    ),
    **cases(),
    **{f"{name}, zero-centred": c for name, c in cases(zero_centered_gamma=True).items()},
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_formula(case, check, device):
    check(case, device)


OF_MODULES = {
    "layer_norm": lambda x, w, b: fused_layer_norm_affine(x, w, b, w.shape, EPS),
    "rms_norm": lambda x, w: fused_rms_norm_affine(x, w, w.shape, EPS),
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_hook_fails_in_modules(name, device):
    """They say the shape as their weight does, and take the shortest way."""
    CHECKS["hook_fails"](replace(CASES[name], function=OF_MODULES[name]), device)


OPTIONS = {
    "memory_efficient": {"memory_efficient": True},
    "memory_efficient, zero-centred": {"memory_efficient": True, "zero_centered_gamma": True},
    "float32 weights": {},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_other_forms_are_batch_invariant(options, device):
    """Beside those of CASES: what works from the output, and input beside weights of float32."""
    is_wide = not options

    def of(dtype, device, columns=7):
        x, *parameters = of_x(dtype, device, columns)
        parameters = [p.abs() for p in parameters]  # the input is recovered from the output
        return x, *(p.float() if is_wide else p for p in parameters)

    layer = lambda x, w, b: FusedLayerNormAffineFunction.apply(x, w, b, x.shape[-1], EPS, **options)
    rms = lambda x, w, b: FusedRMSNormAffineFunction.apply(x, w, x.shape[-1], EPS, **options)
    for norm in (layer, rms):
        case = norm_case(norm, of, None, grads=(0,), rows=(0,), operators=())
        CHECKS["batch_invariance"](case, device)


def on_ranks(rank, world_size):
    for case in CASES.values():
        check_sharded(case, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)
