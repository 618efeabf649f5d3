"""Casts to the dtype of autocast."""

import pytest
import torch

from apex import amp
from apex._autocast_utils import (
    _cast_if_autocast_enabled,
    _get_autocast_dtypes,
    _get_current_dtype,
)

half, bfloat16, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("dtype", [half, bfloat16], ids=str)
def test_casts(dtype, device):
    x = {d: torch.ones(2, device=device, dtype=d) for d in (half, single, double, torch.int32)}
    args = (x[single], [x[half], {"a": x[single]}], x[double], x[torch.int32], None, "text")
    unchanged = _cast_if_autocast_enabled(*args)
    assert isinstance(unchanged, tuple)
    assert unchanged[0] is x[single]
    with torch.autocast(device.type, dtype=dtype):
        first, (second, nested), third, fourth, *rest = _cast_if_autocast_enabled(*args)
        assert _get_current_dtype() is dtype
        assert _get_current_dtype(double) is dtype
        assert _cast_if_autocast_enabled(x[single])[0].dtype is dtype
    assert [t.dtype for t in (first, second, nested["a"])] == [dtype] * 3
    assert [third.dtype, fourth.dtype, *rest] == [double, torch.int32, None, "text"]
    amp.init(patch_type=dtype)
    assert _cast_if_autocast_enabled(x[single])[0].dtype is dtype
    with amp.disable_casts():
        assert _cast_if_autocast_enabled(x[single])[0].dtype is single


def test_dtypes():
    assert _get_current_dtype() is single
    assert _get_current_dtype(half) is half
    assert _get_autocast_dtypes()[0] is half
    assert set(_get_autocast_dtypes()) <= {half, bfloat16}


@pytest.mark.parametrize("dtype", [half, single], ids=str)
def test_the_meta_device_has_no_autocast(dtype):
    x = torch.empty(2, dtype=dtype, device="meta")
    assert _cast_if_autocast_enabled(x)[0] is x
    with torch.autocast("cpu", dtype=bfloat16):
        assert _cast_if_autocast_enabled(x)[0] is x
