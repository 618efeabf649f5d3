"""Freed and shared memory, versions and devices: what raw operators and optimizers refuse."""

import pytest
import torch

from apex.multi_tensor_apply.multi_tensor_l2norm import multi_tensor_l2norm
from apex.multi_tensor_apply.multi_tensor_scale import multi_tensor_scale
from apex.optimizers import FusedAdam
from apex.optimizers.fused_lamb.ops import lamb_stage1, lamb_stage2

amp_C = pytest.importorskip("amp_C")


@pytest.fixture
def flag():
    return torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("count", [3, 40], ids=["lists", "held lists"])
@pytest.mark.parametrize("freed", ["param", "grad", "exp_avg"])
def test_freed_memory_is_refused(count, freed):
    """As FSDP leaves parameters, before the third step: once a segmentation fault."""
    params = [torch.nn.Parameter(torch.randn(4)) for _ in range(count)]
    optimizer = FusedAdam(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    before = params[0].detach().clone()
    state = optimizer.state[params[2]]
    {"param": params[2], "grad": params[2].grad, **state}[freed].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"2\]? is \[4\] float32 .* not allocated yet"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_view_beyond_its_storage_is_refused(flag):
    view = torch.randn(8)[4:]
    view.untyped_storage().resize_(16)
    with pytest.raises(RuntimeError, match=r"inputs\[0\] is .* its storage has 16 bytes"):
        multi_tensor_l2norm([view])


def test_overlaps_are_refused(flag):
    base = torch.arange(6.0)
    for inputs, outputs in (
        ([base[:5]], [base[1:]]),
        ([base, torch.ones(6)], [torch.ones(6), base]),
        ([torch.ones(6)] * 2, [base, base]),
        ([base[:3]], [base.view(torch.float16)[:3]]),
        ([torch.ones(2)], [torch.ones(1).expand(2)]),
    ):
        with pytest.raises(RuntimeError, match=r"shares memory with|was not contiguous"):
            multi_tensor_scale(inputs, outputs, flag, 2.0)
    assert torch.equal(base, torch.arange(6.0))


@pytest.mark.parametrize("name", ["param_norms", "update_norms"])
def test_numbers_in_written_memory_are_refused(name):
    """Once later tensors took the norms that stepping the first had overwritten."""
    params, updates = ([torch.ones(4, dtype=torch.float64) for _ in range(2)] for _ in range(2))
    norms = {n: torch.ones(2, dtype=torch.float64) for n in ("param_norms", "update_norms")}
    norms[name] = params[0][1:3]
    with pytest.raises(RuntimeError, match=rf"lamb_stage2: {name} .* shares memory with tensor 0"):
        lamb_stage2(params, updates, **norms, lr=0.1, weight_decay=0.1, use_nvlamb=False)
    assert torch.equal(params[0], torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("written", ["exp_avgs", "exp_avg_sqs", "updates"])
@pytest.mark.parametrize("name", ["per_tensor_decay", "global_grad_norm"])
def test_numbers_in_memory_of_moments_are_refused(written, name):
    lists = {n: [torch.ones(4)] for n in ("grads", "params", "exp_avgs", "exp_avg_sqs", "updates")}
    numbers = {"per_tensor_decay": torch.zeros(1), "global_grad_norm": torch.ones(1)}
    numbers[name] = lists[written][0][2:3]
    rest = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "step": 1, "max_grad_norm": 1.0}
    with pytest.raises(RuntimeError, match=rf"lamb_stage1: {name} .* shares memory with tensor 0"):
        lamb_stage1(**lists, **numbers, **rest)
    assert torch.equal(lists[written][0], torch.ones(4))


def test_one_overlap_among_many_is_found(flag):
    """In lists of any order: long ones are sorted in another way than short ones."""
    memory = torch.zeros(2, 400, 8)
    inputs, outputs = ([*half.view(-1).split(8)] for half in memory)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0)).tolist()
    far = [torch.zeros(2**18 + i) for i in range(3)]  # of the allocator's other places
    inputs = [inputs[i] for i in order] + [t.clone() for t in far]
    outputs = [outputs[i] for i in order] + far
    multi_tensor_scale(inputs, outputs, flag, 2.0)
    for index in (0, 123, 399):
        spoiled = [*inputs]
        spoiled[index] = outputs[(index + 200) % 400]
        with pytest.raises(RuntimeError, match=rf"shares memory with inputs\[{index}\]"):
            multi_tensor_scale(spoiled, outputs, flag, 2.0)
        spoiled = [*outputs]
        spoiled[index] = outputs[402][5:13]
        with pytest.raises(RuntimeError, match=rf"outputs\[({index}|402)\] .* outputs\["):
            multi_tensor_scale(inputs, spoiled, flag, 2.0)


def test_in_place_is_no_overlap(flag):
    base = torch.arange(6.0)
    parts = [base[:2], base[2:2], base[2:]]
    for _ in range(2):  # the second time from what is remembered
        multi_tensor_scale(parts, parts, flag, 2.0)
    assert torch.equal(base, torch.arange(6.0) * 4)
    with pytest.raises(RuntimeError, match=r"outputs\[0\].* shares memory with inputs\[0\]"):
        multi_tensor_scale([base[1:3], parts[1], parts[2]], parts, flag, 2.0)


@pytest.mark.parametrize("legacy", [True, False])
def test_versions_rise(legacy, flag):
    w, x = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    y = (x * w).sum()
    if legacy:  # Apex's scripts call it on parameters in grad mode
        amp_C.multi_tensor_scale(65536, flag, [[w], [w]], 0.5)
    else:
        with torch.no_grad():
            multi_tensor_scale([w], [w], flag, 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    assert flag._version == 1


def test_gradients_that_nobody_computes_are_refused(flag):
    w = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"a tensor of outputs requires a gradient"):
        multi_tensor_scale([w], [w], flag, 0.5)
    assert torch.equal(w, torch.ones(4))


def test_versions_under_inference_mode(flag):
    old = torch.ones(4)
    with torch.inference_mode():
        new = torch.ones(4)
        multi_tensor_scale([new], [old], flag, 0.5)
        multi_tensor_scale([old], [new], flag, 0.5)
    assert old._version == 1
    assert torch.equal(new, torch.full((4,), 0.25))


def test_meta_and_other_tensors_are_refused(flag):
    real, meta = torch.ones(4), torch.empty(4, device="meta")
    for inputs, outputs, number in (
        ([meta], [real], flag),
        ([real], [meta], flag),
        ([real], [real], flag.to("meta")),
        ([meta], [meta], flag),
    ):
        with pytest.raises(RuntimeError, match="tensors of one call must be on one device"):
            multi_tensor_scale(inputs, outputs, number, 2.0)
    assert multi_tensor_scale([meta], [meta], flag.to("meta"), 2.0) is None


def test_none_is_named():
    with pytest.raises(RuntimeError, match="multi_tensor_scale: flag must be a tensor, got None"):
        multi_tensor_scale([torch.ones(2)], [torch.ones(2)], None, 2.0)
