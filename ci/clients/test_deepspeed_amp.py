"""DeepSpeed 0.17's ``"amp"`` configuration trains with our ``apex.amp``."""

import deepspeed
import pytest
import torch
from deepspeed.runtime import engine

from apex import amp
from apex.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("accumulation", [1, 2], ids=lambda n: f"accumulation{n}")
def test_trains_with_amp(accumulation):
    """O1, with clipping through ``master_params`` and ``delay_unscale`` between steps.

    O2 is not for the CPU: DeepSpeed's reduction of gradients there refuses float16.
    """
    assert engine.APEX_INSTALLED
    assert engine.amp is amp
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.1,
        "amp": {"enabled": True, "opt_level": "O1"},
    }
    runner, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=FusedAdam(model.parameters(), lr=1e-2), config=config
    )
    assert type(optimizer) is FusedAdam
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(5 * accumulation):
        y = runner(x)
        assert y.dtype == torch.float16  # linear is on O1's list
        loss = y.float().square().mean()
        runner.backward(loss)
        runner.step()
        losses.append(loss.item())
    assert runner.global_steps == 5
    assert losses[-1] < losses[0]
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] > 1
