"""Random calls of the raw operators: right, or refused with nothing changed."""

import pytest
import torch
import torch.nn.functional as F

from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.normalization.fused_add_norm import ops as add_ops
from apex.normalization.fused_layer_norm import ops
from apex_testkit.raw_calls import Call, run_random_calls

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-3
CENTERED = ({}, {"zero_centered_gamma": True})  # what is absent has its default


def normed(x, weight, bias, columns, eps, is_rms, zero_centered_gamma=False):
    """The float64 formula, for tensors of any shape that are rows of ``columns``."""
    if eps < 0:
        raise ArithmeticError("roots of negative numbers")
    if columns <= 0 or (weight is None and bias is not None):
        raise ValueError("must be refused")
    rows = x.reshape(-1, columns)
    if any(p is not None and p.numel() != columns for p in (weight, bias)):
        raise ValueError("must be refused")
    weight, bias = (None if p is None else p.reshape(-1) for p in (weight, bias))
    if is_rms:
        y = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
    else:
        y = F.layer_norm(rows, (columns,), None, None, eps)
    if weight is not None and zero_centered_gamma:
        weight = 1 + weight
    if weight is not None and weight.isinf().any() and (y.abs() < 1e-6).any():
        raise ArithmeticError("infinity times what rounding may have made zero")
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def operands(rng):
    """Arguments of a forward: x, weight and bias."""
    columns = rng.choice((1, 3, 8, 65))
    dtype = rng.choice(FLOATS)
    shape = rng.choice(((2, columns), (columns,), (0, columns), (3, 2, columns)))
    make = lambda *size: torch.randn(*size, dtype=torch.float64).to(dtype)
    return make(*shape), make(columns), make(columns), columns


def forward(rng):
    x, weight, bias, columns = operands(rng)
    args = {"x": x, "weight": rng.choice((weight, None)), "columns": columns, "eps": EPS}
    args |= rng.choice(CENTERED)
    is_rms = rng.random() < 0.5
    if not is_rms:
        args["bias"] = None if args["weight"] is None else rng.choice((bias, None))

    def expected(a):
        option = a.get("zero_centered_gamma", False)
        y = normed(a["x"], a["weight"], a.get("bias"), a["columns"], a["eps"], is_rms, option)
        return {"result": [y]}

    def run(**args):
        return (ops.rms_norm_forward if is_rms else ops.layer_norm_forward)(**args)[:1]

    return Call(run, args, expected)


def backward(rng):
    """Of layer norm, from statistics that belong to other rows if ``x`` is spoiled."""
    x, weight, _, columns = operands(rng)
    _, mean, rstd = ops.layer_norm_forward(x, weight, None, columns, EPS)
    original = x.double()
    args = {"dy": torch.randn(x.shape).to(x.dtype), "x": x, "weight": weight}
    args |= {"mean": mean, "rstd": rstd, "columns": columns, "weight_grads": True}
    args |= rng.choice(CENTERED)

    def expected(a):
        rows = original.reshape(-1, columns)
        good = (rows.mean(1), torch.rsqrt(rows.var(1, correction=0) + EPS))
        same = [a["x"].reshape(-1).equal(original.reshape(-1)), a["columns"] == columns]
        same += [
            s.numel() == g.numel() and torch.allclose(s.reshape(-1), g, rtol=1e-4, atol=1e-4)
            for s, g in zip((a["mean"], a["rstd"]), good, strict=True)
        ]
        if not all(same) or not a["dy"].isfinite().all():
            raise ArithmeticError("statistics of other rows")
        with torch.enable_grad():
            x, weight = a["x"].requires_grad_(), a["weight"]
            option = a.get("zero_centered_gamma", False)
            y = normed(x, weight, None, a["columns"], EPS, False, option)
            (dx,) = torch.autograd.grad(y, x, a["dy"].reshape(y.shape))
        return {"result": [dx]}

    def run(**args):
        return ops.layer_norm_backward(**args)[:1]

    return Call(run, args, expected)


def add_forward(rng):
    x, weight, bias, columns = operands(rng)
    residual = torch.randn(x.shape).to(x.dtype)
    args = {"x": x, "residual": residual, "weight": weight, "columns": columns, "eps": EPS}
    args |= rng.choice(CENTERED)
    is_rms = rng.random() < 0.5
    if not is_rms:
        args["bias"] = rng.choice((bias, None))

    def expected(a):
        if a["x"].numel() != a["residual"].numel():
            raise ValueError("must be refused")
        total = a["x"].reshape(-1) + a["residual"].reshape(-1)
        option = a.get("zero_centered_gamma", False)
        y = normed(total, a["weight"], a.get("bias"), a["columns"], a["eps"], is_rms, option)
        return {"result": [y, total]}

    def run(**args):
        op = add_ops.add_rms_norm_forward if is_rms else add_ops.add_layer_norm_forward
        return op(**args)[:2]

    return Call(run, args, expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_calls(seed):
    counts = run_random_calls([forward, backward, add_forward], seed)
    assert counts["done"] > 0.2 * counts.total()
    assert counts["refused"] > 0.1 * counts.total()


@pytest.mark.parametrize("norm", [FusedLayerNorm, FusedRMSNorm])
def test_freed_memory_is_refused(norm):
    """As FSDP leaves parameters between uses: once a segmentation fault."""
    module = norm(64)
    module.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated yet"):
        module(torch.randn(2048, 64))
    x = torch.randn(2048, 64)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated yet"):
        norm(64)(x)


def test_errors_of_raw_operators():
    x, weight = torch.randn(4, 8), torch.ones(8)
    with pytest.raises(RuntimeError, match=r"layer_norm_forward: x must be a tensor, got None"):
        ops.layer_norm_forward(None, weight, None, 8, EPS)
    with pytest.raises(RuntimeError, match=r"x is on cpu, but weight is on meta"):
        ops.layer_norm_forward(x, weight.to("meta"), None, 8, EPS)
