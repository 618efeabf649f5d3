"""RMS norms as other libraries write them."""

import torch
from torch import nn


class LlamaRMSNorm(nn.Module):
    """As in transformers: computes in float32, rounds, then multiplies by the weight."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """The same parts, but the weight counts from one, and the result is rounded once."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.to(torch.float32))).to(x.dtype)


class LayerNorm1P(nn.LayerNorm):
    """As NeMo's and Nemotron's: torch's parts, but the weight counts from one."""

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def forward(self, x):
        scale = self.weight + 1
        return nn.functional.layer_norm(x, self.normalized_shape, scale, self.bias, self.eps)
