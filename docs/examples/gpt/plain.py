"""The GPT of model.py in torch's own operations, for one process: what `--plain` trains.

Parameters have the names that they have there, so that a checkpoint of one goes on with the other.
"""

import torch
from model import VOCABULARY, Shape
from torch import Tensor, nn
from torch.nn import functional as F


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of channels of ``[batch, heads, sequence, channels]`` by their positions."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.hidden)
        frequencies = 10_000.0 ** -(torch.arange(0, shape.per_head, 2) / shape.per_head)
        angles = (torch.arange(shape.sequence)[:, None] * frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.query_key_value(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        query, key, value = mixed.chunk(3, dim=-1)
        cos, sin = self.cos.to(query.dtype), self.sin.to(query.dtype)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(context.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.attention_norm, self.attention = nn.LayerNorm(hidden), Attention(shape)
        self.perceptron_norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.perceptron_norm(x))))


class Gpt(nn.Module):
    """``[batch, sequence]`` of tokens to logits ``[batch, sequence, VOCABULARY]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def losses_of(
    rows: Tensor, model: nn.Module, micro_batch: int, dtype: torch.dtype, *, backward: bool
) -> list[Tensor]:
    """The loss of each micro-batch of ``rows``; with ``backward``, gradients of their mean, too."""
    parts = rows.split(micro_batch)
    losses = []
    for part in parts:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(part[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        if backward:
            (loss / len(parts)).backward()
        losses.append(loss.detach())
    return losses
