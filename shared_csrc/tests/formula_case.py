"""A Formula of operators without kernels, for tests: two outputs, a statistic, an option."""

import torch

from apex_testkit.formulas import Case
from shared_csrc.native.formula import Formula

library = torch.library.Library("apex_formula_test", "FRAGMENT")


def define(schema):
    """An operator that the decorated function computes, for real and for fake tensors."""

    def decorate(function):
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"apex_formula_test::{name}", function, lib=library)
        return getattr(torch.ops.apex_formula_test, name).default

    return decorate


def wide(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def reference(x, weight, scale):
    mean = wide(x).mean(-1)
    y = scale * wide(x) * mean[..., None]
    return y.to(x.dtype), (wide(x) * wide(weight)).to(x.dtype), mean


@define("forward(Tensor x, Tensor weight, float scale) -> (Tensor y, Tensor z, Tensor mean)")
def forward(x, weight, scale):
    return reference(x, weight, scale)


@define(
    "backward(Tensor dy, Tensor dz, Tensor x, Tensor weight, Tensor mean, float scale)"
    " -> (Tensor dx, Tensor dweight)"
)
def backward(dy, dz, x, weight, mean, scale):
    dy, dz, values = wide(dy), wide(dz), wide(x)
    through_mean = (dy * values).mean(-1, keepdim=True)
    dx = scale * (dy * mean[..., None] + through_mean) + dz * wide(weight)
    return dx.to(x.dtype), (dz * values).flatten(0, -2).sum(0).to(weight.dtype)


formula = Formula(
    "formula",
    forward,
    backward,
    reference,
    saves=("x", "weight", "mean", "scale"),
    grads=("x", "weight"),
    rows={"x": 1},
    shared=("weight",),
    outputs=2,
)
CASE = Case(
    lambda *arguments: torch.mul(*formula(*arguments)),
    lambda dtype, device: (
        torch.randn(5, 3, dtype=dtype, device=device),
        torch.randn(3, dtype=dtype, device=device),
        0.5,
    ),
    lambda *arguments: torch.mul(*reference(*arguments)[:2]),
    grads=(0, 1),
    rows=(0,),
    operators=(forward, backward),
    decompositions=formula.decompositions,
    ulps=4,  # each output is rounded, and so is their product
)
