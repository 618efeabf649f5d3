"""from_torch on models of transformers: their norms become ours, and losses stay as they were."""

import copy
from functools import partial

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    GemmaConfig,
    LlamaConfig,
    NemotronConfig,
    OlmoConfig,
    Qwen2Config,
)

from apex.normalization import FusedLayerNorm, FusedRMSNorm, from_torch

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
# Model, its configuration, what its norms are called, what they become, how many there are.
MODELS = {
    "llama": ("LlamaForCausalLM", LlamaConfig, "LlamaRMSNorm", FusedRMSNorm, 5),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Config, "Qwen2RMSNorm", FusedRMSNorm, 5),
    "bert": ("BertForMaskedLM", BertConfig, "LayerNorm", FusedLayerNorm, 6),
    "gemma": (
        "GemmaForCausalLM",
        partial(GemmaConfig, head_dim=16),
        "GemmaRMSNorm",
        FusedRMSNorm,
        5,
    ),
    "nemotron": ("NemotronForCausalLM", NemotronConfig, "NemotronLayerNorm1P", FusedLayerNorm, 5),
}
CENTERED = {"gemma", "nemotron"}  # which multiply by 1 + weight


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
    made = [m for m in ours.modules() if type(m) is kind]
    assert [m.zero_centered_gamma for m in made] == [name in CENTERED] * count
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
    """OLMo's layer norms have no weight, and compute in float32 whatever comes."""
    swaps = from_torch(transformers.OlmoForCausalLM(OlmoConfig(**SIZES)))
    assert not swaps.swapped
    assert len(swaps.kept) == 5
    assert all("other parameters or buffers" in reason for reason in swaps.kept.values())
