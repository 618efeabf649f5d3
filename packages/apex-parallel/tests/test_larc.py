"""LARC: the formula, the optimizer interface, and what must hold when something goes wrong."""

import copy
import pickle

import pytest
import torch
from torch import nn

from apex.parallel.LARC import LARC


def by_formula(p, g, lr, decay, trust=0.02, eps=1e-8, clip=True):
    """One plain SGD step with LARC, in float64."""
    p, g = p.double(), g.double()
    norm_p, norm_g = p.norm().item(), g.norm().item()
    factor = 1.0
    if norm_p and norm_g:
        factor = trust * norm_p / (norm_g + norm_p * decay + eps)
        factor = min(factor / lr, 1.0) if clip else factor
    return p - lr * factor * (g + decay * p)


def param(values, dtype=torch.float64):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-4, 0.5], ids=["clipped", "adapted"])
@pytest.mark.parametrize("values", [[3.0, -4.0], [0.0, 0.0]])
@pytest.mark.parametrize("grad", [[0.5, 1.0], [0.0, 0.0]])
def test_formula(values, grad, lr, decay, clip):
    p = param(values)
    p.grad = torch.tensor(grad, dtype=torch.float64)
    wanted = by_formula(p.detach(), p.grad, lr, decay, clip=clip)
    optimizer = LARC(torch.optim.SGD([p], lr=lr, weight_decay=decay), clip=clip)
    optimizer.step()
    torch.testing.assert_close(p.detach(), wanted, rtol=1e-14, atol=0)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_groups_and_missing_gradients():
    a, b, c = param([1.0]), param([2.0]), param([3.0])
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    groups = [{"params": [a, c], "weight_decay": 0.5}, {"params": [b], "lr": 0.01}]
    wanted = by_formula(a.detach(), a.grad, 0.1, 0.5), by_formula(b.detach(), b.grad, 0.01, 0.0)
    LARC(torch.optim.SGD(groups, lr=0.1)).step()
    assert [a.item(), b.item(), c.item()] == pytest.approx([*map(float, wanted), 3.0], rel=1e-14)


@pytest.mark.parametrize("is_tensor", [True, False], ids=["tensor_decay", "decay"])
@pytest.mark.parametrize("clip", [True, False])
def test_an_infinite_parameter_stays_without_decay(clip, is_tensor):
    """Its norm gives no factor: the other elements take the wrapped optimizer's step."""
    p = param([-float("inf"), 1.0])
    optimizer = LARC(torch.optim.SGD([p], lr=0.25), clip=clip)
    if is_tensor:
        optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.0)
    for _ in range(2):
        p.grad = torch.tensor([0.0, 1.0], dtype=torch.float64)
        optimizer.step()
    assert p.tolist() == [-float("inf"), 0.5]


def test_an_infinite_norm_gives_no_factor_with_decay():
    p = param([float("inf"), 1.0])
    p.grad = torch.tensor([0.0, 1.0], dtype=torch.float64)
    LARC(torch.optim.SGD([p], lr=0.25, weight_decay=0.5), clip=False).step()
    assert p[0].isnan()  # inf less its own decay
    assert p[1] == 1.0 - 0.25 * 1.5


def test_float16_norms_do_not_overflow():
    p = param([300.0] * 4, torch.float16)  # the sum of squares is 360,000
    p.grad = torch.full_like(p, 1.0)
    LARC(torch.optim.SGD([p], lr=1.0), trust_coefficient=1e-3, clip=False).step()
    assert p.tolist() == [299.75] * 4  # 1e-3 * 600 / 2 = 0.3, rounded in steps of 0.25


def test_closure_runs_once_and_before_scaling():
    p = param([3.0, -4.0])
    optimizer = LARC(torch.optim.SGD([p], lr=0.1))
    wanted = by_formula(p.detach(), 2 * p.detach(), 0.1, 0.0)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    torch.testing.assert_close(p.detach(), wanted, rtol=1e-14, atol=0)


def test_is_an_optimizer_to_schedulers():
    p = param([1.0])
    optimizer = LARC(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == 0.05
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["after"]
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.item() == 0.0
    optimizer.add_param_group({"params": [param([2.0])]})
    assert len(optimizer.optim.param_groups) == 2


def test_zero_grad_is_the_wrapped_optimizers():
    class KeepsZeros(torch.optim.SGD):
        def zero_grad(self, set_to_none=False):
            super().zero_grad(set_to_none)

    p = param([1.0])
    p.grad = torch.ones_like(p)
    optimizer = LARC(KeepsZeros([p], lr=0.1))
    optimizer.zero_grad()
    assert p.grad.item() == 0.0
    optimizer.zero_grad(set_to_none=True)
    assert p.grad is None


def test_state_hooks_run():
    optimizer = LARC(torch.optim.SGD([param([1.0])], lr=0.1))
    seen = []
    kinds = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
    handles = [
        getattr(optimizer, f"register_{kind}_hook")(lambda *_, kind=kind: seen.append(kind))
        for kind in kinds
    ]
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == kinds
    for handle in handles:
        handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == kinds


def test_state_is_the_wrapped_optimizers():
    def trained():
        p = param([1.0, 2.0])
        optimizer = LARC(torch.optim.SGD([p], lr=0.1, momentum=0.9), 0.01, clip=False, eps=1e-6)
        p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    optimizer = trained()
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert (other.trust_coefficient, other.clip, other.eps) == (0.01, False, 1e-6)
        assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        p = other.param_groups[0]["params"][0]
        p.grad = torch.ones_like(p)
        other.step()
    fresh = LARC(torch.optim.SGD([param([1.0, 2.0])], lr=0.3, momentum=0.9))
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.1
    buffers = [next(iter(o.state.values()))["momentum_buffer"] for o in (fresh, optimizer)]
    assert torch.equal(*buffers)
    assert "trust_coefficient=0.01" in repr(optimizer)
    assert "SGD" in repr(optimizer)


def test_weight_decay_survives_a_failing_step():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("step failed")

    p = param([1.0])
    p.grad = torch.ones_like(p)
    optimizer = LARC(Fails([p], lr=0.1, weight_decay=0.5))
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_refusals():
    with pytest.raises(TypeError, match="got list"):
        LARC([param([1.0])])
    with pytest.raises(TypeError, match="got LBFGS"):
        LARC(torch.optim.LBFGS([param([1.0])]))
    inner = torch.optim.SGD([param([1.0])], lr=0.1)
    with pytest.raises(ValueError, match="trust_coefficient must be > 0, got 0"):
        LARC(inner, trust_coefficient=0)
    with pytest.raises(ValueError, match="eps must be >= 0, got -1"):
        LARC(inner, eps=-1)
    dense, table = param([1.0]), nn.Embedding(3, 2, sparse=True)
    dense.grad = torch.ones_like(dense)
    table(torch.tensor([1])).sum().backward()
    optimizer = LARC(torch.optim.SGD([dense, table.weight], lr=0.1, weight_decay=0.1))
    with pytest.raises(NotImplementedError, match="parameter 1 of group 0 is sparse"):
        optimizer.step()
    assert dense.grad.item() == 1.0
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
