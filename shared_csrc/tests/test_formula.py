"""A Formula of operators without kernels: two outputs, a statistic, a shared tensor, an option."""

import sys
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))

from apex_testkit.formulas import CHECKS, Case, check_sharded  # noqa: E402
from shared_csrc.native.formula import Formula  # noqa: E402

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


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_what_torch_asks(check):
    check(CASE, "cpu")


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_results():
    """The user gets the outputs, and no statistic; without gradients no graph."""
    x, weight, scale = CASE.arguments(torch.float32, "cpu")
    outputs = formula(x, weight, scale)
    assert isinstance(outputs, tuple)
    assert all(map(torch.equal, outputs, reference(x, weight, scale)[:2]))
    assert all(output.grad_fn is None for output in outputs)
    y, z = formula(x, weight.requires_grad_(), scale)
    y.sum().backward()  # the other output has no gradient
    assert torch.equal(weight.grad, torch.zeros(3))
    assert z.grad_fn is not None


def mixed_on_ranks(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    x, weight, scale = CASE.arguments(torch.float32, "cpu")
    mesh, other = (init_device_mesh("cpu", (world_size,), mesh_dim_names=(n,)) for n in "ab")
    placed = distribute_tensor(x, mesh, [Replicate()])
    with pytest.raises(TypeError, match="formula: if one operand is a DTensor"):
        formula(placed, weight, scale)
    with pytest.raises(ValueError, match="formula: operands must be on one device mesh"):
        formula(placed, distribute_tensor(weight, other, [Replicate()]), scale)


def test_refused_placements(two_ranks):
    two_ranks(mixed_on_ranks)


def test_unknown_names_are_errors():
    options = {"saves": ("x",), "grads": ("x",), "rows": {"x": 1}}
    for wrong in ({"saves": ("y_",)}, {"grads": ("w",)}, {"rows": {"w": 1}}):
        with pytest.raises(ValueError, match="is not in list"):
            Formula("formula", forward, backward, reference, **(options | wrong))
