"""A BERT layer with these modules, trained, against a plain torch one."""

import torch
from torch import nn
from torch.nn import functional as F

from apex.contrib.multihead_attn import SelfMultiheadAttn

TIME, BATCH, FEATURES, HEADS, STEPS = 12, 4, 32, 4, 100


class Layer(nn.Module):
    """Attention with norm_add, then a feed-forward network with norm and residual."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 64), nn.Linear(64, FEATURES)

    def forward(self, x, padding):
        x = self.attention(x, padding)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Ours(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inner = SelfMultiheadAttn(
            FEATURES, HEADS, dropout=dropout, bias=True, include_norm_add=True
        )

    def forward(self, x, padding):
        return self.inner(x, x, x, key_padding_mask=padding)[0]


class Plain(nn.Module):
    """torch's own attention, with the weights of ``ours``."""

    def __init__(self, ours):
        super().__init__()
        inner = ours.inner
        self.norm = nn.LayerNorm(FEATURES)
        self.inner = nn.MultiheadAttention(FEATURES, HEADS)
        order = lambda w: w.unflatten(0, (HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)
        with torch.no_grad():
            self.inner.in_proj_weight.copy_(order(inner.in_proj_weight))
            self.inner.in_proj_bias.copy_(order(inner.in_proj_bias))
            self.inner.out_proj.weight.copy_(inner.out_proj_weight)
            self.inner.out_proj.bias.copy_(inner.out_proj_bias)

    def forward(self, x, padding):
        y = self.norm(x)
        return x + self.inner(y, y, y, key_padding_mask=padding, need_weights=False)[0]


def batches(device):
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(FEATURES, FEATURES, generator=generator, dtype=torch.float64) / 4
    for _ in range(STEPS):
        x = torch.randn(TIME, BATCH, FEATURES, generator=generator, dtype=torch.float64)
        lengths = torch.randint(4, TIME + 1, (BATCH, 1), generator=generator)
        padding = torch.arange(TIME) >= lengths
        yield x.to(device), padding.to(device), (x @ target + x.mean(0)).tanh().to(device)


def train(layer, device):
    optimizer, losses = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9), []
    for x, padding, target in batches(device):
        optimizer.zero_grad()
        loss = (layer(x, padding) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_trains_as_a_plain_layer(device):
    """100 steps without dropout are equal within float64's rounding, which training amplifies."""
    torch.manual_seed(0)
    ours = Ours()
    layer = Layer(ours)
    plain = Layer(Plain(ours))
    for name in ("norm", "up", "down"):
        getattr(plain, name).load_state_dict(getattr(layer, name).state_dict())
    actual = train(layer.to(device, torch.float64), device)
    expected = train(plain.to(device, torch.float64), device)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-8, atol=0)
    assert actual[-1] < actual[0] / 2


def test_trains_with_dropout(device):
    """The loss falls about as far, and the same seed gives the same bits again."""
    torch.manual_seed(0)
    layer = Layer(Ours(0.1)).to(device, torch.float64)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    torch.manual_seed(5)
    losses = train(layer, device)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    layer.load_state_dict(state)
    torch.manual_seed(5)
    assert train(layer, device) == losses
