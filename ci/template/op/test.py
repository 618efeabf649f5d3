"""my_op against float64 PyTorch, and what torch asks of it."""

import pytest
import torch

from apex.my_package.my_op import decompositions, my_op, my_op_backward, my_op_forward
from apex_testkit import FLOATS, LAYOUTS, SHAPES, assert_as_accurate_as, opcheck_samples
from apex_testkit.formulas import CHECKS, Case, check_sharded


def oracle(x):
    pytest.fail("write the oracle: the formula in plain PyTorch, in the dtype of x")


def arguments(dtype, device, columns=9):
    return (torch.randn(4, columns, device=device, dtype=dtype),)


CASE = Case(
    my_op,
    arguments,
    oracle,
    grads=(0,),
    rows=(0,),
    operators=(my_op_forward, my_op_backward),
    decompositions=decompositions,
    wide=arguments,
)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, layout, device):
    x = layout(torch.randn(shape, device=device, dtype=dtype)).requires_grad_()
    dy = layout(torch.randn(shape, device=device, dtype=dtype))
    y = my_op(x)

    def reference(x, dy):
        x = x.detach().requires_grad_()
        y = oracle(x)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    assert_as_accurate_as(
        reference, (y.detach(), *torch.autograd.grad(y, x, dy)), x.detach(), dy, ulps=2
    )


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASE, device)


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_is_a_good_citizen_of_torch(device):
    samples = [(torch.randn(shape, device=device),) for shape in SHAPES.values()]
    opcheck_samples(my_op_forward, samples)
    opcheck_samples(my_op_backward, [(x, x) for (x,) in samples])


@pytest.mark.parametrize(
    ("x", "error"), [(torch.ones(2, dtype=torch.int32), TypeError), (torch.ones(()), ValueError)]
)
def test_bad_input(x, error):
    with pytest.raises(error, match="my_op: x must"):
        my_op(x)
