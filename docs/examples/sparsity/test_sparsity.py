"""Runs the example shortly, and permutes torchvision's networks, which compute the same then."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from apex.contrib.sparsity.permutation_lib import Permutation

TRAIN = Path(__file__).with_name("train.py")


def test_example(tmp_path):
    command = [sys.executable, str(TRAIN), f"--output={tmp_path}", "--epochs=2"]
    done = subprocess.run(
        [*command, "--finetune-epochs=2", "--escape-attempts=0"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["wrong_masks"] == []
    assert record["resumed_is_equal"]
    assert record["permuted_weights"] > 15
    assert 50 < record["kept_magnitude"] < 100


def test_wrong_arguments():
    command = [sys.executable, str(TRAIN), "--finetune-epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--finetune-epochs: at least 2" in done.stderr


def any_order(matrix_group, number=0):
    """Instead of a search: whatever the order, a network must compute the same."""
    random = torch.Generator().manual_seed(number)
    return torch.randperm(matrix_group.shape[1], generator=random).tolist()


# The least number of weights whose columns are permuted.
NETWORKS = {"resnet18": 20, "resnext50_32x4d": 30, "mobilenet_v3_small": 25, "densenet121": 100}


@pytest.mark.parametrize("name", NETWORKS)
def test_torchvision_networks_compute_the_same(name, monkeypatch):
    monkeypatch.setattr(Permutation, "find_permutation_for_matrix_group", any_order)
    torch.manual_seed(0)
    network = models.get_model(name, weights=None).double().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor)
            nn.init.uniform_(module.running_var, 0.5, 2)
    sparse = [
        (n, "weight", m.weight)
        for n, m in network.named_modules()
        if isinstance(m, (nn.Linear, nn.Conv2d)) and m.weight.shape[1] % 16 == 0
    ]
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        expected = network(x)
        Permutation.set_permutation_saving_params(allow_permutation=True)
        Permutation.set_permutation_params_from_asp(network, sparse, network.named_parameters())
        assert Permutation.permute_model(network)
        actual = network(x)
    torch.testing.assert_close(actual / expected.abs().max(), expected / expected.abs().max())
    columns, rows, missed = Permutation.get_permutation_stats()
    assert len(columns) >= NETWORKS[name]
    assert rows
    assert missed == []
