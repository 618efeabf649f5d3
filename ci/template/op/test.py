"""my_op against float64 PyTorch, over dtypes, shapes and layouts."""

import pytest
import torch

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
    x = torch.randn(3, 17, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(my_op, x)


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
