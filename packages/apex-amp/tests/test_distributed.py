"""Models that are wrapped for data parallelism after amp.initialize."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("views", [True, False], ids=["bucket views", "own gradients"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.usefixtures("process_group")
def test_accumulation_under_ddp(level, views):
    """Buckets are reused by every backward pass; gradients of the one before must survive."""
    start = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.arange(8) % 4) for _ in range(4)]

    def train(wrap):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, loss_scale=256.0
        )
        model = wrap(model)
        for first, second in (batches[:2], batches[2:]):
            optimizer.zero_grad()
            for x, y in (first, second):
                with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
        return [p.detach() for p in amp.master_params(optimizer)]

    expected = train(lambda model: model)
    actual = train(
        lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    )
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.usefixtures("process_group")
def test_only_the_first_process_prints(capsys, monkeypatch):
    amp.initialize(nn.Linear(2, 2))
    assert "O1:" in capsys.readouterr().out
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    amp.initialize(nn.Linear(2, 2))
    assert capsys.readouterr().out == ""
