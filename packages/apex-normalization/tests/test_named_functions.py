"""Every name of this wheel that is an autograd function in Apex: called as one, and in others."""

import pytest
import torch

from apex.normalization import fused_layer_norm as names
from apex_testkit.named_functions import check_named


def _randn(*shapes):
    return [torch.randn(shape) for shape in shapes]


_AFFINE = "weight, bias, normalized_shape, eps, memory_efficient"
CASES = {
    "FusedLayerNormAffineFunction": (
        f"input, {_AFFINE}",
        lambda: (*_randn((3, 8), (8,), (8,)), (8,), 1e-5, False),
        (0, 1, 2),
    ),
    "FusedLayerNormAffineMixedDtypesFunction": (
        f"input, {_AFFINE}",
        lambda: (torch.randn(3, 8).bfloat16(), *_randn((8,), (8,)), (8,), 1e-5, False),
        (0, 1, 2),
    ),
    "FusedLayerNormFunction": (
        "input, normalized_shape, eps, memory_efficient",
        lambda: (torch.randn(3, 8), (8,), 1e-5, True),
        (0,),
    ),
    "FusedRMSNormAffineFunction": (
        "input, weight, normalized_shape, eps, memory_efficient",
        lambda: (*_randn((3, 8), (8,)), (8,), 1e-5, True),
        (0, 1),
    ),
    "FusedRMSNormAffineMixedDtypesFunction": (
        "input, weight, normalized_shape, eps, memory_efficient",
        lambda: (torch.randn(3, 8).bfloat16(), torch.randn(8), (8,), 1e-5, False),
        (0, 1),
    ),
    "FusedRMSNormFunction": (
        "input, normalized_shape, eps, memory_efficient",
        lambda: (torch.randn(3, 8), (8,), 1e-5, False),
        (0,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_is_an_autograd_function(name):
    torch.manual_seed(0)
    check_named(getattr(names, name), *CASES[name])
