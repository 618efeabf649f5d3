"""torch.func, second derivatives, torch.export and ONNX; what is fused stays fused where it can."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.nn import functional as F

from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_add_layer_norm,
    fused_add_rms_norm,
)
from apex.normalization.fused_layer_norm import (
    decompositions,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
    ops,
)

EPS = 1e-6
C = 7  # columns

# Ours and torch's, of (x, weight, bias).
PAIRS = {
    "layer_norm_affine": (
        lambda x, w, b: fused_layer_norm_affine(x, w, b, C),
        lambda x, w, b: F.layer_norm(x, (C,), w, b, EPS),
    ),
    "layer_norm": (
        lambda x, w, b: fused_layer_norm(x, C),
        lambda x, w, b: F.layer_norm(x, (C,), eps=EPS),
    ),
    "layer_norm_mixed": (
        lambda x, w, b: mixed_dtype_fused_layer_norm_affine(x.float(), w, b, C),
        lambda x, w, b: F.layer_norm(x.float().double(), (C,), w, b, EPS),
    ),
    "rms_norm_affine": (
        lambda x, w, b: fused_rms_norm_affine(x, w, C),
        lambda x, w, b: F.rms_norm(x, (C,), w, EPS),
    ),
    "rms_norm": (
        lambda x, w, b: fused_rms_norm(x, C),
        lambda x, w, b: F.rms_norm(x, (C,), eps=EPS),
    ),
    "rms_norm_mixed": (
        lambda x, w, b: mixed_dtype_fused_rms_norm_affine(x.float(), w, C),
        lambda x, w, b: F.rms_norm(x.float().double(), (C,), w, EPS),
    ),
    "add_layer_norm": (
        lambda x, w, b: fused_add_layer_norm(x, x.sin(), w, b),
        lambda x, w, b: F.layer_norm(x + x.sin(), (C,), w, b, EPS),
    ),
    "add_rms_norm": (
        lambda x, w, b: fused_add_rms_norm(x, x.sin(), w, prenorm=True)[0],
        lambda x, w, b: F.rms_norm(x + x.sin(), (C,), w, EPS),
    ),
}
TRANSFORMS = {
    "grad": lambda f, x, w, b: func.grad(lambda *a: f(*a).sin().sum(), argnums=(0, 1))(x, w, b),
    "vjp": lambda f, x, w, b: func.vjp(f, x, w, b)[1](x.cos())[0],
    "jvp": lambda f, x, w, b: func.jvp(f, (x, w, b), (x.cos(), w.cos(), b.cos())),
    "vmap": lambda f, x, w, b: func.vmap(f, (0, None, None))(x, w, b),
    "vmap weights": lambda f, x, w, b: func.vmap(f, (1, 0, 0))(
        x, w.expand(3, C).sin(), b.expand(3, C)
    ),
    "per-sample": lambda f, x, w, b: func.vmap(
        func.grad(lambda w, x: f(x, w, b).sin().sum()), (None, 0)
    )(w, x),
    "hessian": lambda f, x, w, b: func.hessian(lambda x: f(x, w, b).sin().sum())(x[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("name", PAIRS)
def test_transforms(name, transform, device):
    x = torch.randn(2, 3, C, device=device, dtype=torch.float64)
    weight, bias = torch.randn(2, C, device=device, dtype=torch.float64)
    ours, theirs = (transform(f, x, weight, bias) for f in PAIRS[name])
    # The mixed forms' input is rounded to float32, and so is its gradient.
    tolerance = 1e-5 if "mixed" in name else 1e-10
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PAIRS)
def test_forward_mode_without_gradients(name, device):
    """Where the kernels, which have no formula for it, would give tangents of zero in silence."""
    x, weight, bias = torch.randn(3, C, device=device, dtype=torch.float64)
    tolerance = 1e-5 if "mixed" in name else 1e-10
    for mode, transform in (
        (torch.no_grad, TRANSFORMS["jvp"]),
        (torch.no_grad, lambda f, x, w, b: func.jacfwd(f)(x, w, b)),
        (torch.inference_mode, TRANSFORMS["jvp"]),  # in torch 2.10 zeros, of whatever function
    ):
        with mode():
            ours, theirs = (transform(f, x, weight, bias) for f in PAIRS[name])
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("grad_enabled", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_dual_level(name, grad_enabled, device):
    x, weight, bias = torch.randn(3, C, device=device, dtype=torch.float64)
    with torch.set_grad_enabled(grad_enabled), forward_ad.dual_level():
        dual = forward_ad.make_dual(x[None], x[None].cos())
        tangents = [forward_ad.unpack_dual(f(dual, weight, bias)).tangent for f in PAIRS[name]]
    tolerance = 1e-5 if "mixed" in name else 1e-10
    torch.testing.assert_close(*tangents, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PAIRS)
def test_vmap_without_gradients_is_fused(name, device):
    """A batch of rows is more rows for the kernel: the same bits, and no warning of a fallback."""
    x = torch.randn(3, 5, 4, C, device=device)
    weight, bias = torch.randn(2, C, device=device)
    norm = PAIRS[name][0]
    weight = weight.double() if "mixed" in name else weight
    bias = bias.to(weight.dtype)
    with torch.no_grad():
        expected = torch.stack([norm(x[:, i], weight, bias) for i in range(5)], dim=1)
        actual = func.vmap(norm, (1, None, None), out_dims=1)(x, weight, bias)
        assert torch.equal(actual, expected)
        weights = torch.stack([weight, bias])
        each = func.vmap(norm, (None, 0, None))(x, weights, bias)
        for i in range(2):
            assert torch.equal(each[i], norm(x, weights[i], bias))


@pytest.mark.parametrize(
    ("name", "prenorm"),
    [*((name, False) for name in PAIRS), ("add_layer_norm", True), ("add_rms_norm", True)],
)
def test_gradients_that_can_be_differentiated_are_the_same(name, prenorm, device):
    """``create_graph=True`` takes formulas in place of kernels; gradgradcheck sees them alone."""
    inputs = [torch.randn(s, device=device, requires_grad=True) for s in ((3, C), (C,), (C,))]
    norm = PAIRS[name][0]
    if prenorm and "layer" in name:
        norm = lambda x, w, b: sum(fused_add_layer_norm(x, x.sin(), w, b, prenorm=True))
    elif prenorm:
        norm = lambda x, w, b: sum(fused_add_rms_norm(x, x.sin(), w, prenorm=True))
    dy = torch.randn(3, C, device=device)
    options = {"allow_unused": True, "retain_graph": True}
    y = norm(*inputs)
    expected = torch.autograd.grad(y, inputs, dy, **options)
    actual = torch.autograd.grad(y, inputs, dy, create_graph=True, **options)
    assert actual[0].requires_grad
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_batched_gradients(kind, device):
    """``is_grads_batched``, as vectorized Jacobians use it, runs the backward kernel."""
    x, weight = (torch.randn(s, device=device, requires_grad=True) for s in ((3, C), (C,)))
    y = PAIRS[f"{kind}_norm_affine"][0](x, weight, None)
    dys = torch.randn(4, 3, C, device=device)
    batched = torch.autograd.grad(y, (x, weight), dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        expected = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        for a, e in zip(batched, expected, strict=True):
            torch.testing.assert_close(a[i], e)


class Model(torch.nn.Module):
    """All modules and the functional forms behind one another."""

    def __init__(self, **options):
        super().__init__()
        self.norms = torch.nn.ModuleList(
            [
                FusedLayerNorm(C, **options),
                FusedRMSNorm(C, **options),
                FusedLayerNorm(C, elementwise_affine=False, **options),
                FusedRMSNorm(C, elementwise_affine=False, **options),
                MixedFusedLayerNorm(C, **options),
                MixedFusedRMSNorm(C, **options),
            ]
        )

    def forward(self, x):
        for norm in self.norms:
            x = norm(x) + 1
        weight = self.norms[0].weight
        y, total = fused_add_rms_norm(x, x.sin(), weight, prenorm=True)
        return fused_add_layer_norm(y, total, weight, self.norms[0].bias)


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_export(memory_efficient, device):
    """Our operators stay whole, the batch dynamic; decomposed, only those of ATen are left."""
    model = Model(memory_efficient=memory_efficient).to(device)
    x = torch.randn(4, C, device=device)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    nodes = program.graph.nodes
    ours = [n for n in nodes if "apex_normalization" in str(n.target)]
    assert len(ours) == 8
    other = torch.randn(9, C, device=device)
    assert torch.equal(program.module()(other), model(other))
    decomposed = program.run_decompositions(decompositions())
    calls = [n.target for n in decomposed.graph.nodes if n.op == "call_function"]
    assert {op.namespace for op in calls if isinstance(op, torch._ops.OpOverload)} == {"aten"}
    torch.testing.assert_close(decomposed.module()(other), model(other))


def test_functions_export(device):
    x, weight = torch.randn(4, C, device=device), torch.randn(C, device=device)

    class Both(torch.nn.Module):
        def forward(self, x, weight):
            return [norm(x, weight, weight) for norm, _ in PAIRS.values()]

    program = torch.export.export(Both(), (x, weight))
    for a, e in zip(program.module()(x, weight), Both()(x, weight), strict=True):
        torch.testing.assert_close(a, e)


def backward_samples(dtype, device):
    """Arguments of all operators, those of backwards with either saved tensor."""
    x, dy = torch.randn(2, 3, 4, C, device=device, dtype=dtype)
    weight, bias = torch.rand(2, C, device=device, dtype=dtype) + 0.5
    y, mean, rstd = ops.layer_norm_forward(x, weight, bias, C, EPS)
    z, scale = ops.rms_norm_forward(x, weight, C, EPS)
    return [
        (ops.layer_norm_forward, (x, weight, None, C, EPS)),
        (ops.layer_norm_backward, (dy, x, weight, None, mean, rstd, C, EPS, dtype, False, True)),
        (ops.layer_norm_backward, (dy, y, weight, bias, None, rstd, C, EPS, dtype, True, True)),
        (ops.layer_norm_backward, (dy, x, None, None, mean, rstd, C, EPS, dtype, False, False)),
        (ops.rms_norm_forward, (x, None, C, EPS)),
        (ops.rms_norm_backward, (dy, x, weight, scale, C, EPS, dtype, False, True)),
        (ops.rms_norm_backward, (dy, z, weight, scale, C, EPS, dtype, True, True)),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_decompositions_compute_what_kernels_do(dtype, device):
    table = decompositions()
    unit = 4 * torch.finfo(dtype).eps
    for op, arguments in backward_samples(dtype, device):
        for a, e in zip(table[op](*arguments), op(*arguments), strict=True):
            assert (a.dtype, a.shape) == (e.dtype, e.shape)
            torch.testing.assert_close(a, e, rtol=unit, atol=unit * 4)


def test_decompositions_of_add_norm(device):
    from apex.normalization.fused_add_norm import ops as add

    x, residual, dy, dsum = torch.randn(4, 3, C, device=device)
    weight, bias = torch.randn(2, C, device=device)
    table = decompositions()
    for dtype in (torch.float32, torch.bfloat16):  # of x, beside a float32 residual
        x, dy = x.to(dtype), dy.to(dtype)
        _, total, mean, rstd = add.add_layer_norm_forward(x, residual, weight, bias, C, EPS)
        scale = add.add_rms_norm_forward(x, residual, weight, C, EPS)[2]
        for op, arguments in [
            (add.add_layer_norm_forward, (x, residual, weight, None, C, EPS)),
            (add.add_rms_norm_forward, (x, residual, weight, C, EPS)),
            (add.add_layer_norm_backward, (dy, dsum, total, weight, mean, rstd, C, True)),
            (add.add_rms_norm_backward, (dy, None, total, weight, scale, C, False)),
        ]:
            for a, e in zip(table[op](*arguments), op(*arguments), strict=True):
                assert (a.dtype, a.shape) == (e.dtype, e.shape)
                unit = 2 * torch.finfo(dtype).eps
                torch.testing.assert_close(a, e, rtol=unit, atol=unit * 4)


@pytest.mark.parametrize("exported", [False, True])
def test_onnx(exported, tmp_path):
    """Of a model without a word of ours in the call; of an exported program once decomposed."""
    pytest.importorskip("onnxscript", reason="no onnxscript, which torch.onnx exports with")
    onnxruntime = pytest.importorskip("onnxruntime", reason="no onnxruntime to run the model")
    model, x = Model(), torch.randn(4, C)
    path = str(tmp_path / "model.onnx")
    batch = {0: torch.export.Dim("batch")}
    if exported:
        program = torch.export.export(model, (x,), dynamic_shapes=(batch,))
        program = program.run_decompositions(decompositions())
        torch.onnx.export(program, (), path, dynamo=True, verbose=False)
    else:
        torch.onnx.export(model, (x,), path, dynamo=True, dynamic_shapes=(batch,), verbose=False)
    session = onnxruntime.InferenceSession(path)
    other = torch.randn(9, C)
    (y,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(other).detach(), rtol=1e-5, atol=1e-5)


def test_torchs_decompositions_stay_torchs():
    """Entered there, Inductor would refuse our operators wherever ``CI`` is set."""
    ours = [op for op in torch._decomp.decomposition_table if "apex" in str(op)]
    assert not ours
    assert decompositions()
