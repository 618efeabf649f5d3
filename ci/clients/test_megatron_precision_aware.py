"""megatron-core's distributed optimizer on 2 and 4 processes, with FusedAdam's narrow states."""

import runpy
import sys
import types
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from megatron.core import optimizer as megatron
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig

import apex.optimizers

STEPS = 5
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "megatron"
cuda_means_cpu = runpy.run_path(str(EXAMPLE / "without_gpu.py"))["cuda_means_cpu"]
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
NARROW = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16}
# What is narrow, and how far parameters may be from those of exact states, in their own units in
# the last place: rounding of a moment is a relative error of 2^-9 of an update.
STATES = {
    "wide": ({}, 0),
    "remainders": ({"store_param_remainders": True}, 0),
    "moments": (NARROW, 2),
    "moments_and_remainders": ({**NARROW, "store_param_remainders": True}, 2),
}


def transformer_engine():
    """The module that megatron-core asks whether its optimizer has such states; here Apex's has.

    Nothing else of Transformer Engine is taken, and only while a configuration is checked.
    """
    names = ("transformer_engine", "transformer_engine.pytorch")
    modules = {name: types.ModuleType(name) for name in (*names, f"{names[1]}.optimizers")}
    modules[f"{names[1]}.optimizers"].FusedAdam = apex.optimizers.FusedAdam
    return modules


def make_config(**options):
    with (
        patch.dict(sys.modules, transformer_engine()),
        patch.object(optimizer_config, "is_te_min_version", lambda *_: True),
    ):
        return megatron.OptimizerConfig(
            optimizer="adam",
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=0.5,
            **ADAM,
            **options,
        )


def layers():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 4))
    return net.bfloat16()


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 16, generator=generator).bfloat16()
    return x, torch.randn(8, 4, generator=generator)


def loss_of(net, rank):
    x, y = batch(rank)
    return (net(x).float() - y).square().mean()


def train(rank, **options):
    """Train with the optimizer that megatron-core builds; return it and the parameters."""
    config = make_config(**options)
    with (
        cuda_means_cpu(),
        patch.object(megatron, "is_te_min_version", lambda *_: True),
    ):
        net = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
            ),
            layers(),
        )
        optimizer = megatron.get_megatron_optimizer(config, [net])
        for _ in range(STEPS):
            net.zero_grad_buffer()
            optimizer.zero_grad()
            loss_of(net, rank).backward()
            net.finish_grad_sync()
            succeeded, norm, _ = optimizer.step()
            assert succeeded
            assert norm > 0
    return optimizer, [p.detach().clone() for p in net.parameters()]


def reference(world):
    """The same training in plain PyTorch on one process: float32 masters of bfloat16 layers."""
    net = layers()
    masters = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.AdamW(masters, 1e-2, (0.9, 0.95), 1e-8, weight_decay=0.1)
    for _ in range(STEPS):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for rank in range(world):
            net.zero_grad()
            loss_of(net, rank).backward()
            for master, p in zip(masters, net.parameters(), strict=True):
                master.grad += p.grad.float() / world
        torch.nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, net.parameters(), strict=True):
                p.copy_(master)
    return [p.detach() for p in net.parameters()]


def check_training(rank, world):
    parallel_state.initialize_model_parallel()
    expected = reference(world)
    optimizer, exact = train(rank)
    assert type(optimizer.chained_optimizers[0]) is DistributedOptimizer
    for p, q in zip(exact, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=1e-3)
    for name, (options, ulps) in STATES.items():
        options = {"store_param_remainders": False, **options}
        optimizer, params = train(rank, use_precision_aware_optimizer=True, **options)
        inner = optimizer.chained_optimizers[0].optimizer
        assert type(inner) is apex.optimizers.FusedAdam
        wide = torch.float32
        for p in (p for group in inner.param_groups for p in group["params"]):
            state = inner.state[p]
            assert state["exp_avg"].dtype == options.get("exp_avg_dtype", wide)
            assert state["exp_avg_sq"].dtype == options.get("exp_avg_sq_dtype", wide)
            master = torch.int16 if options["store_param_remainders"] else wide
            assert state["master_param"].dtype == master
        for p, q in zip(params, exact, strict=True):
            if ulps:
                torch.testing.assert_close(p, q, rtol=ulps * 2**-7, atol=1e-3, msg=name)
            else:
                assert torch.equal(p, q), name


@pytest.mark.slow
def test_two_processes(two_ranks):
    two_ranks(check_training, timeout_s=240)


@pytest.mark.slow
def test_four_processes(four_ranks):
    four_ranks(check_training, timeout_s=240)
