"""from_torch: what it replaces, and that nothing else changes."""

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
from apex_testkit.norms import GemmaRMSNorm, LayerNorm1P, LlamaRMSNorm


class T5LayerNorm(LlamaRMSNorm):
    """An RMS norm by another name."""


class NamedLayerNorm(nn.LayerNorm):
    """A name of its own for torch's."""


class MetaRMSNorm(LlamaRMSNorm):
    """As in Meta's Llama: forward has a helper; the rest is for printing."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight

    def extra_repr(self):
        return f"{self.weight.shape[0]}"


class CenteredRMSNorm(nn.RMSNorm):
    """Torch's parts and eps, Gemma's formula."""

    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class GatedRMSNorm(LlamaRMSNorm):
    """One that stays."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


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
    "RMSNorm, eps of torch, no weight": (
        lambda: nn.RMSNorm(8, elementwise_affine=False),
        FusedRMSNorm,
    ),
    "RMSNorm without weight": (
        lambda: nn.RMSNorm(8, eps=1e-3, elementwise_affine=False),
        FusedRMSNorm,
    ),
    "Llama": (lambda: LlamaRMSNorm(8), FusedRMSNorm),
    "T5": (lambda: T5LayerNorm(8, eps=1e-2), FusedRMSNorm),
    "Meta": (lambda: MetaRMSNorm(8), FusedRMSNorm),
}
CENTERED = {
    "Gemma": (lambda: GemmaRMSNorm(8), FusedRMSNorm),
    "1P": (lambda: LayerNorm1P(8), FusedLayerNorm),
    "1P, several dimensions": (lambda: LayerNorm1P((2, 8), eps=1e-3), FusedLayerNorm),
    "1P without bias": (lambda: LayerNorm1P(8, bias=False), FusedLayerNorm),
    "RMSNorm of 1 + weight": (lambda: CenteredRMSNorm(8), FusedRMSNorm),
}
SWAPPED |= CENTERED


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
    if isinstance(module, (LlamaRMSNorm, GemmaRMSNorm)) and dtype == torch.float64:
        assert "computes something else" in swaps.kept["1"]  # in float32, whatever comes
        return
    assert swaps.swapped == {"1": type(module).__name__}
    assert not swaps.kept
    assert type(model[1]) is kind
    assert model[1].zero_centered_gamma == ((make, kind) in CENTERED.values())
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert not model[1].training
    x = torch.randn(3, 2, 8, device=device, dtype=dtype)
    x[0] *= 2.0**-8
    unit = 2 * torch.finfo(dtype).eps  # Llama's rounds twice, and so does 1 + weight in 16 bits
    torch.testing.assert_close(model(x), old(x), rtol=unit, atol=4 * unit)


def test_another_default_device():
    """Under which users load models that they have elsewhere."""
    model = nn.Sequential(nn.LayerNorm(8), LlamaRMSNorm(8))
    with torch.device("meta"):
        assert set(from_torch(model).swapped) == {"0", "1"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_whole_model(device):
    """Names, modules used twice, tied parameters, frozen ones, and an optimizer made before."""
    shared = nn.LayerNorm(8)
    model = nn.Sequential(
        nn.Linear(8, 8), shared, nn.Sequential(shared, nn.LayerNorm(8), GatedRMSNorm(8)), nn.Tanh()
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
    gemma = from_torch(GemmaRMSNorm(8), mixed=True).model
    assert type(gemma) is MixedFusedRMSNorm
    assert gemma.zero_centered_gamma
    plain = nn.LayerNorm(8, elementwise_affine=False)
    assert type(from_torch(plain, mixed=True).model) is FusedLayerNorm


def test_random_numbers_of_others_are_untouched():
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    from_torch(nn.Sequential(LlamaRMSNorm(8)))
    assert torch.equal(torch.randn(2), expected)
