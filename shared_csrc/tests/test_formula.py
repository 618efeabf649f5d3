"""A Formula of operators without kernels: two outputs, a statistic, a shared tensor, an option."""

import sys
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))
sys.path.insert(0, str(SHARED / "tests"))

from formula_case import CASE, backward, formula, forward, reference  # noqa: E402

from apex_testkit.formulas import CHECKS, check_sharded  # noqa: E402
from shared_csrc.native.formula import Formula  # noqa: E402


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
