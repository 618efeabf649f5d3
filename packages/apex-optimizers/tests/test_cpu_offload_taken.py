"""CPUOffload whose gradients leave the device: where they are after each thing that goes wrong."""

import pytest
import torch

from apex.optimizers import CPUOffload, FusedAdam, FusedSGD
from apex_testkit.simulated_link import LazyLink


class Taken:
    """One parameter of ones, whose gradients leave during the backward; steps subtract them."""

    def __init__(self, dtype=torch.float32):
        self.param, self.link = torch.nn.Parameter(torch.ones(5000, dtype=dtype)), LazyLink()
        self.optimizer = CPUOffload(
            [self.param], FusedSGD, lr=1.0, offload_gradients=True, link=self.link
        )

    def backward(self, factor):
        (self.param * factor).sum().backward()

    def step(self):
        self.optimizer.step()
        return set(self.param.tolist())


def refusing(*_):
    raise MemoryError("no memory")


def test_cleared_gradients_do_not_come_back():
    taken = Taken()
    for factor in (1, 10):
        taken.backward(factor)
    taken.optimizer.zero_grad()
    taken.backward(100)
    assert taken.step() == {-99}


@pytest.mark.parametrize("takes", [False, True], ids=["kept", "taken"])
def test_a_link_that_refuses(takes, monkeypatch):
    """What was not asked for is not taken for what has come."""
    taken = Taken()
    if not takes:
        taken.optimizer = CPUOffload([taken.param], FusedSGD, lr=1.0, link=taken.link)
    with torch.no_grad():
        taken.param.fill_(50)
    with monkeypatch.context() as patch:
        patch.setattr(taken.link, "receive", refusing)
        taken.param.grad = torch.ones(5000)
        with pytest.raises(MemoryError):
            taken.step()
        assert taken.param.grad is not None
    assert taken.step() == {49}


def test_gradients_outlive_a_refused_step():
    taken = Taken()
    taken.backward(1)
    taken.optimizer.param_groups[0]["momentum"] = "x"
    with pytest.raises(TypeError):
        taken.step()
    taken.optimizer.param_groups[0]["momentum"] = 0.0
    taken.backward(2)
    assert taken.step() == {-2}


def test_a_model_that_becomes_another(monkeypatch):
    """After the constructor, and between backward and step."""
    taken = Taken()
    module = torch.nn.Module()
    module.p = taken.param
    module.to(torch.bfloat16)
    taken.backward(2)
    assert taken.step() == {-1}
    taken.backward(3)
    module.to(torch.float32)
    assert taken.step() == {-4}
    taken.backward(1)
    taken.param.requires_grad_(False)
    assert taken.step() == {-5}
    taken.param.requires_grad_(True)
    taken.backward(1)
    monkeypatch.setattr(taken.optimizer._pipeline, "_link", None)  # it is on the CPU now
    assert taken.step() == {-6}
    assert taken.optimizer.host_copy(taken.param) is taken.param


def test_a_decoupled_gradient_of_another_dtype():
    param, link = torch.nn.Parameter(torch.ones(5000)), LazyLink()
    options = {"offload_gradients": True, "use_decoupled_grad": True, "link": link}
    optimizer = CPUOffload([param], FusedAdam, lr=0.5, **options)
    for dtype in (torch.bfloat16, torch.float32):
        param.decoupled_grad = torch.ones(5000, dtype=dtype)
        optimizer.param_groups[0]["eps"] = "x" if dtype == torch.bfloat16 else 0.0
        if dtype == torch.bfloat16:
            with pytest.raises(TypeError):
                optimizer.step()
    optimizer.step()
    assert set(param.tolist()) == {0.5}


def test_a_group_that_is_refused_is_left_alone():
    taken, other = Taken(), torch.nn.Parameter(torch.ones(5000))
    with pytest.raises(ValueError, match="lr must be"):
        taken.optimizer.add_param_group({"params": [other], "lr": -1.0})
    other.sum().backward()
    assert other.grad is not None
