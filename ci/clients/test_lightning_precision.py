"""docs/examples/lightning: apex.amp as a precision plugin of Lightning 2."""

import re
import runpy
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F

from apex import amp
from apex.optimizers import FusedAdam

pytestmark = pytest.mark.usefixtures("amp_ends")

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER = DOCS / "examples" / "lightning"
ApexPrecision = runpy.run_path(str(FOLDER / "apex_precision.py"))["ApexPrecision"]
X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True) / 4)
EPOCHS = 12
DTYPES = {"O0": torch.float32, "O1": torch.float32, "O2": torch.float16}
DTYPES |= {"O4": torch.float32, "O5": torch.bfloat16}


class Regression(pl.LightningModule):
    """A module that knows nothing of amp; ``spike`` is a step whose loss overflows float16."""

    def __init__(self, spike=None):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.spike, self.losses, self.products = spike, [], set()

    def forward(self, x):
        hidden = self.layers[0](x)
        self.products.add(hidden.dtype)
        return self.layers[2](self.layers[1](hidden))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self(x).float(), y)
        self.losses.append(loss.item())
        return loss * torch.inf if self.global_step == self.spike else loss

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=0.02)


def fit(model, folder, level, epochs=EPOCHS, ckpt_path=None, plugins=None, **options):
    trainer = pl.Trainer(
        plugins=[ApexPrecision(level)] if plugins is None else plugins,
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = torch.utils.data.DataLoader(DATA, batch_size=8)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("level", DTYPES)
def test_trains(level, tmp_path):
    """As without amp, to the digits that a level leaves; its clipping sees unscaled gradients."""
    plain, module = Regression(), Regression()
    fit(plain, tmp_path, level, plugins=[], gradient_clip_val=0.1)
    trainer = fit(module, tmp_path, level, gradient_clip_val=0.1)
    assert len(module.losses) == 4 * EPOCHS
    digits = {"O0": 1e-5, "O1": 0.02, "O2": 0.02, "O4": 0.1, "O5": 0.1}[level]
    assert module.losses == pytest.approx(plain.losses, rel=digits, abs=digits / 10)
    assert module.losses[-1] < 0.3 * module.losses[0]
    sixteen = {"O0": torch.float32, "O1": torch.float16, "O4": torch.bfloat16}
    assert module.products == {sixteen.get(level, DTYPES[level])}
    assert {p.dtype for p in module.parameters()} == {DTYPES[level]}
    assert {p.dtype for p in amp.master_params(trainer.optimizers[0])} == {torch.float32}


def test_a_step_that_overflows_is_skipped(tmp_path):
    module = Regression(spike=3)
    fit(module, tmp_path, "O2", epochs=1)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_goes_on_from_a_checkpoint(level, tmp_path):
    """The same losses as without the interruption, bit for bit, and the same loss scale."""
    spike = None if level == "O5" else 3  # O5 does not scale
    whole, first, second = Regression(spike), Regression(spike), Regression(spike)
    fit(whole, tmp_path, level)
    expected = amp.state_dict()
    path = tmp_path / "half.ckpt"
    fit(first, tmp_path, level, epochs=EPOCHS // 2).save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    assert saved["ApexPrecision"] == amp.state_dict()
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    fit(second, tmp_path, level, ckpt_path=path)
    assert first.losses + second.losses == whole.losses
    assert amp.state_dict() == expected


def test_torchs_ddp(tmp_path):
    """Levels that keep parameters float32 train under it; the others are refused."""
    strategy = {"strategy": DDPStrategy(process_group_backend="gloo")}
    module = Regression()
    fit(module, tmp_path, "O1", **strategy)
    assert module.products == {torch.float16}
    assert module.losses[-1] < 0.3 * module.losses[0]
    with pytest.raises(ValueError, match="O2 changes the dtype"):
        fit(Regression(), tmp_path, "O2", strategy=DDPStrategy(process_group_backend="gloo"))


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    text = (DOCS / "guides" / "lightning.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names = {"__name__": "page"}
    exec(compile(block, "lightning.md", "exec"), names)
    assert names["model"].loss.item() < 0.1
    assert {p.dtype for p in names["model"].parameters()} == {torch.float16}
