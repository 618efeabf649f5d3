"""fairseq's FusedAdamV2 subclass, its fused layer norm, and its direct use of amp_C."""

import contextlib

import amp_C
import fairseq.utils
import pytest
import torch
from fairseq.modules import layer_norm
from fairseq.optim import fused_adam

import apex.multi_tensor_apply
import apex.normalization
import apex.optimizers

HYPER = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def no_cuda_device(monkeypatch):
    """fairseq enters ``torch.cuda.device(p.device)``, which refuses the CPU; nothing else does."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def test_finds_our_functions():
    assert fused_adam.multi_tensor_applier is apex.multi_tensor_apply.multi_tensor_applier
    assert issubclass(fused_adam.FusedAdamV2, apex.optimizers.FusedAdam)
    assert fairseq.utils.multi_tensor_l2norm_available
    assert fairseq.utils.multi_tensor_l2norm is amp_C.multi_tensor_l2norm


def test_get_fused_adam_class():
    """V1 where apex-contrib has ``fused_adam_cuda``, else V2; fairseq prefers the former."""
    expected = fused_adam.FusedAdamV2
    with contextlib.suppress(ImportError):
        import fused_adam_cuda  # noqa: F401

        expected = fused_adam.FusedAdamV1
    assert fused_adam.get_fused_adam_class() is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_subclass_follows_adamw(dtype):
    """Its step hands ``self.multi_tensor_adam``, ``self._dummy_overflow_buf`` and so on to ours."""
    start = [torch.randn(shape) for shape in ((5, 3), (1000,), (1,))]
    params = [torch.nn.Parameter(t.to(dtype)) for t in start]
    expected = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = fused_adam.FusedAdamV2(params, **HYPER)
    assert optimizer.multi_tensor_adam is amp_C.multi_tensor_adam
    reference = torch.optim.AdamW(expected, **HYPER)
    for _ in range(4):
        for p, q in zip(params, expected, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
            # fairseq rounds float16 parameters after each step.
            q.data = p.data.float()
        optimizer.step()
        reference.step()
    assert optimizer.param_groups[0]["step"] == 4
    tolerance = {torch.float32: (1e-5, 1e-6), torch.float16: (1e-3, 1e-4)}[dtype]
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.float(), q, rtol=tolerance[0], atol=tolerance[1])
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_subclass_checkpoint_continues():
    """The state that its own ``step`` made is saved and loaded by our ``state_dict`` methods."""
    grads = [torch.randn(20) for _ in range(4)]

    def steps(optimizer, grads):
        (p,) = optimizer.param_groups[0]["params"]
        for grad in grads:
            p.grad = grad
            optimizer.step()
        return p

    def make(values):
        return fused_adam.FusedAdamV2([torch.nn.Parameter(values.clone())], **HYPER)

    start = torch.randn(20)
    whole = steps(make(start), grads)
    first = make(start)
    half = steps(first, grads[:2])
    second = make(half.detach())
    second.load_state_dict(first.state_dict())
    assert torch.equal(steps(second, grads[2:]), whole)


def test_l2norm_called_directly():
    """As in ``fairseq.utils.multi_tensor_total_norm``, which does so for CUDA gradients only."""
    grads = [torch.randn(n) for n in (3, 1000, 70_000)]
    has_inf = torch.zeros((1, 1), dtype=torch.int)
    norm = fairseq.utils.multi_tensor_l2norm(2048 * 32, has_inf, [grads], False)
    expected = torch.cat(grads).double().norm().float()
    torch.testing.assert_close(norm[0], expected.reshape(1))


def test_layer_norm():
    """``LayerNorm`` is apex's only where there is a GPU; its base class is ours everywhere."""
    assert layer_norm.has_fused_layernorm
    assert layer_norm._FusedLayerNorm is apex.normalization.FusedLayerNorm
    norm = layer_norm.FusedLayerNorm(24)
    x = torch.randn(4, 24)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (24,)))
