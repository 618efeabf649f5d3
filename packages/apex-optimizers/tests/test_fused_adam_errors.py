"""Bad input to FusedAdam: clear errors, and nothing changed."""

import copy

import pytest
import torch

from apex.optimizers import FusedAdam


def snapshot(params, optimizer):
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])


@pytest.mark.parametrize("several_buckets", [False, True])
@pytest.mark.parametrize("warm", [False, True], ids=["first_step", "later_step"])
def test_a_failed_step_changes_nothing(warm, several_buckets, device):
    """Autograd refuses gradients of another dtype, shape or device; sparse ones come through."""
    dtypes = [torch.float32, torch.bfloat16 if several_buckets else torch.float32]
    params = [torch.nn.Parameter(torch.ones(4, 4, device=device, dtype=d)) for d in dtypes]
    optimizer = FusedAdam(params, lr=0.1)
    if warm:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    values, state = snapshot(params, optimizer)
    params[0].grad = torch.ones_like(params[0])
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    with pytest.raises(RuntimeError, match="is sparse"):
        optimizer.step()
    after_values, after_state = snapshot(params, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(values, after_values, strict=True))
    assert state.keys() == after_state.keys()
    for index, entry in state.items():
        assert all(torch.equal(entry[k], after_state[index][k]) for k in entry)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be >= 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be in \[0, 1\), got 1.0"),
        ({"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\]"),
        ({"eps": -1e-8}, ValueError, "eps must be >= 0"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay must be >= 0, got nan"),
        ({"lr": torch.ones(2)}, ValueError, r"lr must have one element, got shape \[2\]"),
    ],
)
def test_bad_hyper_parameters(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **options)


def test_bad_parameters_and_arguments():
    short_param = torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"params\[0\] must be float64.*float8_e5m2"):
        FusedAdam([short_param])
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    with pytest.raises(TypeError, match="params"):
        optimizer.add_param_group({"params": [short_param]})
    assert len(optimizer.param_groups) == 1
    for name in ("grads", "output_params", "scale", "grad_norms", "grad_scaler"):
        with pytest.raises(RuntimeError, match=name):
            optimizer.step(**{name: [1]})
    with pytest.raises(RuntimeError, match="scale was an argument"):
        optimizer.step(None, None, None, 2.0)
    for positional, named in (
        ((), {"nothing": None}),
        ((None,) * 7, {}),
        ((None, None), {"grads": None}),
    ):
        with pytest.raises(TypeError, match="expected at most closure, grads"):
            optimizer.step(*positional, **named)
    assert optimizer.step(grads=None) is None
    assert optimizer.step(lambda: 3, None, None, None, None, None) == 3
    assert optimizer.step(None, None, None, grad_norms=None) is None


def test_a_strided_parameter_is_refused(device):
    param = torch.nn.Parameter(torch.ones(8, 4, device=device)[:, ::2])
    param.grad = torch.ones(8, 2, device=device)
    with pytest.raises(RuntimeError, match="not contiguous"):
        FusedAdam([param]).step()


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("count", [1, 40], ids=["few", "held"])
def test_backward_through_values_of_before_the_step_is_refused(count, capturable, device):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(count)]
    optimizer = FusedAdam(params, capturable=capturable)
    for _ in range(3):
        loss = sum((p * p).sum() for p in params)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", "1e-3"), ("eps", "1e-8"), ("weight_decay", None), ("betas", (0.9, "0.999"))],
)
def test_a_number_that_yaml_read_as_text(name, value):
    params = [torch.nn.Parameter(torch.ones(3))]
    hint = " It is text. \\(YAML reads 1e-3 so" if value else ""
    with pytest.raises(TypeError, match=rf"FusedAdam: {name} of a group must be a number.*{hint}"):
        FusedAdam(params, **{name: value})
    optimizer = FusedAdam(params)
    with pytest.raises(TypeError, match=f"FusedAdam: {name} of a group must be a number"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(2)), name: value})


@pytest.mark.parametrize("betas", [(0.9, "x"), (0.9, None), (0.9,), [0.9, "x"], (0.9, 0.9, 0.9)])
def test_betas_of_a_group_that_are_no_pair_of_numbers(betas, device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    param.grad = torch.ones_like(param)
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0]["betas"] = betas
    with pytest.raises((TypeError, ValueError), match="betas of a group must be"):
        optimizer.step()
    assert torch.equal(param, before)
