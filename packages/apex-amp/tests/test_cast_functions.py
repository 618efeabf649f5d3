"""Casts beyond a table of dtypes: in place, in every mode, and where a script changes the lists."""

import itertools
import math
import operator

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
    x *= 2
    assert x is alias
    assert x.dtype is half
    x += torch.ones((), device=device)
    assert (x.dtype, alias.dtype) == (single, half)
    alias += torch.ones((), device=device, dtype=torch.float64)  # as a number of Python's
    assert alias.dtype is half


# Of a tensor and one without dimensions, which torch alone takes for a number.
TWO = {
    "add": lambda a, b: torch.add(a, b),  # looked up late, as it is replaced
    "mul": lambda a, b: torch.mul(a, b),
    "div": lambda a, b: torch.div(a, b),
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    ".add": lambda a, b: a.add(b),
    ".mul": lambda a, b: a.mul(b),
    ".div": lambda a, b: a.div(b),
    "keywords": lambda a, b: torch.add(input=a, other=b, alpha=2),
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@pytest.mark.parametrize("source", LEVELS.values(), ids=LEVELS.keys())
@pytest.mark.parametrize("function", TWO.values(), ids=TWO.keys())
def test_scalars_in_float32_are_not_numbers(function, source, device):
    """A sum, a norm, a learned temperature: values that 16 bits may not hold."""
    amp.init(patch_type=source)
    x = sample(device, source).requires_grad_()
    scalar = torch.tensor(1e-5, device=device, requires_grad=True)
    for a, b in ((x, scalar), (scalar, x)):
        result = function(a, b)
        assert result.dtype is single
        assert torch.equal(result, function(a.float(), b.float()))
        result.sum().backward()
        assert (x.grad.dtype, scalar.grad.dtype) == (source, single)
    for number in (2.5, 3, torch.tensor(3, device=device), scalar.to(source), scalar.double()):
        assert function(x, number).dtype is source
    with amp.disable_casts():
        assert function(x, scalar).dtype is source


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_with_scalars_in_float32(name, device):
    amp.init()
    x, scalar = torch.ones(4, device=device).half(), torch.tensor(1.0001, device=device)
    for function in (getattr(torch, name), getattr(torch.Tensor, name), getattr(operator, name)):
        assert torch.equal(function(x, scalar), function(x.float(), scalar))
        assert torch.equal(function(scalar, x), function(scalar, x.float()))


def test_scripts_and_compiled_code_with_scalars(device):
    amp.init()
    x, scalar = torch.ones(4, device=device).half(), torch.tensor(1e5, device=device)

    def function(a, b):
        return torch.mul(a, b), b - a, a.div(b)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for result in (*compiled(x, scalar), *function(x, scalar)):
        assert result.dtype is single
    scripted = torch.jit.script(script_of_two)
    assert torch.equal(scripted(x.float(), scalar), script_of_two(x.float(), scalar))


def script_of_two(a, b):
    return torch.add(a, b) * torch.mul(a, b)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["addmm_", "addmv_", "addbmm_", "baddbmm_"])
def test_products_in_place_take_the_dtype_of_the_first(name, level, device):
    amp.init(patch_type=LEVELS[level])
    shapes = {"addmm_": ((4, 4),) * 3, "addmv_": ((4,), (4, 4), (4,))}
    shapes = shapes.get(name, ((4, 4) if name == "addbmm_" else (2, 4, 4), (2, 4, 4), (2, 4, 4)))
    for dtypes in itertools.product((LEVELS[level], single), repeat=3):
        operands = [
            torch.linspace(0.1, 0.9, math.prod(s), device=device).view(s).to(d)
            for s, d in zip(shapes, dtypes, strict=True)
        ]
        expected = getattr(operands[0].float(), name)(*(t.float() for t in operands[1:]))
        result = getattr(operands[0], name)(*operands[1:])
        assert result is operands[0]
        assert result.dtype is dtypes[0]
        torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=0)


AS_GIVEN = {
    "max_pool3d": lambda x: F.max_pool3d(x, 2),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 2),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, 2),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "max_unpool3d": lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2),
    **{
        f"{mode} {dims}d": lambda x, mode=mode, dims=dims: F.pad(
            x[0] if dims == 1 else x[None] if dims == 3 else x, (1, 1) * dims, mode=mode
        )
        for mode in ("reflect", "replicate")
        for dims in (1, 2, 3)
    },
}


@pytest.mark.parametrize("source", [half, bfloat16, single], ids=str)
@pytest.mark.parametrize("function", AS_GIVEN.values(), ids=AS_GIVEN.keys())
def test_functions_in_no_list_keep_the_dtype(function, source, device):
    """As on CUDA; autocast's own list for the CPU has them in float32."""
    amp.init()
    x = torch.rand(2, 4, 4, 4, device=device).to(source).requires_grad_()
    y = function(x)
    assert y.dtype is source
    y.float().sum().backward()
    assert x.grad.dtype is source


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
