"""from_torch: what it leaves, and why."""

import pytest
import torch
from torch import nn

from apex.normalization import from_torch
from apex_testkit.norms import GemmaRMSNorm, LayerNorm1P, LlamaRMSNorm


class OutsideRMSNorm(LlamaRMSNorm):
    """eps outside the root: differs only where x is small."""

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon) * self.weight


class TwoPlusRMSNorm(GemmaRMSNorm):
    """Counts from two."""

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * (2 + self.weight)


class DroppingLayerNorm1P(LayerNorm1P):
    """Computes 1 + weight while it is not trained."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x, gate):
        return super().forward(x * gate)


class OptionallyGatedRMSNorm(LlamaRMSNorm):
    """As Mamba's in transformers: computes what Llama's does where it is tried without a gate."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class RmsNormOfDimensionOne(LlamaRMSNorm):
    """The same for matrices alone."""

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.variance_epsilon)
        return x * scale * self.weight.view(-1, *[1] * (x.dim() - 2))


class DroppingRMSNorm(LlamaRMSNorm):
    """The same while it is not trained."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class LayerNorm2d(nn.LayerNorm):
    """As in timm: normalizes another dimension."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class LoadingLayerNorm(nn.LayerNorm):
    """Takes checkpoints under other names."""

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}gamma")
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class CalledLayerNorm(nn.LayerNorm):
    def __call__(self, x):
        return super().__call__(x) + 1


class RmsNormWithMethod(LlamaRMSNorm):
    def fold(self):
        return self.weight


class RmsNormOfOtherParts(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))


def hooked():
    module = nn.LayerNorm(8)
    module.register_forward_hook(lambda *_: None)
    return module


def parametrized():
    module = nn.LayerNorm(8)
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Softplus())
    return module


def buffered():
    module = LlamaRMSNorm(8)
    module.register_buffer("scale", torch.ones(()))
    return module


def complex_weights():
    module = LlamaRMSNorm(8)
    module.weight = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    return module


def with_forward_on_it(make):
    """As accelerate's add_hook_to_module leaves modules."""
    module = make(8)
    forward = module.forward
    module.forward = lambda x: forward(x) + 1
    return module


def compiled():
    module = nn.LayerNorm(8)
    module.compile(backend="eager")
    return module


def without_eps():
    module = LlamaRMSNorm(8)
    del module.variance_epsilon
    return module


KEPT = {
    "own forward": (lambda: LayerNorm2d(8), "a forward of its own, not that of torch.nn.LayerN"),
    "hooks": (hooked, "has hooks"),
    "parametrized": (parametrized, "other parameters or modules than torch.nn.LayerNorm"),
    "2 + weight": (lambda: TwoPlusRMSNorm(8), "computes something else"),
    "1P with dropout": (lambda: DroppingLayerNorm1P(8), "a forward of its own, not that of torch"),
    "1P, meta": (lambda: LayerNorm1P(8).to("meta"), "meta device"),
    "other dimension": (lambda: RmsNormOfDimensionOne(8), "computes something else"),
    "dropout": (lambda: DroppingRMSNorm(8), "computes something else"),
    "dropout, not training": (lambda: DroppingRMSNorm(8).eval(), "computes something else"),
    "eps outside": (lambda: OutsideRMSNorm(8), "computes something else"),
    "gated": (lambda: GatedRMSNorm(8), "other arguments than its input: ['x', 'gate']"),
    "optional gate": (lambda: OptionallyGatedRMSNorm(8), "other arguments than its input"),
    "forward on it": (lambda: with_forward_on_it(nn.LayerNorm), "its own forward, set on the"),
    "forward on it, Llama": (lambda: with_forward_on_it(LlamaRMSNorm), "its own forward, set on"),
    "compiled": (compiled, "its own _compiled_call_impl, set on the module"),
    "own loading": (lambda: LoadingLayerNorm(8), "would be lost: _load_from_state_dict"),
    "own call": (lambda: CalledLayerNorm(8), "methods of its own, which would be lost: __call__"),
    "own method": (lambda: RmsNormWithMethod(8), "methods of its own, which would be lost: fold"),
    "other parts": (lambda: RmsNormOfOtherParts(8), "other parameters or buffers"),
    "buffers": (buffered, "other parameters or buffers"),
    "complex": (complex_weights, "other parameters or buffers"),
    "no eps": (without_eps, "none of variance_epsilon, eps, epsilon"),
    "meta": (lambda: LlamaRMSNorm(8).to("meta"), "meta device"),
}


@pytest.mark.parametrize(("make", "reason"), KEPT.values(), ids=KEPT.keys())
def test_kept(make, reason):
    module = make()
    was_training = module.training
    model = nn.ModuleDict({"norm": module})
    swaps = from_torch(model)
    assert model["norm"] is module
    assert not swaps.swapped
    assert reason in swaps.kept["norm"]
    assert type(module).__name__ in swaps.kept["norm"]
    assert reason in str(swaps)
    assert module.training is was_training
