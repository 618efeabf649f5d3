"""from_torch: what it replaces, what it leaves and why, and that nothing else changes."""

import copy

import pytest
import torch
from torch import nn

from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    from_torch,
)
from apex_testkit import FLOATS


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


class T5LayerNorm(LlamaRMSNorm):
    """An RMS norm by another name."""


class GemmaRMSNorm(nn.Module):
    """The same parts, but the weight counts from one."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class OutsideRMSNorm(LlamaRMSNorm):
    """eps outside the root: differs only where x is small."""

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon) * self.weight


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x, gate):
        return super().forward(x * gate)


class OptionallyGatedRMSNorm(LlamaRMSNorm):
    """As Mamba's in transformers: computes what Llama's does where it is tried without a gate."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class LayerNorm2d(nn.LayerNorm):
    """As in timm: normalizes another dimension."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class NamedLayerNorm(nn.LayerNorm):
    """A name of its own for torch's."""


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


class MetaRMSNorm(LlamaRMSNorm):
    """As in Meta's Llama: forward has a helper; the rest is for printing."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight

    def extra_repr(self):
        return f"{self.weight.shape[0]}"


class RmsNormOfOtherParts(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))


def randomized(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


SWAPPED = {
    "LayerNorm": (lambda: nn.LayerNorm(8), FusedLayerNorm),
    "several dimensions": (lambda: nn.LayerNorm((2, 8), eps=1e-3), FusedLayerNorm),
    "without bias": (lambda: nn.LayerNorm(8, bias=False), FusedLayerNorm),
    "without weight": (lambda: nn.LayerNorm(8, elementwise_affine=False), FusedLayerNorm),
    "subclass": (lambda: NamedLayerNorm(8), FusedLayerNorm),
    "RMSNorm": (lambda: nn.RMSNorm(8, eps=1e-3), FusedRMSNorm),
    "RMSNorm, eps of torch": (lambda: nn.RMSNorm(8), FusedRMSNorm),
    "RMSNorm without weight": (
        lambda: nn.RMSNorm(8, eps=1e-3, elementwise_affine=False),
        FusedRMSNorm,
    ),
    "Llama": (lambda: LlamaRMSNorm(8), FusedRMSNorm),
    "T5": (lambda: T5LayerNorm(8, eps=1e-2), FusedRMSNorm),
    "Meta": (lambda: MetaRMSNorm(8), FusedRMSNorm),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("make", "kind"), SWAPPED.values(), ids=SWAPPED.keys())
def test_swapped(make, kind, dtype, device):
    """The same function of the same parameters, in every dtype, small rows included."""
    module = randomized(make().to(device, dtype))
    old = copy.deepcopy(module)
    model = nn.Sequential(nn.Identity(), module).eval()
    parameters = list(model.parameters())
    swaps = from_torch(model)
    assert swaps.model is model
    if isinstance(module, LlamaRMSNorm) and dtype == torch.float64:
        assert "computes something else" in swaps.kept["1"]  # in float32, whatever comes
        return
    assert swaps.swapped == {"1": type(module).__name__}
    assert not swaps.kept
    assert type(model[1]) is kind
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert not model[1].training
    x = torch.randn(3, 2, 8, device=device, dtype=dtype)
    x[0] *= 2.0**-8
    unit = 2 * torch.finfo(dtype).eps  # Llama's rounds twice
    torch.testing.assert_close(model(x), old(x), rtol=unit, atol=4 * unit)


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
    "Gemma": (lambda: GemmaRMSNorm(8), "computes something else"),
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
    "no dtype": (lambda: nn.RMSNorm(8, elementwise_affine=False), "neither eps nor a weight"),
}


@pytest.mark.parametrize(("make", "reason"), KEPT.values(), ids=KEPT.keys())
def test_kept(make, reason):
    module = make()
    model = nn.ModuleDict({"norm": module})
    swaps = from_torch(model)
    assert model["norm"] is module
    assert not swaps.swapped
    assert reason in swaps.kept["norm"]
    assert type(module).__name__ in swaps.kept["norm"]
    assert reason in str(swaps)


def test_whole_model(device):
    """Names, modules used twice, tied parameters, frozen ones, and an optimizer made before."""
    shared = nn.LayerNorm(8)
    model = nn.Sequential(
        nn.Linear(8, 8), shared, nn.Sequential(shared, nn.LayerNorm(8), GemmaRMSNorm(8)), nn.Tanh()
    ).to(device)
    model[2][1].weight = shared.weight
    model[2][1].bias.requires_grad_(False)
    model[2][1].owner = "someone"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.state_dict()
    x = torch.randn(4, 8, device=device)
    expected = model(x)
    swaps = from_torch(model)
    assert swaps.swapped == {"1": "LayerNorm", "2.0": "LayerNorm", "2.1": "LayerNorm"}
    assert list(swaps.kept) == ["2.2"]
    assert str(swaps).startswith("swapped 3, kept 1\n  swapped 1: LayerNorm\n")
    assert model[1] is model[2][0]
    assert model[2][1].weight is model[1].weight
    assert not model[2][1].bias.requires_grad
    assert model[2][1].owner == "someone"
    assert list(model.state_dict()) == list(before)
    y = model(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    weight = model[1].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[1].weight, weight)
    again = from_torch(model)
    assert not again.swapped


def test_root_and_options():
    norm = nn.LayerNorm(8)
    swaps = from_torch(norm, memory_efficient=True, mixed=True)
    assert type(swaps.model) is MixedFusedLayerNorm
    assert swaps.model.weight is norm.weight
    assert swaps.model.memory_efficient
    assert swaps.swapped == {"": "LayerNorm"}
    assert "(root)" in str(swaps)
    assert type(from_torch(LlamaRMSNorm(8), mixed=True).model) is MixedFusedRMSNorm
    plain = nn.LayerNorm(8, elementwise_affine=False)
    assert type(from_torch(plain, mixed=True).model) is FusedLayerNorm


def test_random_numbers_of_others_are_untouched():
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    from_torch(nn.Sequential(LlamaRMSNorm(8)))
    assert torch.equal(torch.randn(2), expected)
