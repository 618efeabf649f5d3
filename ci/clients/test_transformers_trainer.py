"""docs/guides/transformers.md: today's Trainer with FusedAdam and our norms, T5 in float16."""

import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from apex.normalization import FusedRMSNorm, from_torch
from apex.optimizers import FusedAdam

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "transformers.md"
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
HYPER = {"lr": 1e-3, "betas": (0.9, 0.95)}
STEPS = 24


def trainer(folder, way, optimizer, swapped, callbacks=(), **options):
    """A trainer of a tiny Llama, always the same; ``optimizer`` reaches it in one of two ways."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    if swapped:
        assert len(from_torch(model).swapped) == 5
    options = {"save_strategy": "no", **options}
    arguments = TrainingArguments(
        output_dir=str(folder),
        weight_decay=0.1,
        num_train_epochs=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    if way == "optimizers":
        given = {"optimizers": (optimizer(model.parameters(), **HYPER), None)}
    else:
        given = {"optimizer_cls_and_kwargs": (optimizer, HYPER)}
    rows = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks), **given)


def losses_of(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize("way", ["optimizer_cls_and_kwargs", "optimizers"])
def test_trains_as_with_torch(way, tmp_path):
    """FusedAdam and our norms, against torch's AdamW and transformers' own norms."""
    ours = trainer(tmp_path, way, FusedAdam, swapped=True)
    theirs = trainer(tmp_path, way, torch.optim.AdamW, swapped=False)
    for each in (ours, theirs):
        if way == "optimizers":  # torch's default decay is 0.01, ours 0
            for group in each.optimizer.param_groups:
                group["weight_decay"] = 0.1
        each.train()
    inner = getattr(ours.optimizer, "optimizer", ours.optimizer)
    assert type(inner) is FusedAdam
    decays = [0.1, 0.0] if way == "optimizer_cls_and_kwargs" else [0.1]
    assert [group["weight_decay"] for group in inner.param_groups] == decays
    if way == "optimizer_cls_and_kwargs":
        assert len(inner.param_groups[1]["params"]) == 5  # our norms, by their names
    losses = losses_of(ours)
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(losses_of(theirs), rel=1e-4)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_goes_on_from_its_checkpoint(tmp_path, saving_stop):
    """The optimizer is loaded with ``weights_only``, and training ends with the same bits."""
    given = {"way": "optimizer_cls_and_kwargs", "optimizer": FusedAdam, "swapped": True}
    whole = trainer(tmp_path / "whole", **given)
    whole.train()
    options = {"save_strategy": "steps", "save_steps": 1000, **given}
    trainer(tmp_path / "parts", callbacks=[saving_stop(STEPS // 2)], **options).train()
    second = trainer(tmp_path / "parts", **options)
    checkpoint = tmp_path / "parts" / f"checkpoint-{STEPS // 2}"
    second.train(resume_from_checkpoint=str(checkpoint))
    assert second.state.global_step == STEPS
    for p, q in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


def t5_outputs(model):
    """Logits, and the gradient of the shared embedding, in float64."""
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    answer = model(input_ids=tokens, labels=tokens)
    answer.loss.backward()
    return answer.logits.detach().double(), model.shared.weight.grad.double()


def test_t5_in_float16(tmp_path):
    """``wo`` stays float32, so that norms take float32 beside float16 weights; as accurate."""
    torch.manual_seed(0)
    exact = T5ForConditionalGeneration(T5Config(**T5))
    exact.save_pretrained(tmp_path)
    theirs = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    assert {p.dtype for p in theirs.parameters()} == {torch.float16, torch.float32}
    ours = copy.deepcopy(theirs)
    assert [*from_torch(ours).swapped.values()] == ["T5LayerNorm"] * 12
    assert sum(type(module) is FusedRMSNorm for module in ours.modules()) == 12
    truth = t5_outputs(exact.double())
    for own, their, true in zip(t5_outputs(ours), t5_outputs(theirs), truth, strict=True):
        ulp = true.abs().max() * torch.finfo(torch.float16).eps
        assert (own - true).abs().max() <= 2 * (their - true).abs().max() + ulp


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(compile(block, PAGE.name, "exec"), names)
    losses = losses_of(names["trainer"])
    assert len(losses) == 20
    assert losses[-1] < 0.9 * losses[0]
    print(f"losses of the page: {losses[0]:.3f}, {losses[-1]:.3f}")
