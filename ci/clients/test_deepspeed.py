"""DeepSpeed finds our FusedAdam by attribute, and trains with it in float32, bfloat16 and ZeRO."""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.zero import utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from apex.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("one_process")

BF16 = {"bf16": {"enabled": True}}
ON_CPU = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
# DeepSpeed's configuration, and the wrapper that it makes for an optimizer it knows as fused.
CONFIGS = {
    "fp32": ({}, FusedAdam),
    "bf16": (BF16, FP16_Optimizer),
    "zero1": (BF16 | {"zero_optimization": {"stage": 1}}, DeepSpeedZeroOptimizer),
    "zero2": (BF16 | {"zero_optimization": {"stage": 2}}, DeepSpeedZeroOptimizer),
    "offload": (
        BF16 | {"zero_optimization": ON_CPU, "zero_force_ds_cpu_optimizer": False},
        DeepSpeedZeroOptimizer,
    ),
    "zero3": ({"zero_optimization": {"stage": 3}}, DeepSpeedZeroOptimizer_Stage3),
}


def trained(config, make, steps=5):
    """Return the engine's optimizer and the losses of a few steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.1, **config}
    runner, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=make(model.parameters(), lr=1e-2), config=config
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = runner(x.to(next(runner.module.parameters()).dtype)).float().square().mean()
        runner.backward(loss)
        runner.step()
        losses.append(loss.item())
    return optimizer, losses


def test_is_detected():
    """``import apex`` with ``apex.optimizers.FusedAdam`` by attribute, when DeepSpeed is imported.

    This file imports apex after DeepSpeed, so that DeepSpeed's own ``import apex`` comes first.
    """
    assert get_accelerator().device_name() == "cpu" or torch.cuda.is_available()
    assert engine.APEX_INSTALLED
    assert engine.apex.optimizers.FusedAdam is FusedAdam
    assert FusedAdam in utils.ZERO_SUPPORTED_OPTIMIZERS


@pytest.mark.parametrize("case", CONFIGS)
def test_trains(case, monkeypatch):
    """Losses are those of torch's AdamW, and ZeRO accepts FusedAdam without being told to."""
    config, wrapper = CONFIGS[case]
    optimizer, losses = trained(config, FusedAdam)
    assert type(optimizer) is wrapper
    assert type(getattr(optimizer, "optimizer", optimizer)) is FusedAdam
    assert losses[-1] < losses[0]
    # DeepSpeed wraps optimizers that it does not take for fused in another class, which in 0.17
    # gives other losses in bfloat16. AdamW stands for DeepSpeed's own FusedAdam to get the same.
    monkeypatch.setattr(engine, "FusedAdam", torch.optim.AdamW)
    adamw = lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.0)
    reference, expected = trained(config, adamw)
    assert wrapper in (FusedAdam, type(reference))
    assert losses == pytest.approx(expected, rel=1e-4)
