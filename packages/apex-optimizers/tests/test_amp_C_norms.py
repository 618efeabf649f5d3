"""amp_C's norms beside multi_tensor_l2norm: of unscaled tensors, with a copy, with a set flag."""

import amp_C
import pytest
import torch

from apex.multi_tensor_apply import MultiTensorApply
from apex_testkit import FLOATS

SIZES = [0, 1, 65, 1023, 65_600]


def make(device, dtype):
    return [torch.randn(n, device=device).to(dtype) for n in SIZES]


def flag_of(device, value=0):
    return torch.full((1,), value, dtype=torch.int32, device=device)


@pytest.mark.parametrize("chunk", [2048 * 32, 333])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unscaled_and_scaled_norms(dtype, chunk, device):
    applier, flag, xs = MultiTensorApply(chunk), flag_of(device), make(device, dtype)
    before = [x.clone() for x in xs]
    expected = torch.stack([x.double().norm() for x in xs])
    inv_scale = torch.full((1,), 0.125, device=device)
    norm, norms = applier(amp_C.multi_tensor_unscale_l2norm, flag, [xs], inv_scale, True)
    torch.testing.assert_close(norms.double(), expected * 0.125, rtol=2e-7, atol=0)
    torch.testing.assert_close(norm[0].double(), expected.norm() * 0.125, rtol=2e-7, atol=0)
    assert all(torch.equal(x, b) for x, b in zip(xs, before, strict=True))

    copies = [torch.empty_like(x) for x in xs]
    norm, norms = applier(amp_C.multi_tensor_l2norm_scale, flag, [xs, copies], 0.5, True)
    torch.testing.assert_close(norms.double(), expected, rtol=2e-7, atol=0)
    torch.testing.assert_close(norm[0].double(), expected.norm(), rtol=2e-7, atol=0)
    assert all(torch.equal(c, b * 0.5) for c, b in zip(copies, before, strict=True))
    assert flag.item() == 0


def test_a_set_flag_leaves_no_garbage(device):
    xs = make(device, torch.float32)
    norm, norms = amp_C.multi_tensor_l2norm_mp(65536, flag_of(device, 1), [xs], True)
    torch.testing.assert_close(norms, torch.stack([x.norm() for x in xs]))
    torch.testing.assert_close(norm[0], norms.norm())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_flags(bad, device):
    xs = make(device, torch.float32)
    xs[3][7] = bad
    for name, lists, args in [
        ("multi_tensor_l2norm_mp", [xs], ()),
        ("multi_tensor_l2norm_scale", [xs, xs], (1.0,)),
        ("multi_tensor_unscale_l2norm", [xs], (torch.ones(1, device=device),)),
    ]:
        flag = flag_of(device)
        getattr(amp_C, name)(65536, flag, lists, *args)
        assert flag.item() == 1


def test_empty_lists(device):
    one = torch.ones(1, device=device)
    for name, lists, args in [
        ("multi_tensor_l2norm_mp", [[]], ()),
        ("multi_tensor_l2norm_scale", [[], []], (1.0,)),
        ("multi_tensor_unscale_l2norm", [[]], (one,)),
    ]:
        norm, norms = getattr(amp_C, name)(65536, flag_of(device), lists, *args)
        assert norm.tolist() == [0]
        assert norms.shape == (0,)
    with pytest.raises(RuntimeError, match=r"tensor_lists\.size\(\) != depth"):
        amp_C.multi_tensor_l2norm_scale(65536, flag_of(device), [[one]], 1.0)


def test_a_flag_that_is_no_number_changes_nothing(device):
    xs = make(device, torch.float32)
    one, flags = torch.ones(1, device=device), [flag_of(device).expand(2), flag_of(device)[:0]]
    for name, lists, args in [
        ("multi_tensor_l2norm", [xs], ()),
        ("multi_tensor_l2norm_scale", [xs, [torch.zeros_like(x) for x in xs]], (2.0,)),
        ("multi_tensor_unscale_l2norm", [xs], (one,)),
    ]:
        for flag in (torch.zeros_like(one, dtype=torch.int64), *flags):
            with pytest.raises(RuntimeError, match="flag must be one int32 number on the device"):
                getattr(amp_C, name)(65536, flag, lists, *args)
        assert all(t.count_nonzero() == 0 for outputs in lists[1:] for t in outputs)
    flag, xs[3][7] = flag_of(device), float("inf")
    with pytest.raises(RuntimeError):
        amp_C.multi_tensor_unscale_l2norm(65536, flag, [xs], torch.ones(2, device=device))
    assert flag.item() == 0


@pytest.mark.parametrize(
    ("dtype", "value", "is_flagged"),
    [(torch.float32, 3e38, False), (torch.float64, 1e150, False), (torch.float64, 1e200, True)],
    ids=str,
)
def test_finite_elements_whose_squares_overflow(dtype, value, is_flagged, device):
    xs = [torch.full((4,), value, dtype=dtype, device=device)]
    for name, lists, args in [
        ("multi_tensor_l2norm", [xs], ()),
        ("multi_tensor_l2norm_scale", [xs, [torch.empty_like(xs[0])]], (1.0,)),
    ]:
        flag = flag_of(device)
        getattr(amp_C, name)(65536, flag, lists, *args)
        assert flag.item() == is_flagged
