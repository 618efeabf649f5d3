"""transformers' Trainer trains with ``optim="adamw_apex_fused"``, and T5 with our RMS norm."""

import copy

import pytest
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    Trainer,
    TrainingArguments,
)
from transformers.models.t5 import modeling_t5

import apex.normalization
import apex.optimizers

GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}


class Sentences(torch.utils.data.Dataset):
    """Four random sequences of 16 tokens, again and again, which a model can learn by heart."""

    def __init__(self, length=32):
        tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
        self.rows = [tokens[i % 4] for i in range(length)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(folder, optim="adamw_apex_fused", callbacks=(), **options):
    """A trainer of a tiny GPT-2, always the same, for 24 steps."""
    torch.manual_seed(0)
    arguments = {
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Trainer(
        model=GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT)),
        args=TrainingArguments(output_dir=str(folder), optim=optim, **(arguments | options)),
        train_dataset=Sentences(),
        callbacks=list(callbacks),
    )


def losses_of(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def inner(optimizer):
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def test_trainer_trains_as_with_torch(tmp_path):
    """The same losses and parameters as torch's fused AdamW, up to float32 rounding."""
    ours, theirs = trainer(tmp_path / "ours"), trainer(tmp_path / "theirs", "adamw_torch_fused")
    ours.train()
    theirs.train()
    assert type(inner(ours.optimizer)) is apex.optimizers.FusedAdam
    assert type(inner(theirs.optimizer)) is torch.optim.AdamW
    losses = losses_of(ours)
    assert len(losses) == 24
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(losses_of(theirs), rel=1e-4)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_trainer_continues_from_its_checkpoint(tmp_path, saving_stop):
    """Trainer saves the optimizer, loads it with ``weights_only``, and ends with the same bits."""
    whole = trainer(tmp_path / "whole")
    whole.train()
    options = {"save_strategy": "steps", "save_steps": 1000}
    trainer(tmp_path / "parts", callbacks=[saving_stop(12)], **options).train()
    second = trainer(tmp_path / "parts", **options)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-12"))
    assert second.state.global_step == 24
    for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_t5_uses_our_rms_norm():
    """Every norm of T5 is ours, and it trains to the losses that torch's RMS norm gives."""
    assert modeling_t5.T5LayerNorm is apex.normalization.FusedRMSNorm
    torch.manual_seed(0)
    ours = transformers.T5ForConditionalGeneration(T5Config(**T5))
    theirs = copy.deepcopy(ours)
    replaced = 0
    for module in list(theirs.modules()):
        for name, child in module.named_children():
            if type(child) is apex.normalization.FusedRMSNorm:
                norm = torch.nn.RMSNorm(child.normalized_shape, eps=child.eps)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
                replaced += 1
    assert replaced == 2 * 2 + 1 + 2 * 3 + 1  # per layer of encoder and decoder, and after each
    losses, expected = t5_losses(ours), t5_losses(theirs)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-4)


def t5_losses(model):
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
