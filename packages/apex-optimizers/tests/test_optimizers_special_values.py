"""Infinities, nans and numbers out of range in optimizers' steps, against formulas and torch.optim.

APEX_SPECIAL_CASES is the number of random calls per operator, 100 by default; 10 on a GPU.
"""

import os
import random

import pytest
import torch

from apex.optimizers.fused_adagrad.ops import adagrad_step
from apex.optimizers.fused_adam.ops import adam_step, adam_step_capturable
from apex.optimizers.fused_adam_compact import adam_step_compact
from apex.optimizers.fused_lamb.ops import lamb_stage1, lamb_stage2, lamb_step
from apex.optimizers.fused_lars.ops import lars_step
from apex.optimizers.fused_novograd.ops import novograd_step
from apex.optimizers.fused_sgd.ops import sgd_step
from apex_testkit.devices import runs_gpu_kernels

INF, NAN = float("inf"), float("nan")
SPECIAL = [INF, -INF, NAN, 0.0, -0.0, 1e-45, -1e-40, 1e-30, 1e20, -1e20, 3e38, -3e38]


def _decayed(total, weight_decay, p):
    """As torch.optim: a decay of 0 is left out, also of an infinite parameter."""
    return total + weight_decay * p if weight_decay else total


def _corrections(h):
    if not h["bias_correction"]:
        return 1.0, 1.0
    return 1 - h["beta1"] ** h["step"], 1 - h["beta2"] ** h["step"]


def _direction(g, m, v, h, alpha1):
    c1, c2 = _corrections(h)
    m = h["beta1"] * m + alpha1 * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    return (m / c1) / ((v / c2).sqrt() + h["eps"]), m, v


def _ratio(param_norm, other):
    """1 where a norm is 0 or the parameter's infinite, which has no learning rate."""
    return param_norm / other if 0 not in (param_norm, other) and param_norm != INF else 1.0


def adam(h, p, g, m, v):
    g = -g if h["maximize"] else g
    if not h["decoupled"]:
        g = _decayed(g, h["weight_decay"], p)
    update, m, v = _direction(g, m, v, h, 1 - h["beta1"])
    if h["decoupled"]:
        update = _decayed(update, h["weight_decay"], p)
    return p - h["lr"] * update, m, v


def lamb(h, p, g, m, v):
    norm, limit = h["norm"], h["max_grad_norm"]
    if 0 < limit < INF and not norm <= limit:
        g = g * (limit / norm)
    g = -g if h["maximize"] else g
    if not h["decoupled"]:
        g = _decayed(g, h["weight_decay"], p)
    alpha1 = 1 - h["beta1"] if h["grad_averaging"] else 1
    update, m, v = _direction(g, m, v, h, alpha1)
    if h["decoupled"]:
        update = _decayed(update, h["weight_decay"], p)
    adapts = h["use_nvlamb"] or h["weight_decay"] != 0
    # The norms of a float32 tensor fit float64.
    ratio = _ratio(*(t.double().norm().item() for t in (p, update))) if adapts else 1.0
    return p - h["lr"] * ratio * update, m, v


def adagrad(h, p, g, total):
    g = -g if h["maximize"] else g
    if not h["decoupled"]:
        g = _decayed(g, h["weight_decay"], p)
    total = total + g * g
    update = g / (total.sqrt() + h["eps"])
    if h["decoupled"]:
        update = _decayed(update, h["weight_decay"], p)
    return p - h["lr"] * update, total


def sgd(h, p, g, buffer):
    g = -g if h["maximize"] else g
    if not h["late"]:
        g = _decayed(g, h["weight_decay"], p)
    if h["momentum"] != 0:
        buffer = g if h["first_run"] else h["momentum"] * buffer + (1 - h["dampening"]) * g
        g = g + h["momentum"] * buffer if h["nesterov"] else buffer
    if h["late"]:
        g = _decayed(g, h["weight_decay"], p)
    return p - h["lr"] * g, buffer


def lars(h, p, g, buffer):
    param_norm, grad_norm = p.norm(), g.norm()
    ratio = 1.0
    if 0 not in (grad_norm, param_norm) and param_norm != INF:
        ratio = h["trust"] * param_norm / (grad_norm + h["weight_decay"] * param_norm + h["eps"])
    g = -g if h["maximize"] else g
    update = h["lr"] * ratio * g
    update = _decayed(update, h["lr"] * ratio * h["weight_decay"], p)
    if h["momentum"] == 0:
        return p - update, buffer
    buffer = -update if h["first_run"] else h["momentum"] * buffer - update
    return p + (h["momentum"] * buffer - update if h["nesterov"] else buffer), buffer


def novograd(h, p, g, m):
    c1, c2 = _corrections(h)
    norm = g.double().abs().max() if h["is_max_norm"] else g.double().norm()
    if not h["first_run"]:
        old, beta2 = h["old_norm"], h["beta2"]
        if h["is_max_norm"]:
            norm = beta2 * old + (1 - beta2) * norm
        else:
            norm = (beta2 * old * old + (1 - beta2) * norm * norm).sqrt()
    denominator = norm.to(p.dtype) / c2**0.5 + h["eps"]
    g = -g if h["maximize"] else g
    alpha1 = 1 - h["beta1"] if h["grad_averaging"] else 1
    if h["inside"]:
        m = h["beta1"] * m + alpha1 * _decayed(g / denominator, h["weight_decay"], p)
        return p - h["lr"] * (m / c1), m
    m = h["beta1"] * m + alpha1 * g
    return p - h["lr"] * _decayed((m / c1) / denominator, h["weight_decay"], p), m


ADAM = ("lr", "beta1", "beta2", "eps", "weight_decay", "step", "bias_correction", "decoupled")


def _number(value, like, dtype=torch.float32):
    return torch.tensor([value], dtype=dtype, device=like[0].device)


def _wide(tensors):
    return torch.float64 if tensors[0].dtype == torch.float64 else torch.float32


def call_adam(h, p, g, m, v):
    adam_step(p, g, m, v, [], [], *(h[name] for name in (*ADAM, "maximize")))


def call_capturable(h, p, g, m, v):
    numbers = (_number(h["lr"], p), _number(h["step"], p, torch.int32), None, None)
    rest = ("beta1", "beta2", "eps", "weight_decay", "bias_correction", "decoupled", "maximize")
    adam_step_capturable(p, g, m, v, [], [], *numbers, *(h[name] for name in rest))


def call_compact(h, p, g, m, v):
    hyper = (h[name] for name in ADAM)
    adam_step_compact(p, g, m, v, [], None, None, *hyper, -1.0 if h["maximize"] else 1.0)


def call_lamb(h, p, g, m, v):
    flags = ("bias_correction", "grad_averaging", "decoupled", "use_nvlamb", "maximize")
    norm = _number(h["norm"], p, torch.float64)
    numbers = (h["lr"], None, *(h[name] for name in ADAM[1:6]), None)
    limit = (norm, h["max_grad_norm"], None, None, None)
    lamb_step(p, g, m, v, [], *numbers, *(h[name] for name in flags), *limit)


def call_stages(h, p, g, m, v):
    """lamb_stage1 and lamb_stage2 with the norms that a caller takes between them."""
    updates = [torch.empty_like(t, dtype=_wide(p)) for t in p]
    decays = torch.full((len(p),), h["weight_decay"], device=p[0].device)
    numbers = (h["beta1"], h["beta2"], h["eps"], h["step"])
    norm = _number(h["norm"], p, torch.float64)
    lamb_stage1(g, p, m, v, updates, decays, *numbers, norm, h["max_grad_norm"])
    norms = (torch.stack([t.double().norm() for t in tensors]) for tensors in (p, updates))
    lamb_stage2(p, updates, *norms, h["lr"], h["weight_decay"], h["use_nvlamb"])


def call_adagrad(h, p, g, total):
    adagrad_step(p, g, total, h["lr"], h["eps"], h["weight_decay"], h["decoupled"], h["maximize"])


def call_sgd(h, p, g, buffer):
    buffers = buffer if h["momentum"] != 0 else []
    numbers = (h["lr"], None, h["momentum"], h["dampening"], h["weight_decay"], h["nesterov"])
    flags = (h["late"], h["first_run"], -1.0 if h["maximize"] else 1.0, None)
    sgd_step(p, g, buffers, [], *numbers, *flags)


def call_lars(h, p, g, buffer):
    buffers = buffer if h["momentum"] != 0 else []
    norms = (torch.stack([t.to(_wide(p)).norm() for t in tensors]) for tensors in (g, p))
    numbers = (h["lr"], None, h["trust"], h["eps"], h["momentum"], h["weight_decay"])
    flags = (h["nesterov"], h["first_run"], -1.0 if h["maximize"] else 1.0, None)
    lars_step(p, g, buffers, [], *norms, *numbers, *flags)


def call_novograd(h, p, g, m):
    norms = torch.full((len(p),), h["old_norm"], dtype=_wide(p), device=p[0].device)
    numbers = (h[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "step"))
    names = ("bias_correction", "grad_averaging", "inside", "is_max_norm", "first_run", "maximize")
    novograd_step(p, g, m, norms, *numbers, *(h[name] for name in names))


FIXED = {"decoupled": True, "maximize": False, "grad_averaging": True, "bias_correction": True}
# The call, its formula, which states it has, what it fixes, and whether it takes float64.
OPERATORS = {
    "adam": (call_adam, adam, "mv", {}, True),
    "adam_capturable": (call_capturable, adam, "mv", {}, True),
    "adam_compact": (call_compact, adam, "mv", {}, False),
    "lamb": (call_lamb, lamb, "mv", {}, True),
    "lamb_stages": (call_stages, lamb, "mv", FIXED, True),
    "adagrad": (call_adagrad, adagrad, "v", {}, True),
    "sgd": (call_sgd, sgd, "b", {}, True),
    "lars": (call_lars, lars, "b", {}, True),
    "novograd": (call_novograd, novograd, "m", {}, True),
}
FLAGS = ["bias_correction", "decoupled", "maximize", "grad_averaging", "use_nvlamb", "inside"]
FLAGS += ["is_max_norm", "nesterov", "late", "first_run"]


def draw_hyper(rng):
    """Every number is 0 at times."""
    numbers = {
        "lr": rng.choice([0.0, 0.125, 1.0]),
        "beta1": rng.choice([0.0, 0.5, 0.9]),
        "beta2": rng.choice([0.0, 0.5, 0.999]),
        "eps": rng.choice([0.0, 1e-8, 1e-3]),
        "weight_decay": rng.choice([0.0, 0.0, 0.125]),
        "step": rng.choice([1, 2, 1000]),
        "momentum": rng.choice([0.0, 0.5, 0.9]),
        "dampening": rng.choice([0.0, 0.5, 1.0]),
        "trust": rng.choice([0.0, 0.25]),
        "norm": rng.choice([0.0, 0.5, 2.0, 1e30, INF, NAN]),
        "max_grad_norm": rng.choice([0.0, 1.0, INF]),
        "old_norm": rng.choice([0.0, 0.5, 1e20, INF, NAN]),
    }
    return numbers | {name: rng.random() < 0.5 for name in FLAGS}


def draw_tensor(rng, numel, amount, is_positive):
    """Values of magnitude 1/8 to 8, a share of them special."""
    values = [rng.choice([-1, 1]) * 2 ** rng.uniform(-3, 3) for _ in range(numel)]
    values = [rng.choice(SPECIAL) if rng.random() < amount else value for value in values]
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor.abs() if is_positive else tensor


def expected(formula, h, columns, compute):
    """Results of the formula for every tensor, computed in one dtype, on the CPU."""
    rows = [formula(h, *(t.cpu().to(compute) for t in row)) for row in zip(*columns, strict=True)]
    return [list(column) for column in zip(*rows, strict=True)]


def is_equal(a, b):
    return ((a == b) | (a.isnan() & b.isnan())).all()


def agrees(actual, target, start):
    """Elementwise; rounded once to actual's dtype, in which large numbers are infinite."""
    rtol = 8 * torch.finfo(actual.dtype).eps
    rtol = max(rtol, 2e-5) if actual.dtype != torch.float64 else 1e-12
    target = target.to(actual.dtype).double()
    actual, start = actual.double(), start.double().nan_to_num(0, 0, 0)
    allowed = rtol * (start.abs() + target.abs()) + 1e-37
    is_same = (actual == target) | (actual.isnan() & target.isnan())
    return is_same | ((actual - target).abs() <= allowed)


@pytest.mark.parametrize("name", OPERATORS)
def test_random_special_values_give_what_the_formula_gives(name, device):
    """In float64, or in the dtype that operators compute in, whose range is smaller."""
    call, formula, states, fixed, takes_double = OPERATORS[name]
    dtypes = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * takes_double
    cases = os.environ.get("APEX_SPECIAL_CASES", "10" if runs_gpu_kernels(device) else "100")
    for seed in range(int(cases)):
        rng = random.Random(seed)
        dtype = rng.choice(dtypes)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        h = {**draw_hyper(rng), **fixed}
        columns = []
        for kind in "pg" + states:
            own = dtype if kind in "pg" or name == "sgd" else compute
            amounts = [(n, rng.choice([0.0, 0.2, 1.0])) for n in (1, 37)]
            drawn = [draw_tensor(rng, n, amount, kind == "v") for n, amount in amounts]
            columns.append([t.to(own).to(device) for t in drawn])
        before = [[t.clone() for t in column] for column in columns]
        truth = expected(formula, h, before, torch.float64)
        plain = expected(formula, h, before, compute)
        call(h, *columns)
        assert all(map(is_equal, columns[1], before[1])), "gradients are not to be changed"
        written = [columns[0], *columns[2:]]
        starts = [before[0], *before[2:]]
        for own in zip(written, truth, plain, starts, strict=True):
            for actual, exact, rounded, start in zip(*own, strict=True):
                actual, start = actual.cpu(), start.cpu()
                good = agrees(actual, exact, start) | agrees(actual, rounded, start)
                assert good.all(), (
                    f"seed {seed}: {dtype}, got {actual[~good]} instead of {exact[~good]} from "
                    f"{start[~good]} with {h}"
                )
