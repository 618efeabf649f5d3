"""apex.transformer.layers: other wheels' norms, with parameters that trainers recognise."""

import importlib
import sys

import pytest
import torch

from apex.transformer import layers
from apex.transformer.layers import layer_norm


@pytest.fixture
def without_contrib(monkeypatch):
    """The module as it is where apex-contrib is not installed."""
    monkeypatch.setitem(sys.modules, "apex.contrib.layer_norm", None)
    yield importlib.reload(layer_norm)
    monkeypatch.undo()
    importlib.reload(layer_norm)


@pytest.mark.parametrize("name", layers.__all__)
@pytest.mark.parametrize("enabled", [True, False])
def test_parameters_are_marked(name, enabled):
    norm = getattr(layers, name)(8, eps=1e-3, sequence_parallel_enabled=enabled)
    assert len(list(norm.parameters())) == 2
    for parameter in norm.parameters():
        assert parameter.sequence_parallel_enabled is enabled
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (8,), eps=1e-3))
    assert not getattr(layers, name)(8).weight.sequence_parallel_enabled


def test_without_parameters():
    assert layers.FusedLayerNorm(8, elementwise_affine=False).weight is None
    mixed = layers.MixedFusedLayerNorm(8, sequence_parallel_enabled=True)
    assert mixed(torch.randn(2, 8).bfloat16()).dtype == torch.float32


def test_without_contrib(without_contrib):
    with pytest.warns(UserWarning, match="pip install apex-contrib"):
        norm = without_contrib.FastLayerNorm(8, sequence_parallel_enabled=True)
    assert isinstance(norm, without_contrib.FusedLayerNorm)
    assert norm.bias.sequence_parallel_enabled


def test_without_normalization(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex.normalization", None)
    with pytest.raises(ImportError, match="pip install apex-normalization"):
        importlib.reload(layer_norm)
    monkeypatch.undo()
    importlib.reload(layer_norm)
