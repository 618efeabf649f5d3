"""PyTorch Lightning 1.9's ``ApexMixedPrecisionPlugin``, the last release that has it."""

import os

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import ApexMixedPrecisionPlugin
from torch import nn
from torch.nn import functional as F

from apex import amp

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 8, generator=GENERATOR)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True) / 4)
EPOCHS = 12


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses, self.dtypes = [], set()

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, index):
        x, y = batch
        predicted = self(x)
        self.dtypes.add(self.layers[0].weight.dtype)
        loss = F.mse_loss(predicted.float(), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def fit(model, folder, level, **options):
    trainer = pl.Trainer(
        plugins=[ApexMixedPrecisionPlugin(level)],
        accelerator="cpu",
        max_epochs=EPOCHS,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(DATA, batch_size=8))
    return trainer


@pytest.fixture(autouse=True)
def _amp_ends():
    yield
    amp._amp_state.handle._deactivate()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_trains(level, tmp_path):
    pl.seed_everything(0)
    model = Regression()
    trainer = fit(model, tmp_path, level, enable_checkpointing=False, gradient_clip_val=1.0)
    assert len(model.losses) == 4 * EPOCHS
    assert model.losses[-1] < 0.3 * model.losses[0]
    dtype = {"O1": torch.float32, "O2": torch.float16, "O5": torch.bfloat16}[level]
    assert model.dtypes == {dtype}
    (optimizer,) = trainer.optimizers
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}


def test_checkpoints_have_the_loss_scale(tmp_path):
    pl.seed_everything(0)
    trainer = fit(Regression(), tmp_path, "O2")
    path = trainer.checkpoint_callback.best_model_path
    assert os.path.exists(path)
    state = torch.load(path, weights_only=False)
    assert state["ApexMixedPrecisionPlugin"] == amp.state_dict()
    assert {v.dtype for v in state["state_dict"].values()} == {torch.float32}
