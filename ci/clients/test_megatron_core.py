"""megatron-core's optimizers, gradient clipping and layer norm run with Apex's functions."""

import runpy
from pathlib import Path

import amp_C
import fused_weight_gradient_mlp_cuda
import pytest
import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core import optimizer as megatron
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions import fused_layer_norm
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as wrappers
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import MegatronModule, TransformerConfig, transformer_block

import apex.multi_tensor_apply
import apex.optimizers
from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "megatron"
CudaNamesMeanCpu = runpy.run_path(str(EXAMPLE / "without_gpu.py"))["CudaNamesMeanCpu"]
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}


class Net(MegatronModule):
    """Two layers as one model chunk, with the attribute that megatron-core's DDP would add."""

    def __init__(self, dtype):
        super().__init__(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1))
        self.ddp_config = DistributedDataParallelConfig()
        layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
        self.layers = torch.nn.Sequential(*layers).to(dtype)

    def forward(self, x):
        return self.layers(x)


@pytest.fixture(autouse=True, scope="module")
def model_parallel_group(one_process):
    """The group of one process that megatron-core reduces norms over."""
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def test_finds_our_functions():
    assert megatron.Adam is apex.optimizers.FusedAdam
    assert megatron.SGD is apex.optimizers.FusedSGD
    assert not megatron.USING_PYTORCH_OPTIMIZER
    for module in (clip_grads, wrappers):
        assert module.multi_tensor_applier is apex.multi_tensor_apply.multi_tensor_applier
        assert module.multi_tensor_scale_impl is amp_C.multi_tensor_scale
    assert clip_grads.l2_norm_impl is amp_C.multi_tensor_l2norm
    assert fused_layer_norm.FusedLayerNormAffineFunction is FusedLayerNormAffineFunction
    assert transformer_block.LayerNormImpl is fused_layer_norm.FusedLayerNorm
    assert layers.fused_weight_gradient_mlp_cuda is fused_weight_gradient_mlp_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grad_norm_and_clipping(dtype):
    grads = [torch.randn(shape, dtype=dtype) for shape in ((7, 5), (1023,), (), (0,))]
    with CudaNamesMeanCpu():
        norm = clip_grads.get_grad_norm_fp32(grads)
    expected = torch.cat([g.double().flatten() for g in grads]).norm().item()
    assert norm == pytest.approx(expected, rel=1e-5)

    parameters = [torch.nn.Parameter(torch.zeros(g.shape)) for g in grads]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.to(torch.float32, copy=True)  # it is clipped in place
    with CudaNamesMeanCpu():
        clip_grads.clip_grad_by_total_norm_fp32(parameters, 1.0, norm)
    for p, g in zip(parameters, grads, strict=True):
        torch.testing.assert_close(p.grad, (g.double() / (expected + 1e-6)).float())


def steps(config, dtype, count=5):
    """Train ``Net`` with the optimizer that megatron-core builds; return it, the net, and norms."""
    torch.manual_seed(0)
    net = Net(dtype)
    x, y = torch.randn(8, 16, dtype=dtype), torch.randn(8, 4)
    norms = []
    with CudaNamesMeanCpu():
        config = megatron.OptimizerConfig(**config)
        optimizer = megatron.get_megatron_optimizer(config, [net])
        for _ in range(count):
            optimizer.zero_grad()
            optimizer.scale_loss((net(x).float() - y).square().mean()).backward()
            for p in net.parameters():
                p.main_grad = p.grad
            succeeded, norm, _ = optimizer.step()
            assert succeeded
            norms.append(norm)
    return optimizer, net, norms


def reference_steps(make, count=5, clip=0.1):
    """The same training in float32 by plain PyTorch; return the net and the norms."""
    torch.manual_seed(0)
    net = Net(torch.float32)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    optimizer = make(net.parameters())
    norms = []
    for _ in range(count):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip).item())
        optimizer.step()
    return net, norms


def torch_adam(parameters):
    return torch.optim.AdamW(parameters, 1e-2, (0.9, 0.95), 1e-8, weight_decay=0.1)


def torch_sgd(parameters):
    return torch.optim.SGD(parameters, 1e-2, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("adam", apex.optimizers.FusedAdam, torch_adam),
        ("sgd", apex.optimizers.FusedSGD, torch_sgd),
    ],
    ids=["adam", "sgd"],
)
def test_fp32_training_follows_torch(name, ours, theirs):
    config = {"optimizer": name, "clip_grad": 0.1, **ADAM, "sgd_momentum": 0.9}
    optimizer, net, norms = steps(config, torch.float32)
    assert type(optimizer.chained_optimizers[0].optimizer) is ours
    reference, expected = reference_steps(theirs)
    assert min(norms) > 0.1  # the gradients were clipped
    assert norms == pytest.approx(expected, rel=1e-4)
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision_training_keeps_float32_parameters(dtype):
    """16-bit parameters are megatron-core's rounded copies of those that FusedAdam updates."""
    is_fp16 = dtype == torch.float16
    precision = {"fp16": is_fp16, "bf16": not is_fp16, "params_dtype": dtype}
    config = {"optimizer": "adam", "clip_grad": 0.1, **ADAM, **precision}
    config |= {"initial_loss_scale": 1024.0, "min_loss_scale": 1.0} if is_fp16 else {}
    optimizer, net, _ = steps(config, dtype)
    (wrapper,) = optimizer.chained_optimizers
    assert type(wrapper) is wrappers.Float16OptimizerWithFloat16Params
    assert type(wrapper.optimizer) is apex.optimizers.FusedAdam
    start = steps(config, dtype, count=0)[1]
    for p, before in zip(net.parameters(), start.parameters(), strict=True):
        assert p.main_param.dtype == torch.float32
        assert torch.equal(p, p.main_param.to(dtype))
        assert not torch.equal(p, before)


def test_state_is_what_checkpoints_read():
    """megatron-core saves ``exp_avg`` and ``exp_avg_sq``, and copies ``step`` between ranks."""
    config = {"optimizer": "adam", "clip_grad": 0.1, **ADAM}
    optimizer, net, _ = steps(config, torch.float32, count=2)
    inner = optimizer.chained_optimizers[0].optimizer
    for group in inner.param_groups:
        assert isinstance(group["step"], int)
        assert group["step"] == 2
        for p in group["params"]:
            assert inner.state[p]["exp_avg"].shape == inner.state[p]["exp_avg_sq"].shape == p.shape
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    inner.step()
    assert all(group["step"] == 3 for group in inner.param_groups)


@pytest.mark.parametrize("accumulated", ["wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"])
def test_gradient_accumulation_fusion(accumulated, monkeypatch):
    """Its two linear layers add the gradients of two micro-batches to ``main_grad``."""
    torch.manual_seed(0)
    calls = []
    own = getattr(fused_weight_gradient_mlp_cuda, accumulated)
    spied = lambda *given: (calls.append(given), own(*given))[1]
    monkeypatch.setattr(fused_weight_gradient_mlp_cuda, accumulated, spied)
    dtype = torch.float32 if accumulated.endswith("fp32") else torch.bfloat16
    options = {"init_method": torch.nn.init.xavier_normal_, "bias": True, "skip_bias_add": False}
    options["config"] = ModelParallelConfig(
        gradient_accumulation_fusion=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
    )
    first = layers.ColumnParallelLinear(16, 24, **options)
    second = layers.RowParallelLinear(24, 8, input_is_parallel=True, **options)
    weights = [first.weight, second.weight]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, dtype=dtype)
    truth = [torch.zeros(weight.shape, dtype=torch.float64) for weight in weights]
    for _ in range(2):
        x = torch.randn(5, 3, 16, dtype=torch.bfloat16)
        dy = torch.randn(5, 3, 8, dtype=torch.bfloat16)
        hidden = first(x)[0]
        second(hidden)[0].backward(dy)
        plain = hidden.detach().double().requires_grad_()
        plain_weights = [weight.detach().double().requires_grad_() for weight in weights]
        (plain @ plain_weights[1].T).backward(dy.double())
        (x.double() @ plain_weights[0].T).backward(plain.grad.bfloat16().double())
        for total, weight in zip(truth, plain_weights, strict=True):
            total += weight.grad
    assert len(calls) == 4
    for weight, total in zip(weights, truth, strict=True):
        assert weight.grad is None
        # bfloat16 is rounded after each of the two micro-batches; values are below 8.
        atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-5, 2**-7)
        torch.testing.assert_close(weight.main_grad.double(), total, atol=atol, rtol=rtol)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["plain", "memory_efficient"])
def test_layer_norm(memory_efficient):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=48,
        num_attention_heads=1,
        memory_efficient_layer_norm=memory_efficient,
    )
    norm = fused_layer_norm.FusedLayerNorm(config, 48)
    x = torch.randn(6, 48, requires_grad=True)
    y = norm(x)
    assert type(y.grad_fn).__name__ == "fused_layer_normBackward"
    # Megatron found the argument by its name in the signature: the output is kept, or the input.
    kept = {tensor.data_ptr() for tensor in y.grad_fn.saved_tensors if tensor is not None}
    assert (y.data_ptr() in kept, x.data_ptr() in kept) == (memory_efficient, not memory_efficient)
    expected = torch.nn.functional.layer_norm(x, (48,), norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    inputs = (x, norm.weight, norm.bias)
    actual = torch.autograd.grad(y, inputs, grad)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, inputs, grad))
