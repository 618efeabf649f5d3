"""nemo-automodel replaces Apex's RMS norm in T5, because Apex's has no bfloat16; ours has."""

import importlib.util
import runpy
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5 import modeling_t5

from apex.normalization import FusedRMSNorm

# That file alone: the package around it imports what is not installed here.
FOLDER = Path(next(iter(importlib.util.find_spec("nemo_automodel").submodule_search_locations)))
patch_t5_layer_norm = runpy.run_path(str(FOLDER / "shared" / "transformers_patches.py"))[
    "patch_t5_layer_norm"
]
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}


def outputs(model):
    """Logits, and the gradient of the shared embedding, in float64."""
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    answer = model(input_ids=tokens, labels=tokens)
    answer.loss.backward()
    return answer.logits.detach().double(), model.shared.weight.grad.double()


def made():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**T5)).bfloat16()


def test_bfloat16_needs_no_replacement(monkeypatch):
    monkeypatch.setattr(modeling_t5, "T5LayerNorm", modeling_t5.T5LayerNorm)  # and back
    assert modeling_t5.T5LayerNorm is FusedRMSNorm
    ours = made()
    patch_t5_layer_norm()
    assert modeling_t5.T5LayerNorm is not FusedRMSNorm
    theirs = made()
    assert not any(type(module) is FusedRMSNorm for module in theirs.modules())
    truth = outputs(made().double())
    for own, their, true in zip(outputs(ours), outputs(theirs), truth, strict=True):
        ulp = true.abs().max() * torch.finfo(torch.bfloat16).eps
        assert (own - true).abs().max() <= 2 * (their - true).abs().max() + ulp
