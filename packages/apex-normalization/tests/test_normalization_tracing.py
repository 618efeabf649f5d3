"""torch.jit.trace, torch.jit.script and the ONNX exporter that traces with TorchScript."""

import io

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

C = 7  # columns


class Model(torch.nn.Module):
    """The modules and the functional forms behind one another."""

    def __init__(self):
        super().__init__()
        kinds = (FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm)
        self.norms = torch.nn.Sequential(
            *(kind(C) for kind in kinds),
            FusedLayerNorm(C, elementwise_affine=False, memory_efficient=True),
            FusedRMSNorm(C, elementwise_affine=False, memory_efficient=True),
        )

    def forward(self, x):
        x = self.norms(x)
        weight, bias = self.norms[0].weight, self.norms[0].bias
        y, total = fused_add_rms_norm(x, x.sin(), weight, prenorm=True)
        return fused_add_layer_norm(y, total, weight, bias)


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad_enabled", [False, True])
def test_jit_trace(grad_enabled):
    """A trace holds ATen's operators alone, takes other batches, and can be saved.

    With gradients it is also checked by torch: it is traced twice, and run.
    """
    model = Model()
    with torch.set_grad_enabled(grad_enabled):
        traced = torch.jit.trace(model, (torch.randn(4, C),))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        loaded = torch.jit.load(file)
        other = torch.randn(2, 9, C)
        torch.testing.assert_close(loaded(other), model(other))
    assert {n.kind().split("::")[0] for n in loaded.inlined_graph.nodes()} == {"aten", "prim"}


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_jit_script_is_refused():
    for module in (FusedLayerNorm(C), torch.nn.Sequential(MixedFusedRMSNorm(C))):
        with pytest.raises(
            NotImplementedError, match=r"torch\.jit\.script cannot compile .* Use tor"
        ):
            torch.jit.script(module)


@pytest.mark.filterwarnings("ignore")  # torch's words on the exporter's age
def test_onnx_of_torchscript(tmp_path):
    pytest.importorskip("onnx", reason="no onnx, which the old exporter checks models with")
    onnxruntime = pytest.importorskip("onnxruntime", reason="no onnxruntime to run the model")
    model, x, path = Model(), torch.randn(4, C), str(tmp_path / "model.onnx")
    torch.onnx.export(
        model, (x,), path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}}
    )
    session = onnxruntime.InferenceSession(path)
    other = torch.randn(9, C)
    (y,) = session.run(None, {"x": other.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(other).detach(), rtol=1e-5, atol=1e-5)
