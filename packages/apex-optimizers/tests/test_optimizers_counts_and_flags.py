"""What groups count on the device, refused captures, and the flag for subclasses of Apex's."""

import copy
import pickle

import pytest
import torch

from apex import optimizers
from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

CAPTURABLE = [FusedAdam, FusedLAMB, FusedNovoGrad]


def step(optimizer, params, with_gradients):
    for p, has_gradient in zip(params, with_gradients, strict=True):
        p.grad = torch.ones_like(p) if has_gradient else None
    optimizer.step()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("cls", CAPTURABLE)
def test_groups_count_alike_with_and_without_capturable(cls, first, device):
    """A parameter joins late, and others pause."""
    patterns = [(True, False), (True, False), (True, True), (False, True), (False, False)]
    counts = []
    for capturable in (False, True):
        params = [torch.nn.Parameter(torch.ones(4, device=device)) for _ in range(2)]
        optimizer = cls(params, lr=0.1, capturable=capturable)
        own = []
        for pattern in patterns:
            step(optimizer, params, pattern if first == 0 else pattern[::-1])
            own.append(int(optimizer.param_groups[0]["step"]))
        own += sorted(int(optimizer.state[p]["step"]) for p in params)
        counts.append(own)
    assert counts[0] == counts[1] == [1, 2, 3, 4, 5, 2, 3]


def test_a_skipped_step_does_not_count_for_the_group(device):
    params = [torch.nn.Parameter(torch.ones(4, device=device))]
    optimizer = FusedAdam(params, lr=0.1, capturable=True)
    for found_inf in (1.0, 0.0, 1.0, 0.0):
        optimizer.found_inf = torch.tensor(found_inf, device=device)
        step(optimizer, params, [True])
    assert optimizer.param_groups[0]["step"].item() == 2
    assert optimizer.param_groups[0]["step"] is not optimizer.state[params[0]]["step"]


@pytest.mark.parametrize("cls", CAPTURABLE)
def test_lr_is_on_the_device_of_the_parameters_at_once(cls, device):
    optimizer = cls([torch.nn.Parameter(torch.ones(4, device=device))], capturable=True)
    assert optimizer.param_groups[0]["lr"].device == torch.empty(0, device=device).device


@pytest.mark.parametrize("name", sorted({*optimizers.__all__} - {"CPUOffload"}))
def test_the_overflow_buffer_is_where_the_parameters_are(name, device):
    """A flag on another device would be refused by the functions of amp_C."""
    params = [torch.nn.Parameter(torch.ones(4, device=device))]
    optimizer = getattr(optimizers, name)(params, lr=0.1)
    buffer = optimizer._dummy_overflow_buf
    assert buffer is optimizer._dummy_overflow_buf
    assert (buffer.dtype, buffer.device, buffer.tolist()) == (torch.int32, params[0].device, [0])
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert again._dummy_overflow_buf.tolist() == [0]
    optimizer._dummy_overflow_buf = own = torch.zeros(1, dtype=torch.int32, device=device)
    assert optimizer._dummy_overflow_buf is own


@pytest.mark.needs_gpus(1)
@pytest.mark.parametrize("first", ["empty", "cpu"])
@pytest.mark.parametrize("cls", CAPTURABLE)
def test_captures_are_refused_whatever_the_first_group_is(cls, first):
    param = torch.nn.Parameter(torch.ones(4, device="cuda"))
    others = [torch.nn.Parameter(torch.ones(4))] if first == "cpu" else []
    optimizer = cls([{"params": others}, {"params": [param]}])
    param.grad = torch.ones_like(param)
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@pytest.mark.parametrize("first", ["empty", "cpu"])
def test_capturing_is_asked_of_all_parameters(first, monkeypatch):
    """As above where there is no GPU."""

    class OnGpu(torch.nn.Parameter):
        is_cuda = True

    from apex.optimizers.stepping.optimizer import is_capturing

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    others = [torch.nn.Parameter(torch.ones(4))] if first == "cpu" else []
    assert not is_capturing([{"params": others}])
    assert is_capturing([{"params": others}, {"params": [OnGpu(torch.ones(4))]}])


@pytest.mark.parametrize("steps", [0, 2])
def test_get_momentums_does_not_end_the_first_step(steps, device):
    """Dampening, which the first step does not have, shows which step is the first."""
    results = []
    for asks in (False, True):
        param = torch.nn.Parameter(torch.zeros(2, device=device))
        optimizer = FusedSGD([param], lr=1.0, momentum=0.9, dampening=0.5)
        for _ in range(steps):
            step(optimizer, [param], [True])
        if asks:
            (buffer,), is_first = optimizer.get_momentums([param])
            assert is_first == (steps == 0)
            assert buffer.eq(0).all() == is_first
        step(optimizer, [param], [True])
        results.append(param.detach().clone())
    assert torch.equal(*results)


def test_buffers_of_get_momentums_that_were_written_to_are_used(device):
    param = torch.nn.Parameter(torch.zeros(2, device=device))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    optimizer.get_momentums([param])[0][0].fill_(4.0)
    step(optimizer, [param], [True])
    assert param.eq(-3.0).all()
