"""A small GPT in pure bfloat16, rounded by chance, learns as one with float32 masters does."""

import pytest
import torch
from torch.nn import functional as F

from apex.optimizers import FusedAdam

VOCABULARY, CONTEXT, WIDTH, HEADS = 32, 16, 32, 2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places
        return self.head(self.norm(self.blocks(x)))


def batches(steps, size=8):
    """Sequences in which every token depends on the one before it, or on the one before that."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, VOCABULARY, VOCABULARY)
    near, far = (2.5 * torch.randn(shape, generator=generator)).softmax(-1)
    tokens = torch.randint(0, VOCABULARY, (steps * size, 2), generator=generator)
    for _ in range(CONTEXT - 1):
        own = 0.7 * near[tokens[:, -1]] + 0.3 * far[tokens[:, -2]]
        tokens = torch.cat([tokens, torch.multinomial(own, 1, generator=generator)], 1)
    return tokens.split(size)


def final_loss(device, steps=500, **options):
    """The mean loss of the last 100 steps."""
    torch.manual_seed(1)
    model = Gpt().to(device, torch.bfloat16)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, **options)
    losses = []
    for tokens in batches(steps):
        tokens = tokens.to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-100:]) / 100


def test_a_small_gpt_ends_within_one_percent_of_masters(device, record_property):
    losses = {
        "masters": final_loss(device, master_weights=True),
        "by chance": final_loss(device, stochastic_rounding=True),
        "to nearest": final_loss(device),
    }
    for name, loss in losses.items():
        record_property(name, loss)
    print(losses)
    off = {name: abs(loss - losses["masters"]) for name, loss in losses.items()}
    assert off["to nearest"] > 3 * off["by chance"]  # what it is good for
    assert losses["by chance"] == pytest.approx(losses["masters"], rel=0.01)
