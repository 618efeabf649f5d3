"""Causal models of transformers, whose head and loss go through linear_cross_entropy."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from apex.contrib.xentropy import linear_cross_entropy

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma-2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, final_logit_softcapping=3.0, attn_implementation="eager")
    ),
    "gpt-2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2)),
}


def loss_of(model, tokens, labels):
    """The loss that ``model(tokens, labels=labels)`` computes, without its logits."""
    hidden = model.base_model(tokens).last_hidden_state
    cap = getattr(model.config, "final_logit_softcapping", None)
    head = model.get_output_embeddings()
    return linear_cross_entropy(
        hidden[:, :-1], head.weight, labels[:, 1:], softcap=cap, chunk_size=10
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).eval()
    tokens = torch.randint(300, (3, 16))
    labels = tokens.masked_fill(torch.rand(3, 16) < 0.3, -100)
    expected = model(tokens, labels=labels).loss
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss = loss_of(model, tokens, labels)
    loss.backward()
    unit = 2e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(loss.float(), expected.float(), rtol=unit, atol=0)
    for n, p in model.named_parameters():
        error = (p.grad - gradients[n]).float().norm() / gradients[n].float().norm()
        assert error <= unit, n


def test_learns():
    torch.manual_seed(0)
    model = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(300, (4, 16))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
