"""Random calls of the raw operators and of amp_C: right, or refused with nothing changed."""

import pytest
import torch

from apex.multi_tensor_apply.multi_tensor_axpby import multi_tensor_axpby
from apex.multi_tensor_apply.multi_tensor_l2norm import multi_tensor_l2norm
from apex.multi_tensor_apply.multi_tensor_l2norm_scale import multi_tensor_scale_norms
from apex.multi_tensor_apply.multi_tensor_scale import multi_tensor_scale
from apex.optimizers.fused_adagrad.ops import adagrad_step
from apex.optimizers.fused_adam.ops import adam_step, adam_step_capturable
from apex.optimizers.fused_lamb.ops import lamb_stage1, lamb_stage2, lamb_step
from apex.optimizers.fused_lars.ops import lars_step
from apex.optimizers.fused_novograd.ops import novograd_step
from apex.optimizers.fused_sgd.ops import sgd_step
from apex_testkit.raw_calls import Call, run_random_calls

amp_C = pytest.importorskip("amp_C")

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((3,), (2, 4), (), (65,), (0,), (5, 3))


def lists_of(rng, *dtypes):
    """As many lists, with tensors of one shape at an index."""
    shapes = [rng.choice(SHAPES) for _ in range(rng.randrange(1, 5))]
    return [[torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes] for dtype in dtypes]


def squared(lists):
    return [[t.square() for t in tensors] for tensors in lists]


def flag():
    return torch.zeros(1, dtype=torch.int32)


def flagged(flag, *lists):
    bad = any(not t.isfinite().all() for tensors in lists for t in tensors)
    return torch.ones_like(flag) if bad else flag


def scale(rng):
    xs, outs = lists_of(rng, rng.choice(FLOATS), rng.choice(FLOATS))
    args = {"inputs": xs, "outputs": outs, "flag": flag(), "scale": 0.25}

    def expected(a):
        outputs = [x * a["scale"] for x in a["inputs"]]
        return {"outputs": outputs, "flag": flagged(a["flag"], a["inputs"])}

    def legacy(inputs, outputs, flag, scale):
        return amp_C.multi_tensor_scale(65536, flag, [inputs, outputs], scale)

    run = rng.choice((multi_tensor_scale, legacy))
    return Call(run, args, expected, ("outputs", "flag"))


def axpby(rng):
    kinds = rng.choice([(torch.float64,) * 3, [rng.choice(FLOATS[1:]) for _ in range(3)]])
    xs, ys, outs = lists_of(rng, *kinds)
    args = {"xs": xs, "ys": ys, "outputs": outs, "flag": flag(), "a": 0.5, "b": -2.0}
    args["arg_to_check"] = rng.choice((-1, 0, 1))

    def expected(a):
        outputs = [a["a"] * x + a["b"] * y for x, y in zip(a["xs"], a["ys"], strict=True)]
        tested = {0: ("xs",), 1: ("ys",), -1: ("xs", "ys")}[a["arg_to_check"]]
        return {"outputs": outputs, "flag": flagged(a["flag"], *(a[name] for name in tested))}

    return Call(multi_tensor_axpby, args, expected, ("outputs", "flag"))


def l2norm(rng):
    (xs,) = lists_of(rng, rng.choice(FLOATS))
    args = {"inputs": xs, "flag": flag(), "per_tensor": rng.random() < 0.5}

    return Call(multi_tensor_l2norm, args, of_norms, ("flag",))


def of_norms(a):
    squares = torch.stack([x.square().sum() for x in a["inputs"]])
    norms = squares.sqrt() if a["per_tensor"] else squares[:0]
    return {"result": [squares.sum().sqrt(), norms]}


def scale_norms(rng):
    xs, outs = lists_of(rng, rng.choice(FLOATS), rng.choice(FLOATS))
    args = {"inputs": xs, "outputs": outs, "flag": flag(), "scale": 3.0}
    args["per_tensor"] = rng.random() < 0.5

    def expected(a):
        return {"outputs": [x * a["scale"] for x in a["inputs"]], **of_norms(a)}

    return Call(multi_tensor_scale_norms, args, expected, ("outputs", "flag"))


def step_of(op, rng, moments, numbers, formula, unused=()):
    """A call of a step operator; ``formula`` steps one tensor, of those of all lists."""
    dtype = rng.choice(FLOATS)
    moment = dtype if dtype == torch.float64 else torch.float32
    params, grads, *states = lists_of(rng, dtype, dtype, *[moment] * len(moments))
    lists = {"params": params, "grads": grads, **dict(zip(moments, squared(states), strict=True))}
    lists |= {name: [] for name in unused}

    def expected(a):
        if any(a[name] for name in unused):
            return {}
        used = [m for m in moments if a[m] or m != "max_exp_avg_sqs"]  # which may be left out
        rows = zip(a["params"], a["grads"], *(a[m] for m in used), strict=True)
        new = [formula(a, *row) for row in rows]
        return {n: [r[i] for r in new] for i, n in enumerate(("params", *used))}

    return Call(op, {**lists, **numbers}, expected, ("params", *moments), False)


def decay(a, p):
    """Without decay infinite parameters stay infinite."""
    return a["weight_decay"] * p if a["weight_decay"] else torch.zeros_like(p)


def adam(rng):
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1, "step": 2}
    numbers |= {"bias_correction": True, "decoupled": rng.random() < 0.5, "maximize": False}
    moments, unused = ["exp_avgs", "exp_avg_sqs"], ["masters"]
    rng.choice((moments, unused)).append("max_exp_avg_sqs")

    def formula(a, p, g, m, v, *largest):
        if min(a["step"], a["lr"], a["eps"], 1 - a["beta1"], 1 - a["beta2"]) <= 0:
            raise ArithmeticError("outside of what the formula is for")
        g = -g if a["maximize"] else g
        g = g if a["decoupled"] else g + decay(a, p)
        m = a["beta1"] * m + (1 - a["beta1"]) * g
        v = a["beta2"] * v + (1 - a["beta2"]) * g * g
        c1, c2 = (1 - a[b] ** a["step"] if a["bias_correction"] else 1 for b in ("beta1", "beta2"))
        largest = [torch.maximum(x, v) for x in largest]
        u = m / c1 / (((largest or [v])[0] / c2).sqrt() + a["eps"])
        u = u + decay(a, p) if a["decoupled"] else u
        return p - a["lr"] * u, m, v, *largest

    return step_of(adam_step, rng, tuple(moments), numbers, formula, unused)


def adagrad(rng):
    numbers = {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1, "decoupled": True, "maximize": False}

    def formula(a, p, g, h):
        if min(a["lr"], a["eps"]) <= 0:
            raise ArithmeticError("outside of what the formula is for")
        g = -g if a["maximize"] else g
        g = g if a["decoupled"] else g + decay(a, p)
        h = h + g * g
        u = g / (h.sqrt() + a["eps"])
        return p - a["lr"] * (u + decay(a, p) if a["decoupled"] else u), h

    return step_of(adagrad_step, rng, ("sums",), numbers, formula)


def sgd(rng):
    params, grads, buffers = lists_of(rng, *[rng.choice(FLOATS)] * 3)
    args = {"params": params, "grads": grads, "momentum_buffers": buffers, "copies": []}
    args |= {"lr": 0.1, "device_lr": None, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
    args |= {
        "nesterov": False,
        "wd_after_momentum": False,
        "first_run": False,
        "gradient_scale": 0.5,
    }
    args["noop_flag"] = flag()

    def expected(a):
        if a["noop_flag"] is not None and a["noop_flag"].any():
            return {}
        new = []
        rows = zip(a["params"], a["grads"], a["momentum_buffers"], strict=True)
        for p, g, b in rows:
            late = a["wd_after_momentum"]
            g = a["gradient_scale"] * g + (0 if late else decay(a, p))
            b = g if a["first_run"] else a["momentum"] * b + (1 - a["dampening"]) * g
            u = g + a["momentum"] * b if a["nesterov"] else b
            u = u + (decay(a, p) if late else 0)
            new.append((p - a["lr"] * u, b))
        return {"params": [p for p, _ in new], "momentum_buffers": [b for _, b in new]}

    return Call(sgd_step, args, expected, ("params", "momentum_buffers"), False)


def lamb_second(rng):
    params, updates = lists_of(rng, *[rng.choice(FLOATS)] * 2)
    norms = {
        n: torch.rand(len(params), dtype=torch.float64) for n in ("param_norms", "update_norms")
    }
    args = {"params": params, "updates": updates, **norms}
    args |= {"lr": 0.1, "weight_decay": 0.1, "use_nvlamb": False}

    def expected(a):
        ratios = a["param_norms"] / a["update_norms"]
        has_none = (a["param_norms"] == 0) | a["param_norms"].isinf() | (a["update_norms"] == 0)
        ratios = torch.where(has_none, 1.0, ratios)
        if not (a["use_nvlamb"] or a["weight_decay"] != 0):
            ratios = torch.ones_like(ratios)
        rows = zip(a["params"], ratios, a["updates"], strict=True)
        return {"params": [p - a["lr"] * r * u for p, r, u in rows]}

    return Call(lamb_stage2, args, expected, ("params",))


def unchecked(rng):
    """Operators whose results other tests compare; here for memory and errors."""
    dtype = rng.choice(FLOATS)
    p, g, m, v, u = lists_of(rng, dtype, dtype, *[torch.float32] * 2, dtype)
    (v,) = squared([v])
    number = lambda x: torch.full((1,), x)
    moments = {"exp_avgs": m, "exp_avg_sqs": v}
    betas = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3}
    grads = {"params": p, "grads": g}
    flags = {"bias_correction": True, "grad_averaging": True}
    return rng.choice([
        Call(adam_step_capturable, {
            **grads, **moments, "max_exp_avg_sqs": rng.choice(([], [t.float() for t in u])),
            "masters": [], "lr": number(0.1), "inv_scale": number(1.0),
            "step": torch.ones(1, dtype=torch.int32), "found_inf": number(0.0), **betas,
            "weight_decay": 0.1, "bias_correction": True, "decoupled": True}, None,
            ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")),
        Call(lamb_step, {
            **grads, **moments, "copies": [], "lr": 0.1, "device_lr": None, **betas,
            "weight_decay": 0.1, "step": 1, "device_step": None, **flags, "decoupled": True,
            "use_nvlamb": False, "maximize": False, "global_grad_norm": number(3.0),
            "max_grad_norm": 1.0, "device_max_grad_norm": None, "inv_scale": None,
            "found_inf": None}, None, ("params", "exp_avgs", "exp_avg_sqs")),
        Call(lamb_stage1, {
            **grads, **moments, "updates": u, "per_tensor_decay": torch.zeros(len(p)), **betas,
            "step": 1, "global_grad_norm": number(3.0), "max_grad_norm": 1.0}, None,
            ("exp_avgs", "exp_avg_sqs", "updates")),
        Call(lars_step, {
            **grads, "momentum_buffers": m, "copies": [], "grad_norms": None, "param_norms": None,
            "lr": 0.1, "device_lr": None, "trust_coefficient": 0.01, "eps": 1e-3, "momentum": 0.9,
            "weight_decay": 0.1, "nesterov": False, "first_run": False, "gradient_scale": 1.0,
            "noop_flag": flag()}, None, ("params", "momentum_buffers")),
        Call(novograd_step, {
            **grads, "exp_avgs": m, "norms": torch.ones(len(p)), "lr": 0.1, **betas,
            "weight_decay": 0.1, "step": 1, **flags, "reg_inside_moment": False,
            "is_max_norm": False, "first_run": False, "maximize": False}, None,
            ("params", "exp_avgs", "norms")),
    ])  # fmt: skip


MAKERS = [scale, axpby, l2norm, scale_norms, adam, adagrad, sgd, lamb_second, unchecked]


@pytest.mark.parametrize("seed", [0, 1])
def test_random_calls(seed):
    counts = run_random_calls(MAKERS, seed)
    assert counts["done"] > 0.2 * counts.total()
    assert counts["refused"] > 0.1 * counts.total()
