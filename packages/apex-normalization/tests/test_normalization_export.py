"""torch.export, torch.fx and ONNX, and the decompositions that they use."""

import pytest
import torch

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
            affine = (fused_layer_norm_affine, mixed_dtype_fused_layer_norm_affine)
            rms = (fused_rms_norm_affine, mixed_dtype_fused_rms_norm_affine)
            return [
                *(norm(x, C) for norm in (fused_layer_norm, fused_rms_norm)),
                *(norm(x, weight, weight, C) for norm in affine),
                *(norm(x, weight, C) for norm in rms),
                fused_add_layer_norm(x, x.sin(), weight, weight),
                fused_add_rms_norm(x, x.sin(), weight, prenorm=True)[0],
            ]

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
        (ops.layer_norm_backward, (dy, x, weight, mean, rstd, C, True)),
        (ops.layer_norm_backward_from_output, (dy, y, weight, bias, rstd, C, EPS, True)),
        (ops.layer_norm_backward, (dy, x, None, mean, rstd, C, False)),
        (ops.rms_norm_forward, (x, None, C, EPS)),
        (ops.rms_norm_backward, (dy, x, weight, scale, C, True)),
        (ops.rms_norm_backward_from_output, (dy, z, weight, scale, C, EPS, True)),
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


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_operators_of_apex_decompose(kind, device):
    class Model(torch.nn.Module):
        def forward(self, x, weight):
            fused = getattr(torch.ops.apex, f"fused_{kind}_norm_affine_fwd")
            plain = getattr(torch.ops.apex, f"fused_{kind}_norm_fwd")
            parameters = (weight, weight) if kind == "layer" else (weight,)
            return fused(plain(x, [C], EPS)[0], *parameters, [C], EPS)[0]

    x, weight = torch.randn(3, C, device=device), torch.randn(C, device=device)
    program = torch.export.export(Model(), (x, weight)).run_decompositions(decompositions())
    assert not [n for n in program.graph.nodes if "apex" in str(n.target)]
    torch.testing.assert_close(program.module()(x, weight), Model()(x, weight))


def test_symbolic_trace():
    """As torch's norms, ours are one call in the graph, whatever the trace does not know."""
    model = Model()
    traced = torch.fx.symbolic_trace(model.norms[0])
    assert [n.op for n in traced.graph.nodes if n.op.startswith("call")] == ["call_function"]
    for norm in model.norms:
        x = torch.randn(4, C)
        assert torch.equal(torch.fx.symbolic_trace(norm)(x), norm(x))


def test_torchs_decompositions_stay_torchs():
    """Entered there, Inductor would refuse our operators wherever ``CI`` is set."""
    ours = [op for op in torch._decomp.decomposition_table if "apex" in str(op)]
    assert not ours
    assert decompositions()
