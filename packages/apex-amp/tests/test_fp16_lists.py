"""Master parameters, loss scalers and 16-bit models for training loops written by hand."""

import pytest
import torch
from torch import nn

from apex import fp16_utils
from apex.fp16_utils import (
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from apex.fp16_utils.fp16util import backwards_debug_hook

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32


def test_exports():
    assert set(fp16_utils.__all__) == {
        *("BN_convert_float", "network_to_half", "prep_param_lists", "tofp16", "to_python_float"),
        *("model_grads_to_master_grads", "master_params_to_model_params", "clip_grad_norm"),
        *("convert_module", "convert_network", "FP16Model", "FP16_Optimizer", "LossScaler"),
        "DynamicLossScaler",
    }
    assert all(hasattr(fp16_utils, name) for name in fp16_utils.__all__)
    assert clip_grad_norm is torch.nn.utils.clip_grad_norm_


def test_models(device):
    network = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)).to(device)
    model = network_to_half(network)
    assert isinstance(model[0], tofp16)
    assert model[1] is network
    x = torch.randn(3, 2, 4, device=device)
    assert model[0](x).dtype is half
    assert (network[0].weight.dtype, network[1].weight.dtype) == (half, single)
    network = nn.Bilinear(2, 2, 2).to(device)
    model = FP16Model(network)
    assert model.network is network
    assert model(x[..., :2], x[..., 2:]).dtype is half


def network(device, dtype=half):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).to(device, dtype)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [half, bfloat16], ids=str)
def test_masters(dtype, flat, device):
    model = network(device, dtype)
    model[0].bias.requires_grad_(False)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert params == [model[0].weight, model[1].weight]
    assert [list(m.shape) for m in masters] == ([[20]] if flat else [[4, 3], [2, 4]])
    values = torch.cat([p.detach().flatten() for p in params])
    for master in masters:
        assert master.is_leaf
        assert master.requires_grad
        assert master.dtype is single
        assert master.device == params[0].device
    assert torch.equal(torch.cat([m.detach().flatten() for m in masters]), values.float())
    if flat:
        assert masters[0].grad.abs().sum() == 0

    model(torch.ones(1, 3, device=device, dtype=dtype)).sum().backward()
    model_grads_to_master_grads(params, masters, flat_master=flat)
    grads = torch.cat([p.grad.flatten() for p in params])
    assert torch.equal(torch.cat([m.grad.flatten() for m in masters]), grads.float())
    assert {m.grad.dtype for m in masters} == {single}
    torch.optim.SGD(masters, lr=0.25).step()
    master_params_to_model_params(params, masters, flat_master=flat)
    assert torch.equal(torch.cat([p.flatten() for p in params]), values - 0.25 * grads)

    memory = [m.grad.data_ptr() for m in masters]
    params[0].grad = None
    model_grads_to_master_grads(params, masters, flat_master=flat)
    if flat:
        assert masters[0].grad[:12].abs().sum() == 0
        assert masters[0].grad.data_ptr() == memory[0]
    else:
        assert masters[0].grad is None
        assert masters[1].grad.data_ptr() == memory[1]


def test_masters_of_float32_parameters_are_copies():
    model = network("cpu", single)
    params, masters = prep_param_lists(model)
    assert not {p.data_ptr() for p in params} & {m.data_ptr() for m in masters}


def test_refusals():
    model = network("cpu")
    model[1].float()
    with pytest.raises(TypeError, match=r"float16 on cpu, torch.float32.*flat_master=False"):
        prep_param_lists(model, flat_master=True)
    params, masters = prep_param_lists(model)
    for function in (model_grads_to_master_grads, master_params_to_model_params):
        with pytest.raises(ValueError, match="expected 3 master_params"):
            function(params, masters[:1])
        with pytest.raises(ValueError, match="flat_master=True"):
            function(params, masters, flat_master=True)
        with pytest.raises(ValueError, match="elements"):
            function(params, [torch.ones(3)], flat_master=True)
    with pytest.raises(RuntimeError, match=r"shape \[2\]"):
        backwards_debug_hook(torch.ones(2))


def test_to_python_float():
    assert to_python_float(torch.tensor([1.5])) == 1.5
    assert to_python_float([2.5]) == 2.5


def test_static_loss_scaler():
    scaler = LossScaler(8.0)
    assert (scaler.cur_scale, scaler.loss_scale) == (8.0, 8.0)
    bad = nn.Parameter(torch.ones(1))
    bad.grad = torch.tensor([float("inf")])
    assert scaler.has_overflow([bad]) is False
    assert LossScaler._has_inf_or_nan(bad.grad) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0
    weight = nn.Parameter(torch.ones(2))
    scaler.backward((weight * 3).sum())
    assert weight.grad.tolist() == [24.0, 24.0]
    scaled = scaler.scale_gradient(None, (torch.ones(1), None), None)
    assert scaled[0].item() == 8.0
    assert scaled[1] is None
    assert LossScaler().loss_scale == 1


def test_dynamic_loss_scaler_finds_overflows(device):
    scaler = DynamicLossScaler()
    params = [nn.Parameter(torch.ones(4, device=device).half()) for _ in range(3)]
    params[0].grad = torch.full_like(params[0], 6e4)  # whose sum is beyond float16
    assert not scaler.has_overflow(params)
    assert not scaler.has_overflow([])
    for value in ("inf", "-inf", "nan"):
        params[2].grad = torch.tensor([1, 1, 1, float(value)], device=device).half()
        assert scaler.has_overflow(params)
        assert DynamicLossScaler._has_inf_or_nan(params[2].grad)
    params[2] = nn.Parameter(torch.ones(4, device=device))
    params[2].grad = torch.tensor([1.0, float("nan"), 0.0, 0.0], device=device).to_sparse()
    assert scaler.has_overflow(params)


def test_dynamic_loss_scaler_adapts():
    scaler = DynamicLossScaler(init_scale=4.0, scale_factor=2.0, scale_window=3)
    assert (scaler.cur_iter, scaler.last_overflow_iter) == (0, -1)
    seen = []
    for overflow in (0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0):
        scaler.update_scale(bool(overflow))
        seen.append(scaler.loss_scale)
    assert seen == [4.0, 4.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert (scaler.cur_iter, scaler.last_overflow_iter) == (11, 6)
    assert (scaler.scale_factor, scaler.scale_window) == (2.0, 3)
    default = DynamicLossScaler()
    assert (default.loss_scale, default.scale_factor, default.scale_window) == (2**32, 2.0, 1000)
    weight = nn.Parameter(torch.ones(1))
    loss = (weight * 2).sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert weight.grad.item() == 8.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"init_scale": 0}, "init_scale must be positive"),
        ({"init_scale": float("nan")}, "init_scale must be positive"),
        ({"scale_factor": 1.0}, "scale_factor must be above 1"),
        ({"scale_window": 0}, "scale_window must be at least 1"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        DynamicLossScaler(**arguments)
    with pytest.raises(ValueError, match="scale must be positive"):
        LossScaler(-1.0)
