"""Optimizer steps and multi-tensor ops on a GPU: streams, CUDA graphs, several devices."""

import pytest
import torch

from apex.multi_tensor_apply import multi_tensor_axpby, multi_tensor_l2norm, multi_tensor_scale
from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from apex_testkit import FLOATS
from apex_testkit.gpu import (
    assert_captures,
    assert_repeatable,
    assert_runs_on_current_stream,
    assert_runs_on_other_device,
)


def zero_flag(x):
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def scale(x, y):
    flag, outputs = zero_flag(x), [torch.empty_like(x), torch.empty_like(y)]
    multi_tensor_scale([x, y], outputs, flag, 0.3)
    return [*outputs, flag]


def axpby(x, y):
    flag, outputs = zero_flag(x), [torch.empty_like(x)]
    multi_tensor_axpby([x], [y], outputs, flag, 0.3, -2.0)
    return [*outputs, flag]


def l2norm(x, y):
    return multi_tensor_l2norm([x, y], zero_flag(x), True)


def stepper(optimizer_class, **options):
    """Two steps from the values of x with gradients y; parameters and state are made anew."""

    def step(x, y):
        param = torch.nn.Parameter(x.detach().clone())
        optimizer = optimizer_class([param], lr=1e-2, weight_decay=0.1, **options)
        for _ in range(2):
            param.grad = y.clone()
            optimizer.step()
        return [param.detach()]

    return step


CASES = {
    "scale": scale,
    "axpby": axpby,
    "l2norm": l2norm,
    "adagrad": stepper(FusedAdagrad),
    "adam": stepper(FusedAdam),
    "adam_amsgrad": stepper(FusedAdam, amsgrad=True),
    "adam_capturable": stepper(FusedAdam, capturable=True),
    "lamb": stepper(FusedLAMB),
    "lamb_capturable": stepper(FusedLAMB, capturable=True),
    "lars": stepper(FusedLARS, momentum=0.9),
    "mixed_lamb": stepper(FusedMixedPrecisionLamb),
    "novograd": stepper(FusedNovoGrad),
    "novograd_capturable": stepper(FusedNovoGrad, capturable=True),
    "sgd": stepper(FusedSGD, momentum=0.9),
}
all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def values(device, dtype=torch.float32):
    return torch.randn(2, 100_003, device=device).to(dtype).unbind()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@all_cases
def test_is_repeatable(case, dtype, device):
    assert_repeatable(case, *values(device, dtype))


@pytest.mark.needs_gpus(1)
@all_cases
def test_uses_the_current_stream(case):
    assert_runs_on_current_stream(case, *values("cuda"))


@pytest.mark.needs_gpus(1)
@pytest.mark.parametrize("case", [scale, axpby, l2norm])
def test_ops_in_a_graph(case):
    assert_captures(case, *values("cuda"))


@pytest.mark.needs_gpus(1)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (FusedAdagrad, {}),
        (FusedAdam, {"capturable": True}),
        (FusedLAMB, {"capturable": True}),
        (FusedLARS, {"momentum": 0.9}),
        (FusedMixedPrecisionLamb, {}),
        (FusedNovoGrad, {"capturable": True}),
        (FusedSGD, {"momentum": 0.9}),
    ],
    ids=["adagrad", "adam", "lamb", "lars", "mixed_lamb", "novograd", "sgd"],
)
def test_captured_steps_go_on_where_the_last_ended(cls, options):
    """A captured step, replayed, does what as many plain steps do: step counts live on the GPU."""
    x, y = values("cuda")
    params = [torch.nn.Parameter(x.clone()) for _ in range(2)]
    captured, plain = (cls([p], lr=1e-2, **options) for p in params)
    for param in params:
        param.grad = y.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        plain.step()
    assert torch.equal(*(p.detach() for p in params))


@pytest.mark.needs_gpus(2)
@all_cases
def test_uses_the_device_of_its_tensors(case):
    assert_runs_on_other_device(case, *values("cuda:0"))


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_captures_that_would_repeat_a_step_number_are_refused(cls, device, monkeypatch):
    """Where there is no GPU, the stream is said to be capturing."""
    monkeypatch.setattr("apex.optimizers.stepping.optimizer.is_capturing", lambda params: True)
    param = torch.nn.Parameter(torch.ones(3, device=device))
    param.grad = torch.ones_like(param)
    optimizer = cls([param])
    message = rf"CUDA graph is being captured.*{cls.__name__}\(\.\.\., capturable=True\)"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(param, torch.ones_like(param))
    assert not optimizer.state


def test_captures_that_may_be_replayed_are_not_refused(device, monkeypatch):
    monkeypatch.setattr("apex.optimizers.stepping.optimizer.is_capturing", lambda params: True)
    capturable = [(c, {"capturable": True}) for c in (FusedAdam, FusedLAMB, FusedNovoGrad)]
    for cls, options in [(FusedAdagrad, {}), *capturable]:
        param = torch.nn.Parameter(torch.ones(3, device=device))
        param.grad = torch.ones_like(param)
        cls([param], **options).step()
        assert param.ne(1).all()
