"""transformers 4's ``--fp16 --half_precision_backend apex`` trains with our ``apex.amp``."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import import_utils

from apex import amp

GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))


def trainer(folder, opt_level):
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        fp16=True,
        half_precision_backend="apex",
        fp16_opt_level=opt_level,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        num_train_epochs=12,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    return Trainer(GPT2LMHeadModel(GPT2Config(**GPT2)), arguments, train_dataset=rows)


def test_is_refused_without_a_distribution_named_apex(tmp_path):
    """transformers 4 looks for a distribution of the name ``apex``; ours are ``apex-amp`` etc."""
    with pytest.raises(ImportError, match="APEX is not installed"):
        trainer(tmp_path, "O1")


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_trains(tmp_path, monkeypatch, opt_level):
    """What that check keeps out works: the line below stands for a distribution named apex."""
    monkeypatch.setattr(import_utils, "_apex_available", True)
    training = trainer(tmp_path, opt_level)
    training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert len(losses) == 12
    assert losses[-1] < 0.95 * losses[0]
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] > 1
    parameters = {p.dtype for p in training.model.parameters()}
    assert parameters == ({torch.float16} if opt_level == "O2" else {torch.float32})
