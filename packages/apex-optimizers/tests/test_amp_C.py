"""amp_C: the old positional signatures, chunk sizes that change nothing, texts of errors."""

import os
import subprocess
import sys

import amp_C
import pytest
import torch

from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.grids import HALVES
from apex_testkit.optimizers import adam_reference, sgd_reference

SIZES = [0, 1, 65, 1023, 70_001]
CHUNKS = [2048 * 32, 333, 33333, 1]


def make(device, dtype=torch.float32, sizes=SIZES):
    return [torch.randn(n, device=device).to(dtype) for n in sizes]


def zero_flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_axpby_and_norm(dtype, chunk, device):
    applier, flag = MultiTensorApply(chunk), zero_flag(device)
    xs, ys = make(device, dtype), make(device, dtype)
    scaled, summed = [torch.empty_like(x) for x in xs], [torch.empty_like(x) for x in xs]
    assert applier(amp_C.multi_tensor_scale, flag, [xs, scaled], 0.5) is None
    applier(amp_C.multi_tensor_axpby, flag, [xs, ys, summed], 2.0, -3.0, -1)
    norm, norms = applier(amp_C.multi_tensor_l2norm, flag, [xs], True)
    alone, empty = applier(amp_C.multi_tensor_l2norm, flag, [xs])
    assert flag.item() == 0
    for x, y, half, total in zip(xs, ys, scaled, summed, strict=True):
        assert torch.equal(half, x * 0.5)
        assert_as_accurate_as(lambda x, y: 2 * x - 3 * y, total, x, y)
    expected = torch.stack([x.double().norm() for x in xs])
    torch.testing.assert_close(norms.double(), expected, rtol=2e-7, atol=0)
    torch.testing.assert_close(norm.double(), expected.norm().reshape(1), rtol=2e-7, atol=0)
    assert torch.equal(norm, alone)
    assert empty.shape == (0,)


def test_results_do_not_depend_on_the_chunk_size(device):
    xs = make(device)
    results = [
        MultiTensorApply(c)(amp_C.multi_tensor_l2norm, zero_flag(device), [xs], True)
        for c in CHUNKS
    ]
    for norm, norms in results[1:]:
        assert torch.equal(norm, results[0][0])
        assert torch.equal(norms, results[0][1])


def test_megatrons_clipping(device):
    """Norm without per-tensor results, then scaling in place by a number or a 0-d tensor."""
    grads, flag = make(device), zero_flag(device)
    before = [g.clone() for g in grads]
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [grads, grads], 1.0 / norm)
    for now, then in zip(grads, before, strict=True):
        torch.testing.assert_close(now, then / norm)


def test_fairseqs_buffer_of_two_dimensions(device):
    xs = make(device)
    flag = torch.zeros((1, 1), dtype=torch.int32, device=device)
    norm, _ = amp_C.multi_tensor_l2norm(2048 * 32, flag, [xs], False)
    torch.testing.assert_close(norm[0], torch.cat(xs).norm())
    xs[2][7] = float("nan")
    amp_C.multi_tensor_l2norm(2048 * 32, flag, [xs], False)
    assert flag.item() == 1


# (gradients, parameters, copies)
SGD_DTYPES = [
    *((d, d, None) for d in FLOATS),
    *((d, torch.float32, d) for d in HALVES),
    *((torch.float32, torch.float32, d) for d in HALVES),
]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtypes", SGD_DTYPES, ids=str)
def test_sgd(dtypes, momentum, device):
    hyper = {"weight_decay": 0.1, "momentum": momentum, "lr": 0.05, "nesterov": momentum > 0}
    params = make(device, dtypes[1])
    start = [p.clone() for p in params]
    buffers = [torch.full_like(p, float("nan")) for p in params]  # not read in the first run
    copies = [] if dtypes[2] is None else [[torch.empty_like(p, dtype=dtypes[2]) for p in params]]
    history = [make(device, dtypes[0]) for _ in range(2)]
    for first_run, grads in zip((True, False), history, strict=True):
        args = (0.1, momentum, 0.0, 0.05, momentum > 0, first_run, False, 0.5)
        lists = [grads, params, buffers, *copies]
        multi_tensor_applier(amp_C.multi_tensor_sgd, zero_flag(device), lists, *args)
    for i, (p, s) in enumerate(zip(params, start, strict=True)):
        own = [g[i].to(p.dtype) for g in history]
        # The parameter is rounded once in each of two steps.
        assert_as_accurate_as(
            lambda p, *g: sgd_reference(p, *(0.5 * x for x in g), **hyper), p, s, *own, ulps=2
        )
        if copies:
            assert torch.equal(copies[0][i], p.to(dtypes[2]))


def test_sgd_honours_the_flag(device):
    params, flag = make(device), zero_flag(device) + 1
    before = [p.clone() for p in params]
    args = (0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)
    amp_C.multi_tensor_sgd(65536, flag, [make(device), params, make(device)], *args)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("mode", [0, 1], ids=["adam", "adamw"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adam(dtype, mode, device):
    params, grads = make(device, dtype), make(device, dtype)
    start = [p.clone() for p in params]
    moments = [[torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    args = (0.01, 0.9, 0.99, 1e-8, 1, mode, 1, 0.1)
    flag = zero_flag(device) + 1  # which adam does not look at
    multi_tensor_applier(amp_C.multi_tensor_adam, flag, [grads, params, *moments], *args)
    hyper = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "adam_w_mode": mode == 1}
    for p, s, g in zip(params, start, grads, strict=True):
        if dtype == torch.float64:  # with float32 moments
            expected = adam_reference(s, g, **hyper)
            torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-6)
        else:
            assert_as_accurate_as(lambda p, g: adam_reference(p, g, **hyper), p, s, g)


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_adam_capturable(dtype, master, device):
    params, grads = make(device, dtype), make(device, dtype)
    start, scaled = [p.clone() for p in params], [g.clone() for g in grads]
    moments = [[torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    masters = [p.float() for p in params]
    lr, step = torch.tensor(0.01, device=device), torch.ones(1, dtype=torch.int32, device=device)
    args = (lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.1, torch.tensor([0.5], device=device))
    op, lists = amp_C.multi_tensor_adam_capturable, [grads, params, *moments]
    if master:
        op, lists = amp_C.multi_tensor_adam_capturable_master, [*lists, masters]
    multi_tensor_applier(op, zero_flag(device) + 1, lists, *args)
    assert all(torch.equal(p, s) for p, s in zip(params, start, strict=True))
    multi_tensor_applier(op, zero_flag(device), lists, *args)
    hyper = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    for i, (p, s, g) in enumerate(zip(params, start, scaled, strict=True)):
        assert torch.equal(grads[i], g * 0.5)
        assert_as_accurate_as(lambda p, g: adam_reference(p, 0.5 * g, **hyper), p, s, g)
        if master:
            assert torch.equal(p, masters[i].to(dtype))


def test_parameters_may_require_gradients(device):
    params = [torch.nn.Parameter(p) for p in make(device)]
    args = (0.0, 0.0, 0.0, 0.1, False, True, False, 1.0)
    amp_C.multi_tensor_sgd(65536, zero_flag(device), [make(device), params, make(device)], *args)
    norm, _ = amp_C.multi_tensor_l2norm(65536, zero_flag(device), [params])
    assert not norm.requires_grad


def test_empty_lists_do_nothing(device):
    flag = zero_flag(device)
    amp_C.multi_tensor_scale(65536, flag, [[], []], 1.0)
    amp_C.multi_tensor_axpby(65536, flag, [[], [], []], 1.0, 1.0, -1)
    amp_C.multi_tensor_sgd(65536, flag, [[], [], []], 0, 0.9, 0, 0.1, False, True, False, 1.0)
    amp_C.multi_tensor_adam(65536, flag, [[]] * 4, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    norm, norms = amp_C.multi_tensor_l2norm(65536, flag, [[]], True)
    assert norm.tolist() == [0]
    assert norms.shape == (0,)


def test_texts_of_errors(device):
    xs, flag = make(device), zero_flag(device)
    for lists, message in (
        ([xs], r"tensor_lists.size\(\) != depth: expected 2 lists \(in, out\), got 1"),
        ([xs, xs[1:]], "Size mismatch among tensor lists"),
        ([xs[1:3], [xs[1], xs[3]]], r"size mismatch.*outputs\[1\] is \[1023\]"),
        ([[xs[2], xs[3].half()], xs[2:4]], r"one dtype. inputs\[0\] is .*inputs\[1\] is .*float16"),
        ([[torch.ones(4, 4, device=device)[:, ::2]]] * 2, "a tensor was not contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            amp_C.multi_tensor_scale(65536, flag, lists, 1.0)
    number, step = torch.ones(1, device=device), torch.ones(1, dtype=torch.int32, device=device)
    for own_flag, lr, own_step in (
        (flag[:0], number, step),
        (flag, number[:0], step),
        (flag, number, step[:0]),
    ):
        with pytest.raises(RuntimeError, match=r"must be one .* number on the device"):
            amp_C.multi_tensor_adam_capturable(
                65536, own_flag, [xs] * 4, lr, 0.9, 0.99, 1e-8, own_step, 1, 1, 0.0, number
            )
    with pytest.raises(RuntimeError, match="mode must be 0"):
        amp_C.multi_tensor_adam(1, flag, [xs] * 4, 0.1, 0.9, 0.99, 1e-8, 1, 2, 1, 0.0)


@pytest.mark.needs_gpus(1)
def test_lists_of_several_devices_are_refused():
    on_gpu, on_cpu, flag = make("cuda"), make("cpu"), zero_flag("cuda")
    for lists in ([on_gpu, on_cpu], [on_gpu[:1] + on_cpu[1:], on_gpu]):
        with pytest.raises(RuntimeError, match="not on the same device"):
            amp_C.multi_tensor_scale(65536, flag, lists, 1.0)


@pytest.mark.slow
def test_import_fails_where_kernels_cannot_run(tmp_path):
    """Fallbacks of clients depend on an ImportError that comes at import, and says what to do."""
    environment = {**os.environ, "APEX_JIT": "0", "APEX_CACHE_DIR": str(tmp_path)}
    code = (
        "from apex.optimizers._ops import library\n"
        "library.manifest = lambda: {}\n"  # also where this test runs on a wheel with kernels
        "try:\n    import amp_C\n"
        "except ImportError as error:\n    print(error)\n"
        "from apex.multi_tensor_apply import multi_tensor_applier\n"
        "print(multi_tensor_applier.available)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "neither prebuilt in this installation of apex-optimizers" in result.stdout
    assert "because APEX_JIT=0 forbids compiling them." in result.stdout
    assert "compiler" not in result.stdout  # which is not the reason
    assert result.stdout.splitlines()[-1] == "False"
