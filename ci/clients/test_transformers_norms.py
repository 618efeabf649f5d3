"""from_torch on models of transformers: their norms become ours, and losses stay as they were."""

import copy

import pytest
import torch
import transformers
from transformers import BertConfig, GemmaConfig, LlamaConfig, Qwen2Config

from apex.normalization import FusedLayerNorm, FusedRMSNorm, from_torch

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
# Model, its configuration, what its norms are called, what they become, how many there are.
MODELS = {
    "llama": ("LlamaForCausalLM", LlamaConfig, "LlamaRMSNorm", FusedRMSNorm, 5),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Config, "Qwen2RMSNorm", FusedRMSNorm, 5),
    "bert": ("BertForMaskedLM", BertConfig, "LayerNorm", FusedLayerNorm, 6),
}


def losses(model, steps=4):
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_norms_become_ours(name):
    model_name, config, norm, kind, count = MODELS[name]
    torch.manual_seed(0)
    theirs = getattr(transformers, model_name)(config(**SIZES)).eval()  # eval: no dropout
    ours = copy.deepcopy(theirs)
    swaps = from_torch(ours)
    assert list(swaps.swapped.values()) == [norm] * count
    assert not swaps.kept
    assert sum(type(m) is kind for m in ours.modules()) == count
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)


def test_bfloat16():
    """Theirs rounds before the weight is applied, ours at the end."""
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    ours = copy.deepcopy(theirs)
    assert len(from_torch(ours).swapped) == 5
    assert losses(ours) == pytest.approx(losses(theirs), rel=0.02)


def test_other_formulas_stay():
    model = transformers.GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=16))
    swaps = from_torch(model)
    assert not swaps.swapped
    assert len(swaps.kept) == 5
    assert all("computes something else" in reason for reason in swaps.kept.values())
