"""my_op against float64 PyTorch, over dtypes, shapes and layouts."""

import pytest
import torch
from torch import func

from apex.my_package.my_op import my_op, my_op_kernel
from apex_testkit import (
    FLOATS,
    LAYOUTS,
    SHAPES,
    assert_as_accurate_as,
    assert_compiles,
    opcheck_samples,
)


def oracle(x):
    pytest.fail("write the oracle: the formula in plain PyTorch, in the dtype of x")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, layout, device):
    x = layout(torch.randn(shape, device=device, dtype=dtype))
    assert_as_accurate_as(oracle, my_op(x), x)


def test_gradient(device):
    """First and second derivatives, also in forward mode and for batches of gradients."""
    x = torch.randn(2, 9, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        my_op, x, check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(
        my_op, x, check_batched_grad=True, check_fwd_over_rev=True, check_rev_over_rev=True
    )
    assert my_op(x.detach()).grad_fn is None


def fused_gradient(x):
    """The gradient that the kernel computes, of the sum of cubes."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(my_op(x).pow(3).sum(), x)[0]


def test_plain_gradient_is_the_kernels(device):
    """create_graph=True takes the plain formula, whose gradient can be differentiated again."""
    x = torch.randn(3, 17, device=device, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad(my_op(x).pow(3).sum(), x, create_graph=True)
    assert plain.requires_grad
    torch.testing.assert_close(plain.detach(), fused_gradient(x))


def transformed(x):
    loss = lambda x: my_op(x).pow(3).sum()
    return func.grad(loss)(x), func.vmap(func.grad(loss))(x), func.vmap(my_op)(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_transforms(compiled, device):
    """torch.func, where a kernel would give derivatives of zero in compiled code."""
    x = torch.randn(3, 17, device=device, dtype=torch.float64)
    gradient, values = fused_gradient(x), my_op(x)
    torch.compiler.reset()
    run = torch.compile(transformed, backend="eager", fullgraph=True) if compiled else transformed
    torch.testing.assert_close(run(x), (gradient, gradient, values))


def test_forward_mode(device):
    x = torch.randn(3, 17, device=device, dtype=torch.float64)
    with torch.no_grad():  # where torch itself would not notice that the kernel has no rule
        values, tangent = func.jvp(my_op, (x,), (x.cos(),))
    torch.testing.assert_close(values, my_op(x))
    torch.testing.assert_close(tangent, func.jvp(my_op, (x,), (x.cos(),))[1])
    assert tangent.abs().max() > 0


def test_is_a_good_citizen_of_torch(device):
    opcheck_samples(
        my_op_kernel, [(torch.randn(shape, device=device),) for shape in SHAPES.values()]
    )


def test_compiles(device):
    assert_compiles(my_op, torch.randn(5, 33, device=device, requires_grad=True))


@pytest.mark.parametrize(
    ("x", "error"), [(torch.ones(2, dtype=torch.int32), TypeError), (torch.ones(()), ValueError)]
)
def test_bad_input(x, error):
    with pytest.raises(error, match="my_op: x must"):
        my_op(x)
