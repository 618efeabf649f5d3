"""clip_grad_norm_ against float64, over dtypes, norms and layouts, and where torch answers."""

import math
import sys

import pytest
import torch

from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.clip_grad.ops import clip_grad_, clip_grad_total_norm
from apex_testkit import FLOATS, assert_as_accurate_as, opcheck_samples

SIZES = {
    "one": [(1,)],
    "scalar": [()],
    "empty": [(0,)],
    "with_empty": [(0,), (5,), (64,), (0,)],
    "odd": [(1,), (7,), (1023,)],
    "many": [(3,)] * 300,
    "large": [(65_537,), (257, 300)],
}
ORDERS = [1, 2, 2.0, math.inf]
OTHERS = [3, 0.5, -math.inf]


def parameters_of(grads):
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    return parameters


def make(shapes, device, *dtypes):
    grads = [torch.randn(shape, device=device) for shape in shapes]
    return [grad.to(dtypes[i % len(dtypes)]) for i, grad in enumerate(grads)]


@pytest.mark.parametrize("foreach", [None, False, True])
def test_foreach_changes_nothing(foreach):
    for order in (2.0, 3.0):  # ours, and torch's
        grads = make([(3,), (5, 7)], "cpu", torch.float32)
        parameters, others = parameters_of(grads), parameters_of(grads)
        norm = clip_grad_norm_(parameters, 0.1, order, foreach=foreach)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(others, 0.1, order))
        torch.testing.assert_close([p.grad for p in parameters], [p.grad for p in others])


def test_python_calls_do_not_grow_with_the_list():
    seen = []
    for count in (1, 300):
        parameters, calls = parameters_of(make([(1,)] * count, "cpu", torch.float32)), 0

        def note(frame, event, arg):
            nonlocal calls
            calls += event == "call"

        clip_grad_norm_(parameters, 1.0)
        sys.setprofile(note)
        clip_grad_norm_(parameters, 1.0)
        sys.setprofile(None)
        seen.append(calls)
    assert seen[0] == seen[1]


def norm_of(order, grads):
    x = torch.cat([g.flatten() for g in grads]).abs()
    if order == 2:  # vector_norm adds up less exactly
        return x.square().sum().sqrt()
    return x.sum() if order == 1 else torch.linalg.vector_norm(x, order)


def truth(grads, max_norm, order):
    """Norm and clipped gradients in float64."""
    norm = norm_of(order, [grad.double().cpu() for grad in grads])
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm, [grad.double().cpu() * coefficient for grad in grads]


def check(grads, max_norm, order):
    parameters = parameters_of(grads)
    norm = clip_grad_norm_(parameters, max_norm, order)
    expected, clipped = truth(grads, max_norm, order)
    assert norm.shape == ()
    assert norm.device == grads[0].device
    rtol = 1e-12 if all(grad.dtype == torch.float64 for grad in grads) else 5e-7
    torch.testing.assert_close(norm.double().cpu(), expected, rtol=rtol, atol=0)
    for parameter, grad, want in zip(parameters, grads, clipped, strict=True):
        assert parameter.grad.dtype == grad.dtype
        assert parameter.grad.stride() == grad.stride()
        eps = torch.finfo(grad.dtype).eps
        tiny = torch.finfo(grad.dtype).smallest_normal * eps  # the last place of subnormals
        torch.testing.assert_close(
            parameter.grad.double().cpu(), want, rtol=max(eps, rtol), atol=tiny
        )
    return norm


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("shapes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_against_float64(dtype, shapes, order, device):
    grads = make(shapes, device, dtype)
    empty = sum(map(torch.numel, grads)) == 0
    if empty and order == math.inf:  # the oracle has no largest of nothing
        assert clip_grad_norm_(parameters_of(grads), 0.5, order) == 0
        return
    norm = check(grads, 0.5, order)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    check(grads, 1e7, order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norm_is_as_accurate_as_torchs(dtype, device):
    grads = make([(70_001,), (333,)], device, dtype)
    for order in ORDERS:
        norm = clip_grad_norm_(parameters_of(grads), 1.0, order)
        assert_as_accurate_as(lambda *xs, order=order: norm_of(order, xs), norm, *grads)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_dtypes_mix(order, device):
    shapes = [(3,), (70,), (5, 9), (1000,), (1,)]
    assert check(make(shapes, device, *FLOATS), 0.5, order).dtype == torch.float64
    halves = make(shapes, device, torch.bfloat16, torch.float32)
    assert check(halves, 0.5, order).dtype == torch.float32


def test_errors_of_other_things_are_raised(monkeypatch, device):
    """Full memory is no reason to call the kernel again."""
    calls = []

    def fail_once(grads, order):
        calls.append(grads)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return clip_grad_total_norm(grads, order)

    monkeypatch.setattr(
        sys.modules["apex.contrib.clip_grad.clip_grad"], "clip_grad_total_norm", fail_once
    )
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(torch.OutOfMemoryError):
        clip_grad_norm_(parameter, 1.0)
    assert len(calls) == 1


def test_devices_mix(device):
    grads = [torch.randn(70, device=device), torch.randn(9), torch.randn(5, device=device)]
    check(grads, 0.5, 2)
    check(grads[::-1], 0.5, 2)


@pytest.mark.parametrize("order", OTHERS, ids=str)
def test_torch_computes_other_orders(order, device):
    check(make([(3,), (70,)], device, torch.float32), 0.5, order)


def test_order_zero_is_torchs(device):
    ours, theirs = (parameters_of([torch.ones(n, device=device) for n in (3, 70)]) for _ in "ab")
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5, 0)
    assert torch.equal(clip_grad_norm_(ours, 0.5, 0), expected)
    assert torch.equal(ours[0].grad, theirs[0].grad)


def test_large_and_small_numbers_neither_overflow_nor_vanish(device):
    for value in (1e25, 1e-25):
        check([torch.full((70_001,), value, device=device)], value, 2)
        check([torch.full((70_001,), value, device=device)], value, 1)
    many = [torch.full((1000,), 3e38, device=device)]
    for order, expected in ((1, 3e41), (2, 3e38 * 1000**0.5)):
        norm = clip_grad_total_norm(many, order).item()
        assert norm == pytest.approx(expected, rel=1e-6)


def test_layouts(device):
    dense = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    check([dense, torch.randn(4, 6, device=device).t()], 0.5, 2)
    gaps = torch.randn(8, 8, device=device)[:, ::2]
    parameter = torch.nn.Parameter(torch.zeros(8, 4, device=device))
    parameter.grad = gaps
    norm, (want,) = truth([gaps], 0.5, 2)
    torch.testing.assert_close(clip_grad_norm_(parameter, 0.5).double().cpu(), norm)
    torch.testing.assert_close(gaps.double().cpu(), want)


def test_sparse_and_complex_and_repeated_gradients_are_torchs(device):
    embedding = torch.nn.Embedding(10, 3, sparse=True, device=device)
    embedding(torch.tensor([1, 2], device=device)).sum().backward()
    phases = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64, device=device))
    phases.grad = torch.randn(3, dtype=torch.complex64, device=device)
    twice = parameters_of(make([(5,)], device, torch.float32)) * 2
    for parameters in ([embedding.weight], [phases], twice):
        answers = []
        for function in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            kept = [(p, p.grad.clone()) for p in parameters]
            try:
                answers.append([function(parameters, 0.5), *(p.grad for p in parameters)])
            except (RuntimeError, NotImplementedError) as error:
                answers.append([type(error)])
            answers[-1] = [a.clone() if isinstance(a, torch.Tensor) else a for a in answers[-1]]
            for p, grad in kept:
                p.grad = grad
        for ours, theirs in zip(*answers, strict=True):
            if isinstance(ours, torch.Tensor):
                torch.testing.assert_close(ours, theirs)
            else:
                assert ours is theirs


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_not_finite(bad, order, device):
    grads = [torch.ones(70, device=device), torch.tensor([1.0, bad], device=device)]
    parameters = parameters_of(grads)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: the total norm of order .* is "):
        clip_grad_norm_(parameters, 1.0, order, error_if_nonfinite=True)
    for parameter, grad in zip(parameters, grads, strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7), grad.nan_to_num(7))
    theirs = parameters_of(grads)
    norm = clip_grad_norm_(parameters, 1.0, order)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0, order)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for parameter, other in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, equal_nan=True)


def test_what_has_no_gradient_is_ignored(device):
    assert torch.equal(clip_grad_norm_([], 1.0), torch.tensor(0.0))
    idle = torch.nn.Parameter(torch.zeros(3, device=device))
    assert torch.equal(clip_grad_norm_(idle, 1.0), torch.tensor(0.0))
    (parameter,) = parameters_of([torch.ones(4, device=device)])
    assert clip_grad_norm_(iter([idle, parameter]), 1.0).item() == 2
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in []), 1.0)


def test_a_module_instead_of_its_parameters():
    linear = torch.nn.Linear(2, 2)
    for model in (linear, torch.nn.Sequential(linear)):
        kind = type(model).__name__
        with pytest.raises(TypeError, match=rf"parameters is a {kind}; .* model.parameters\(\)"):
            clip_grad_norm_(model, 1.0)
    listed = torch.nn.ParameterList(linear.parameters())
    assert clip_grad_norm_(listed, 1.0) == 0


def test_versions_rise_and_grad_mode_stays(device):
    (parameter,) = parameters_of([torch.ones(4, device=device)])
    version = parameter.grad._version
    clip_grad_norm_([parameter], 1.0)
    assert parameter.grad._version > version
    assert torch.is_grad_enabled()


def test_compiled(device):
    compiled = torch.compile(clip_grad_norm_, fullgraph=True, backend="aot_eager")
    grads = make([(3,), (70,)], device, torch.float32, torch.bfloat16)
    ours, eager = parameters_of(grads), parameters_of(grads)
    assert torch.equal(compiled(ours, 0.5), clip_grad_norm_(eager, 0.5))
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_opcheck(device):
    grads = make([(3,), (70,)], device, torch.float32)
    opcheck_samples(clip_grad_total_norm, [(grads, order) for order in (1.0, 2.0, math.inf)])
    norm = torch.full((1,), 9.0, device=device, dtype=torch.float64)
    opcheck_samples(clip_grad_, [(grads, norm, 0.5)])


def test_bad_input(device):
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="norm_type must be 1, 2 or inf, got 3"):
        clip_grad_total_norm([x], 3.0)
    with pytest.raises(RuntimeError, match="at least one tensor, got none"):
        clip_grad_total_norm([], 2.0)
    with pytest.raises(RuntimeError, match="norm must be one float64 number"):
        clip_grad_([x], torch.ones(1, device=device), 0.5)
    assert torch.equal(x, torch.ones_like(x))
