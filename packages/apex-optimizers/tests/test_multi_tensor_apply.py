"""What scale, axpby and l2norm share: layouts, long lists, bad input; and the applier."""

import importlib
import subprocess
import sys

import pytest
import torch

from apex.multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_applier_l2norm,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
)
from apex_testkit import assert_as_accurate_as, opcheck_samples
from apex_testkit.grids import LAYOUTS, channels_last


def make(sizes, device, dtype=torch.float32):
    return [torch.randn(n, device=device).to(dtype) for n in sizes]


def zero_flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def norm_of_all(*xs):
    return torch.cat([x.flatten() for x in xs]).square().sum().sqrt().reshape(1)


def run_all(xs, ys):
    flag = zero_flag(xs[0].device)
    scaled, summed = [torch.empty_like(x) for x in xs], [torch.empty_like(x) for x in xs]
    multi_tensor_scale(xs, scaled, flag, 3.0)
    multi_tensor_axpby(xs, ys, summed, flag, 2.0, 3.0)
    return scaled, summed, multi_tensor_l2norm(xs, flag, True)[1]


def check_all(xs, ys):
    scaled, summed, norms = run_all(xs, ys)
    for x, y, by_3, total, norm in zip(xs, ys, scaled, summed, norms, strict=True):
        assert torch.equal(by_3, x * 3)
        assert_as_accurate_as(lambda x, y: 2 * x + 3 * y, total, x, y)
        assert_as_accurate_as(norm_of_all, norm.reshape(1), x)


def test_dense_memory_in_any_order(device):
    """Tensors of one index share a layout; those of other indices may have another one."""
    shapes = [
        channels_last(torch.randn(2, 5, 3, 4)),
        channels_last(torch.randn(2, 3, 2, 3, 4)),
        torch.randn(3, 5).t(),
        torch.randn(4, 3, 2).permute(2, 0, 1),
        torch.randn(1, 7, 1).transpose(0, 2),
        torch.randn(130),
    ]
    xs = [x.to(device) for x in shapes]
    ys = [torch.randn_like(x) for x in xs]
    check_all(xs, ys)


@pytest.mark.parametrize("layout", ["misaligned", "transposed"])
def test_alignment_and_transposition(layout, device):
    xs = [LAYOUTS[layout](torch.randn(33, 65, device=device)) for _ in range(2)]
    ys = [LAYOUTS[layout](torch.randn(33, 65, device=device)) for _ in range(2)]
    check_all(xs, ys)


@pytest.mark.parametrize("layout", ["every_second", "row_slice"])
def test_gaps_are_refused(layout, device):
    x = LAYOUTS[layout](torch.randn(4, 6, device=device))
    y, flag = torch.zeros(4, 6, device=device), zero_flag(device)
    ok = torch.ones(3, device=device)
    with pytest.raises(
        RuntimeError, match=r"multi_tensor_scale: a tensor was not contiguous.*\[1\]"
    ):
        multi_tensor_scale([ok, x], [ok, y], flag, 2.0)
    with pytest.raises(RuntimeError, match="multi_tensor_axpby: a tensor was not contiguous"):
        multi_tensor_axpby([ok, y], [ok, y], [ok, x], flag, 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"not contiguous.*inputs\[1\] is \[4, 6\] float32"):
        multi_tensor_l2norm([ok, x])
    assert ok.eq(1).all()
    assert not y.any()


def test_layouts_that_differ_are_refused(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    y = torch.zeros_like(channels_last(x))
    with pytest.raises(RuntimeError, match="in the memory format of its peers"):
        multi_tensor_scale([x], [y], zero_flag(device), 2.0)
    assert not y.any()


def test_ten_thousand_tiny_tensors(device):
    check = slice(None, None, 999)
    xs, ys = make([100] * 10_000, device), make([100] * 10_000, device)
    scaled, summed, norms = run_all(xs, ys)
    for x, y, by_3, total in zip(xs[check], ys[check], scaled[check], summed[check], strict=True):
        assert torch.equal(by_3, x * 3)
        assert_as_accurate_as(lambda x, y: 2 * x + 3 * y, total, x, y)
    reference = torch.stack([x.double().norm() for x in xs])
    torch.testing.assert_close(norms.double(), reference, rtol=2e-7, atol=0)


def test_bad_lists_are_refused(device):
    x, flag = [torch.ones(3, device=device), torch.ones(4, device=device)], zero_flag(device)
    y = [torch.zeros_like(t) for t in x]
    with pytest.raises(RuntimeError, match="outputs has 1 tensors, but inputs has 2"):
        multi_tensor_scale(x, y[:1], flag, 1.0)
    with pytest.raises(
        RuntimeError, match=r"size mismatch.*inputs\[1\] is \[4\].*outputs\[1\] is \[3\]"
    ):
        multi_tensor_scale(x, [y[0], y[0]], flag, 1.0)
    with pytest.raises(
        RuntimeError, match=r"one dtype. outputs\[0\] is \[3\] float32.*\[4\] float16"
    ):
        multi_tensor_scale(x, [y[0], y[1].half()], flag, 1.0)
    with pytest.raises(
        RuntimeError, match="expected float64, float32, float16 or bfloat16, got int"
    ):
        multi_tensor_l2norm([torch.ones(3, dtype=torch.int32, device=device)])
    with pytest.raises(RuntimeError, match="float64 lists combine with float64 lists only"):
        multi_tensor_axpby([t.double() for t in x], y, y, flag, 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"arg_to_check must be 0 \(xs\), 1 \(ys\) or -1"):
        multi_tensor_axpby(x, y, y, flag, 1.0, 1.0, 2)
    for bad_flag in (flag.float(), torch.zeros(2, dtype=torch.int32, device=device)):
        with pytest.raises(RuntimeError, match="flag must be one int32 number on the device"):
            multi_tensor_scale(x, y, bad_flag, 1.0)
    assert not any(t.any() for t in y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops_pass_opcheck(dtype, device):
    xs, ys = make([5, 130], device, dtype), make([5, 130], device, dtype)
    outs = [torch.empty_like(x) for x in xs]
    opcheck_samples(multi_tensor_scale, [(xs, outs, zero_flag(device), 0.5)])
    opcheck_samples(multi_tensor_axpby, [(xs, ys, outs, zero_flag(device), 0.5, 2.0, 0)])
    opcheck_samples(multi_tensor_l2norm, [(xs,), (xs, zero_flag(device), True), (xs, None, False)])


def test_ops_compile_into_one_graph(device):
    def clip(xs, flag):
        norm, _ = multi_tensor_l2norm(xs, flag)
        outs = [torch.empty_like(x) for x in xs]
        multi_tensor_scale(xs, outs, flag, 0.5)
        multi_tensor_axpby(xs, outs, outs, flag, 1.0, 2.0)
        return [norm * 2, flag + 0, *outs]

    xs = make([5, 130], device)
    expected = clip(xs, zero_flag(device))
    actual = torch.compile(clip, fullgraph=True)(xs, zero_flag(device))
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def test_submodule_has_apexs_name():
    """Scripts import the class from there, and pickles name it."""
    module = importlib.import_module("apex.multi_tensor_apply.multi_tensor_apply")
    assert module.MultiTensorApply is MultiTensorApply
    assert MultiTensorApply.__module__ == module.__name__


def test_applier_passes_its_chunk_size_on():
    seen = []
    result = MultiTensorApply(333)(lambda *args: seen.append(args) or "result", "flag", [[]], 1, 2)
    assert result == "result"
    assert seen == [(333, "flag", [[]], 1, 2)]
    assert multi_tensor_applier.chunk_size == multi_tensor_applier_l2norm.chunk_size == 2048 * 32


def test_available_is_not_state_of_the_class(monkeypatch):
    applier = MultiTensorApply(1)
    assert MultiTensorApply.available is True
    assert applier.available is True
    assert applier.import_err is None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "amp_C", None)  # as if it could not be imported
        broken = MultiTensorApply(7)
        assert broken.chunk_size == 7
        assert not broken.available
        assert not MultiTensorApply.available
        assert isinstance(broken.import_err, ImportError)
        with pytest.raises(RuntimeError, match="amp_C is not available"):
            broken(print, None, [])
    assert applier.available
    assert broken.available


@pytest.mark.slow
@pytest.mark.parametrize("first", ["apex.multi_tensor_apply", "apex.optimizers", "amp_C"])
def test_modules_may_be_imported_in_any_order(first):
    """Operators and their modules have the same names: LAMB once called the module."""
    code = (
        f"import {first}\n"
        "import torch, amp_C, apex.multi_tensor_apply as applied\n"
        "from apex.optimizers import FusedLAMB\n"
        "assert not [name for name in applied.__all__ if not callable(getattr(applied, name))]\n"
        "param = torch.nn.Parameter(torch.ones(3))\n"
        "param.grad = torch.ones(3)\n"
        "FusedLAMB([param]).step()\n"
        "assert param.ne(1).all()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
