"""A training loop that knows nothing of Apex, Lightning 2's, around apex.amp and apex's DDP.

Lightning's Trainer gives epochs, batches, hooks, checkpoints and clipping; the module initializes
amp, scales the loss in ``training_step``, and wraps its network, as scripts did.
"""

import logging
import warnings

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("amp_ends")

EPOCHS, SAMPLES, BATCH = 6, 32, 8
SCALE = 128.0  # no step is skipped, whatever the size of a rank's batch
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 8, generator=GENERATOR)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True) / 4)


class Regression(pl.LightningModule):
    """Manual optimization: amp scales and unscales, Lightning counts steps and saves."""

    def __init__(self, level, wraps, loss_scale=None):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(4)
        self.network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = FusedAdam(self.network.parameters(), lr=0.02)
        self.network, self.optimizer = amp.initialize(
            self.network, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0
        )
        if wraps:
            self.network = DistributedDataParallel(self.network)
        self.losses = []

    def configure_optimizers(self):
        return self.optimizer

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self.network(x).float(), y)
        # Lightning's own wrapper would pass a closure to ``step``, which amp refuses, as Apex does.
        optimizer = self.optimizers(use_pl_optimizer=False)
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            self.manual_backward(scaled_loss)
        nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["amp"] = amp.state_dict()

    def on_load_checkpoint(self, checkpoint):
        amp.load_state_dict(checkpoint["amp"])


def trainer(folder, epochs=EPOCHS, **options):
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(module, folder, indices=range(SAMPLES), batch=BATCH, **options):
    ckpt_path = options.pop("ckpt_path", None)
    own = trainer(folder, **options)
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(DATA, indices), batch_size=batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few workers, and of folders that are there
        own.fit(module, loader, ckpt_path=ckpt_path)
    return own


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_one_process(level, tmp_path):
    module = Regression(level, wraps=False)
    fit(module, tmp_path, enable_checkpointing=False)
    assert len(module.losses) == EPOCHS * SAMPLES // BATCH
    assert module.losses[-1] < 0.3 * module.losses[0]
    assert {p.dtype for p in amp.master_params(module.optimizer)} == {torch.float32}


def test_goes_on_from_a_checkpoint(tmp_path):
    """The same losses as without the interruption, bit for bit."""
    whole = Regression("O2", wraps=False)
    fit(whole, tmp_path / "whole", enable_checkpointing=False)
    first = Regression("O2", wraps=False)
    path = tmp_path / "half.ckpt"
    fit(first, tmp_path, epochs=EPOCHS // 2, enable_checkpointing=False).save_checkpoint(path)
    assert "amp" in torch.load(path, weights_only=False)
    second = Regression("O2", wraps=False)
    fit(second, tmp_path, enable_checkpointing=False, ckpt_path=path)
    assert first.losses + second.losses == whole.losses


def check_two_processes(rank, world, folder, level, expected):
    """Each has half of every batch; the mean of their losses is that of one process."""
    mine = [i for i in range(SAMPLES) if i % BATCH // (BATCH // world) == rank]
    module = Regression(level, wraps=True, loss_scale=SCALE)
    fit(module, folder, mine, BATCH // world, enable_checkpointing=False)
    losses = torch.tensor(module.losses)
    dist.all_reduce(losses)
    digits = {"O1": 1e-2, "O0": 1e-5}[level]  # products of float16 have three digits
    torch.testing.assert_close(losses / world, torch.tensor(expected), rtol=digits, atol=1e-5)
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    others = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(others, flat)
    assert torch.equal(*others)
    amp._amp_state.handle._deactivate()


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_two_processes(two_ranks, level, tmp_path):
    module = Regression(level, wraps=False, loss_scale=SCALE)
    fit(module, tmp_path, enable_checkpointing=False)
    amp._amp_state.handle._deactivate()
    two_ranks(check_two_processes, folder=str(tmp_path), level=level, expected=module.losses)
