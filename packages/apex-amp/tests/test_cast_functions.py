"""Casts beyond a table of dtypes: in place, in every mode, and where a script changes the lists."""

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from apex.amp.lists import functional_overrides, tensor_overrides

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32
LEVELS = {"O1": half, "O4": bfloat16}


def sample(device, dtype):
    return torch.linspace(0.1, 0.9, 16, device=device).view(4, 4).to(dtype)


IN_PLACE = {
    **dict.fromkeys(("acos_", "asin_", "cosh_", "erfinv_", "exp_", "expm1_", "log_"), ()),
    **dict.fromkeys(("log10_", "log2_", "reciprocal_", "rsqrt_", "sinh_", "tan_"), ()),
    "pow_": (2,),
    "cumprod_": (0,),
    "cumsum_": (0,),
    "renorm_": (2, 0, 1.0),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_functions_refuse_16_bits(name, level, device):
    amp.init(patch_type=LEVELS[level])
    function = getattr(torch.Tensor, name)
    for source in (half, bfloat16):
        x = sample(device, source)
        with pytest.raises(NotImplementedError, match=f"{name} writes.*without the underscore"):
            function(x, *IN_PLACE[name])
        assert torch.equal(x, sample(device, source))
        with amp.disable_casts():
            assert function(x, *IN_PLACE[name]) is x
    x = sample(device, single)
    assert function(x, *IN_PLACE[name]) is x
    out_of_place = getattr(torch.Tensor, name[:-1])
    assert torch.equal(x, out_of_place(sample(device, single), *IN_PLACE[name]))


def test_in_place_methods_keep_the_dtype_of_the_first(device):
    amp.init()
    for name in ("add_", "sub_", "mul_", "div_"):
        for first, second in ((half, single), (single, half), (half, half)):
            x = sample(device, first)
            assert getattr(x, name)(sample(device, second)) is x
            assert x.dtype is first
    x = sample(device, half)
    alias = x
    x += sample(device, half)
    assert x is alias
    x += torch.ones((), device=device)  # a number
    x *= 2
    assert x is alias
    assert x.dtype is half


@pytest.mark.parametrize(
    "mode", ["nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area"]
)
def test_interpolation_is_single_in_every_mode(mode, device):
    dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
    x = torch.rand(1, 2, *[4] * dims, device=device).half()
    amp.init()
    assert F.interpolate(x, scale_factor=2.0, mode=mode).dtype is single
    with amp.disable_casts():
        assert F.interpolate(x, scale_factor=2.0, mode=mode).dtype is half


def test_widest_of_three(device):
    amp.init()
    x = {dtype: sample(device, dtype) for dtype in (half, bfloat16, single, torch.float64)}
    assert torch.cat([x[half], x[bfloat16]]).dtype is single
    assert torch.stack([x[half], x[bfloat16], x[torch.float64]]).dtype is torch.float64
    assert torch.addcmul(x[bfloat16], x[half], x[single]).dtype is single
    assert torch.atan2(x[half], x[torch.float64]).dtype is torch.float64
    assert (x[half] * x[bfloat16]).dtype is single


def dtype_of_softmax():
    return F.softmax(torch.ones(4, dtype=half), -1).dtype


def test_what_a_script_changes_in_the_lists_counts(monkeypatch):
    lists = functional_overrides
    monkeypatch.setattr(lists, "FP32_FUNCS", [n for n in lists.FP32_FUNCS if n != "softmax"])
    amp.init()
    assert dtype_of_softmax() is half
    monkeypatch.setattr(lists, "FP16_FUNCS", [*lists.FP16_FUNCS, "softmax", "relu"])
    amp.init()
    assert F.softmax(torch.ones(4), -1).dtype is half
    assert F.relu(torch.ones(4)).dtype is half
    monkeypatch.setattr(lists, "BANNED_FUNCS", [])
    handle = amp.init()
    p = torch.rand(4).half()
    assert F.binary_cross_entropy(p, p).dtype is half
    monkeypatch.undo()
    amp.init()
    assert dtype_of_softmax() is single
    handle._deactivate()
    monkeypatch.setattr(lists, "FP16_FUNCS", [*lists.FP16_FUNCS, "no_such_function"])
    with pytest.raises(ValueError, match=r"'no_such_function', which torch\.nn\.functional"):
        amp.init()


def test_a_script_takes_an_operator_out_of_the_lists(monkeypatch):
    names = [n for n in tensor_overrides.FP32_FUNCS if n != "cpu"]
    monkeypatch.setattr(tensor_overrides, "FP32_FUNCS", names)
    amp.init()
    assert torch.ones(2, dtype=half).cpu().dtype is half


def test_replaced_functions_come_back():
    before = [(m, n, getattr(m, n), n in vars(m)) for m, n in REPLACED]
    handle = amp.init()
    assert all(getattr(m, n) is not f for m, n, f, _ in before)
    handle._deactivate()
    for module, name, function, is_own in before:
        assert getattr(module, name) is function
        assert (name in vars(module)) == is_own
    assert "cpu" not in vars(torch.Tensor)


REPLACED = [
    *((F, "interpolate"), (F, "multilabel_soft_margin_loss")),
    *((torch.Tensor, n) for n in ("cpu", "__ipow__", "__iadd__", "__imul__", "__isub__")),
]


def test_replaced_functions_compile():
    def function(x, y):
        x = F.interpolate(x[None], scale_factor=2.0)[0].half()
        x += y
        z = F.gelu(x.half())
        z **= 2
        return x, z

    amp.init()
    x, y = torch.randn(2, 4).half(), torch.randn(2, 8)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(x, y), function(x, y), strict=True):
        assert torch.equal(actual, expected)
        assert expected.dtype is single


@pytest.mark.parametrize("dtype", LEVELS.values(), ids=str)
def test_the_meta_device_has_no_casts(dtype):
    amp.init(patch_type=dtype)
    x = torch.empty(1, 1, 4, 4, dtype=dtype, device="meta")
    assert F.interpolate(x, scale_factor=2.0).shape == (1, 1, 8, 8)
    x += torch.ones(4, device="meta")
    x **= 2
    assert x.is_meta
