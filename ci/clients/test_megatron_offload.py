"""megatron-core's HybridDeviceOptimizer steps what it offloads with FusedAdam on the CPU."""

import contextlib

import pytest
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from apex.optimizers import FusedAdam

# As megatron-core passes them, `fused` for torch's AdamW.
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
HYPER |= {"bias_correction": True, "fused": True}


class ModelsAreOnCuda(TorchFunctionMode):
    """Parameters of a model say that they are on a GPU; pinned memory is memory."""

    def __init__(self, model):
        super().__init__()
        self.params = {id(param) for param in model.parameters()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == Tensor.is_cuda.__get__:
            return id(args[0]) in self.params
        if func is Tensor.pin_memory:
            return args[0]
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return func(*args, **kwargs)


class Stream:
    """All that is asked of streams; copies on the CPU are done at once."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def wait(self, stream):
        pass

    def synchronize(self):
        pass


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())


def trained(cpu_optimizer, in_fp32):
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    model = torch.nn.Sequential(*layers).bfloat16()
    x = torch.randn(8, 16).bfloat16()
    with ModelsAreOnCuda(model):
        optimizer = HybridDeviceOptimizer(
            list(model.parameters()),
            offload_fraction=1.0,
            cpu_optimizer_cls=cpu_optimizer,
            gpu_optimizer_cls=None,
            param_update_in_fp32=in_fp32,
            **HYPER,
        )
        losses = []
        for _ in range(5):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return optimizer, losses


@pytest.mark.parametrize("in_fp32", [True, False], ids=["fp32", "bf16"])
def test_losses_are_those_of_torchs_adamw(in_fp32):
    optimizer, losses = trained(FusedAdam, in_fp32)
    assert {type(own) for own in optimizer.cpu_optimizers} == {FusedAdam}
    _, expected = trained(torch.optim.AdamW, in_fp32)
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(expected, rel=1e-5 if in_fp32 else 0.02)
