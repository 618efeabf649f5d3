"""The operators torch.ops.apex.fused_*: Apex's schemas, results, gradients."""

import pytest
import torch
from torch.autograd import forward_ad

from apex.normalization import fused_layer_norm as module
from apex_testkit import assert_compiles, opcheck_samples

EPS = 1e-5
C = 33
ROWS = "Tensor input, "
END = "int[] normalized_shape, float eps, bool memory_efficient=False"
WEIGHTS = "Tensor weight, Tensor? bias, "
SCHEMAS = {
    "fused_layer_norm_affine_fwd": ROWS + WEIGHTS + END,
    "fused_layer_norm_affine_mixed_dtypes_fwd": ROWS + WEIGHTS + END,
    "fused_rms_norm_affine_fwd": ROWS + "Tensor weight, " + END,
    "fused_rms_norm_affine_mixed_dtypes_fwd": ROWS + "Tensor weight, " + END,
    "fused_layer_norm_fwd": ROWS + END,
    "fused_rms_norm_fwd": ROWS + END,
}
BACKWARDS = {
    "fused_layer_norm_affine_bwd": "grad_output mean invvar input_or_output normalized_shape "
    "weight bias eps memory_efficient",
    "fused_layer_norm_bwd": "grad_output mean invvar input_or_output normalized_shape eps "
    "memory_efficient",
    "fused_rms_norm_affine_bwd": "grad_output invvar input_or_output normalized_shape weight eps "
    "memory_efficient",
    "fused_rms_norm_bwd": "grad_output invvar input_or_output normalized_shape eps "
    "memory_efficient",
}


def test_schemas():
    for name, arguments in SCHEMAS.items():
        overload = getattr(torch.ops.apex, name).default
        assert str(overload._schema).startswith(f"apex::{name}({arguments}) -> (Tensor, Tensor")
        assert getattr(module, name) is overload
    for name, arguments in BACKWARDS.items():
        schema = getattr(torch.ops.apex, name).default._schema
        assert [a.name for a in schema.arguments] == arguments.split()


def forward_arguments(name, device, efficient):
    x = torch.randn(4, C, device=device, requires_grad=True)
    weights = torch.rand(2, C, device=device) + 0.5
    if "mixed" in name:
        x = x.detach().bfloat16().requires_grad_()
    count = 2 if "layer_norm_affine" in name else int("affine" in name)
    return (x, *(w.requires_grad_() for w in weights[:count].unbind())), ([C], EPS, efficient)


@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_forwards(name, efficient, device):
    """The result and the gradients of the function of the same name; statistics per row."""
    tensors, options = forward_arguments(name, device, efficient)
    y, *statistics = getattr(torch.ops.apex, name)(*tensors, *options)
    function = name.removesuffix("_fwd")
    if "mixed" in name:
        function = f"mixed_dtype_{function.removesuffix('_mixed_dtypes')}"
    expected = getattr(module, function)(*tensors, *options)
    torch.testing.assert_close(y, expected)
    assert all(s.shape == (4,) and s.dtype == torch.float32 for s in statistics)
    dy = torch.randn_like(y)
    actual = torch.autograd.grad(y, tensors, dy)
    for a, e in zip(actual, torch.autograd.grad(expected, tensors, dy), strict=True):
        # A GPU sums in another order where memory happens to lie so that packs cannot be read.
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.parametrize("name", [n for n in SCHEMAS if "mixed" in n])
def test_float64_beside_another_dtype(name, dtypes, efficient, device):
    """Statistics in the input's dtype, whatever the kernel's; gradients in their tensors'."""
    tensors, options = forward_arguments(name, device, efficient)
    x, *weights = (t.detach() for t in tensors)
    tensors = [t.requires_grad_() for t in (x.to(dtypes[0]), *(w.to(dtypes[1]) for w in weights))]
    y, *statistics = getattr(torch.ops.apex, name)(*tensors, *options)
    assert [t.dtype for t in (y, *statistics)] == [dtypes[1]] + [dtypes[0]] * len(statistics)
    function = f"mixed_dtype_{name.removesuffix('_mixed_dtypes_fwd')}"
    expected = getattr(module, function)(*tensors, *options)
    dy = torch.randn_like(y)
    actual = torch.autograd.grad(y, tensors, dy)
    for a, e in zip(actual, torch.autograd.grad(expected, tensors, dy), strict=True):
        assert a.dtype == e.dtype
        # Either the statistics or the output, which stands for the input, are rounded to float32.
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_forward_mode_is_refused(grad_enabled):
    norm = lambda x: torch.ops.apex.fused_layer_norm_fwd(x, [C], EPS)[0]
    x = torch.randn(4, C)
    with (
        torch.set_grad_enabled(grad_enabled),
        pytest.raises(NotImplementedError, match=r"apex::fused_layer_norm_fwd: .* forward-mode"),
    ):
        torch.func.jvp(norm, (x,), (x,))


def test_forward_mode_through_the_gradient_is_refused():
    x = torch.randn(4, C)
    _, mean, rstd = torch.ops.apex.fused_layer_norm_fwd(x, [C], EPS)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"apex::fused_layer_norm_bwd: .* forward-mode"),
    ):
        torch.ops.apex.fused_layer_norm_bwd(forward_ad.make_dual(x, x), mean, rstd, x, [C], EPS)


@pytest.mark.parametrize("name", ["fused_layer_norm_affine_fwd", "fused_rms_norm_fwd"])
def test_opcheck(name, device):
    tensors, options = forward_arguments(name, device, False)
    opcheck_samples(getattr(torch.ops.apex, name).default, [(*tensors, *options)])


def test_backward_opcheck(device):
    x, dy = torch.randn(2, 4, C, device=device)
    weight = torch.rand(C, device=device) + 0.5
    y, mean, invvar = torch.ops.apex.fused_layer_norm_affine_fwd(x, weight, None, [C], EPS)
    op = torch.ops.apex.fused_layer_norm_affine_bwd.default
    opcheck_samples(op, [(dy, mean, invvar, x, [C], weight, None, EPS)])
    assert op(dy, None, invvar, y, [C], weight, None, EPS, True)[0].isfinite().all()


def test_second_derivatives_are_refused(device):
    """torch would leave a gradient penalty's term out without an error."""
    x, weight = (torch.randn(s, device=device, requires_grad=True) for s in ((4, C), (C,)))
    for kind, parameters in (("layer", (weight, weight)), ("rms", (weight,))):
        y, *statistics = getattr(torch.ops.apex, f"fused_{kind}_norm_affine_fwd")(
            x, *parameters, [C], EPS
        )
        assert not any(t.requires_grad for t in statistics)
        (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"fused_{kind}_norm_affine_bwd: .* again"):
            dx.square().sum().backward()
    dy = torch.randn_like(x)
    _, invvar = torch.ops.apex.fused_rms_norm_fwd(x, [C], EPS)
    dx = torch.ops.apex.fused_rms_norm_bwd(dy, invvar, x, [C], EPS)
    with pytest.raises(NotImplementedError, match="fused_rms_norm_bwd"):
        dx.sum().backward()


def test_compiles(device):
    tensors, options = forward_arguments("fused_layer_norm_affine_fwd", device, False)
    norm = lambda *t: torch.ops.apex.fused_layer_norm_affine_fwd(*t, *options)[0]
    assert_compiles(norm, *tensors, backend="aot_eager")


def test_refusals(device):
    tensors, options = forward_arguments("fused_rms_norm_affine_fwd", device, True)
    with pytest.raises(ValueError, match=r"weight has shape \[33\]"):
        torch.ops.apex.fused_rms_norm_affine_fwd(tensors[0][:, :5], tensors[1], [5], EPS)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"weight\[0\] is 0 \(33 of 33 are\)"):
            torch.ops.apex.fused_rms_norm_affine_fwd(tensors[0], tensors[1] * 0, *options)


@pytest.mark.parametrize("shape", [[], [0], [-1], [-(2**63)]], ids=str)
@pytest.mark.parametrize("name", [*SCHEMAS, *BACKWARDS])
def test_bad_shapes_are_refused(name, shape, device):
    """On meta tensors too; the error begins with the function's name."""
    given = {
        **dict.fromkeys(("input", "grad_output", "input_or_output"), torch.ones(4, C)),
        **dict.fromkeys(("weight", "bias"), torch.ones(C)),
        **dict.fromkeys(("mean", "invvar"), torch.ones(4)),
        "normalized_shape": shape,
        "eps": EPS,
        "memory_efficient": False,
    }
    operator = getattr(torch.ops.apex, name).default
    names = [argument.name for argument in operator._schema.arguments]
    begin = name.removesuffix("_fwd")
    if name in BACKWARDS:
        begin = f"{'layer' if 'layer' in name else 'rms'}_norm_backward"
    for target in (device, "meta"):
        moved = [v.to(target) if isinstance(v, torch.Tensor) else v for v in map(given.get, names)]
        with pytest.raises(ValueError, match=rf"^{begin}: normalized_shape must name at least one"):
            operator(*moved)
