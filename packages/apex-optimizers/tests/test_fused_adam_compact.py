"""FusedAdam with small states against float64: moments, remainders, decoupled gradients."""

import math

import pytest
import torch

from apex.optimizers import FusedAdam
from apex.optimizers.fused_adam.moments import remainder_of, scales_for, whole_master
from apex.optimizers.fused_adam_compact import adam_compact_peaks, adam_step_compact
from apex_testkit import assert_as_accurate_as
from apex_testkit.grids import HALVES, LAYOUTS, channels_last
from apex_testkit.opcheck import opcheck_samples

FP8 = torch.float8_e4m3fn
STORED = [torch.float32, torch.float16, torch.bfloat16, FP8]
LIMITS = {torch.float16: 32768.0, FP8: 448.0}
PARAMS = [torch.float32, torch.float16, torch.bfloat16]
SIZES = {"odd": [1, 7, 1023], "empty": [0, 5], "scalar": [()], "large": [30_011]}


def stored(x, dtype):
    """x as it comes back from storage: rounded, after division by a power of two."""
    peak = x.abs().amax().item() if x.numel() else 0.0
    scale = 1.0
    if dtype in LIMITS and peak > 0:
        scale = 2.0 ** (math.floor(math.log2(peak / LIMITS[dtype])) + 1)
    return (x.float() / scale).to(dtype).to(x.dtype) * scale


def reference(p, *grads, dtypes, lr=0.1, weight_decay=0.1, adam_w_mode=True, maximize=False):
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        g = -g if maximize else g
        if not adam_w_mode:
            g = g + weight_decay * p
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        update = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        if adam_w_mode:
            update = update + weight_decay * p
        p = p - lr * update
        m, v = stored(m, dtypes[0]), stored(v, dtypes[1])
    return p


def take_steps(params, grads, **options):
    optimizer = FusedAdam(params, lr=0.1, weight_decay=0.1, **options)
    for step_grads in grads:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return optimizer


def make(sizes, device, dtype, steps=4):
    values = [torch.randn(n, device=device).to(dtype) for n in sizes]
    return values, [[torch.randn_like(v) for v in values] for _ in range(steps)]


def as_params(values):
    return [torch.nn.Parameter(v.clone()) for v in values]


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("second", STORED, ids=str)
@pytest.mark.parametrize("first", STORED, ids=str)
@pytest.mark.parametrize("dtype", PARAMS, ids=str)
def test_moments_of_every_dtype(dtype, first, second, adam_w_mode, device):
    for sizes in SIZES.values():
        values, grads = make(sizes, device, dtype)
        params = as_params(values)
        optimizer = take_steps(
            params, grads, exp_avg_dtype=first, exp_avg_sq_dtype=second, adam_w_mode=adam_w_mode
        )
        for i, (p, v) in enumerate(zip(params, values, strict=True)):
            state = optimizer.state[p]
            assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (first, second)
            own = [g[i] for g in grads]
            if v.numel():
                # The parameter is rounded once in each of four steps.
                assert_as_accurate_as(
                    lambda p, *g: reference(p, *g, dtypes=(first, second), adam_w_mode=adam_w_mode),
                    p.detach(),
                    v,
                    *own,
                    ulps=4,
                )


@pytest.mark.parametrize("dtypes", [(FP8, FP8), (torch.float16, torch.bfloat16)], ids=str)
def test_scales_follow_the_values(dtypes, device):
    """Gradients that shrink by 2^20 within a few steps: moments keep their relative precision."""
    value = torch.randn(1000, device=device)
    grads = [torch.randn_like(value) * 2.0 ** (-5 * t) for t in range(5)]
    param = torch.nn.Parameter(value.clone())
    take_steps([param], [[g] for g in grads], exp_avg_dtype=dtypes[0], exp_avg_sq_dtype=dtypes[1])
    assert_as_accurate_as(
        lambda p, *g: reference(p, *g, dtypes=dtypes), param.detach(), value, *grads, ulps=4
    )


def test_every_layout(device):
    values = [
        channels_last(torch.randn(4, 5, 3, 7, device=device)),
        LAYOUTS["transposed"](torch.randn(4, 7, device=device)),
        LAYOUTS["misaligned"](torch.randn(130, device=device)),
    ]
    grads = [[torch.randn_like(v).contiguous() for v in values] for _ in range(2)]
    params = [torch.nn.Parameter(v) for v in map(torch.clone, values)]
    take_steps(params, grads, exp_avg_dtype=FP8, exp_avg_sq_dtype=torch.float16)
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        assert_as_accurate_as(
            lambda p, *g: reference(p, *g, dtypes=(FP8, torch.float16)),
            p.detach(),
            v,
            *(g[i] for g in grads),
            ulps=2,
        )


@pytest.mark.parametrize("moments", [torch.float32, FP8], ids=str)
def test_remainders_are_masters_bit_for_bit(moments, device):
    values, grads = make([1, 33, 5000], device, torch.bfloat16, steps=6)
    options = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments, "master_weights": True}
    plain, split = as_params(values), as_params(values)
    masters = take_steps(plain, grads, **options)
    remainders = take_steps(split, grads, store_param_remainders=True, **options)
    for p, q in zip(plain, split, strict=True):
        master = remainders.get_unscaled_state(q, "master_param")
        assert remainders.state[q]["master_param"].dtype == torch.int16
        assert torch.equal(master, masters.get_unscaled_state(p, "master_param"))
        # Rounded with ties away from zero; elsewhere the nearest, as the plain parameter is.
        assert (q.float() - master).abs().le((p.float() - master).abs()).all()
        assert torch.equal(remainder_of(q, master), remainders.state[q]["master_param"])
        state = {"master_param": remainder_of(q, master)}
        assert torch.equal(whole_master(q, state), master)


def test_remainders_at_the_ends_of_the_range(device):
    """The largest float32 rounds to infinity in bfloat16, and comes back."""
    bits = [0x7F7FFFFF, 0x00000001, 0x3F808000, 0x3F80FFFF, 0x80000000, 0x7F800000]
    master = torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32, device=device)
    master = master.view(torch.float32)
    rounded = ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    state = {"master_param": remainder_of(rounded, master)}
    assert torch.equal(whole_master(rounded, state), master)
    param = torch.nn.Parameter(torch.ones(2, device=device, dtype=torch.bfloat16))
    grad = torch.tensor([float("nan"), 1.0], device=device, dtype=torch.bfloat16)
    take_steps([param], [[grad]] * 2, master_weights=True, store_param_remainders=True)
    assert param.isnan().tolist() == [True, False]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoupled_gradients_of_their_own_dtype(grad_dtype, device):
    values, _ = make([7, 300], device, torch.bfloat16)
    grads = [[torch.randn_like(v, dtype=grad_dtype) for v in values] for _ in range(3)]
    params = as_params(values)
    optimizer = FusedAdam(params, lr=0.1, master_weights=True, use_decoupled_grad=True)
    for step_grads in grads:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = torch.full_like(p, 1e3)  # not looked at
            p.decoupled_grad = g.clone()
        optimizer.step()
    wide = as_params([v.float() for v in values])
    twin = FusedAdam(wide, lr=0.1)
    for step_grads in grads:
        for p, g in zip(wide, step_grads, strict=True):
            p.grad = g.float()
        twin.step()
    for p, w in zip(params, wide, strict=True):
        assert torch.equal(optimizer.state[p]["master_param"], w)
        assert torch.equal(p, w.bfloat16())
    optimizer.zero_grad()
    assert all(p.decoupled_grad is None and p.grad is None for p in params)
    assert optimizer.step() is None


@pytest.mark.parametrize(
    "options", [{}, {"capturable": True}, {"exp_avg_dtype": torch.bfloat16}], ids=str
)
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_maximize_is_the_negative_gradient(adam_w_mode, options, device):
    values, grads = make([33], device, torch.float32)
    up, down = as_params(values), as_params(values)
    take_steps(up, grads, maximize=True, adam_w_mode=adam_w_mode, **options)
    negative = [[-g for g in step_grads] for step_grads in grads]
    take_steps(down, negative, adam_w_mode=adam_w_mode, **options)
    assert torch.equal(up[0], down[0])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("moments", [torch.float16, FP8], ids=str)
def test_inf_and_nan_stay_where_they_are(moments, bad, device):
    value = torch.randn(130, device=device)
    grad = torch.randn_like(value)
    grad[7] = bad
    param = torch.nn.Parameter(value.clone())
    options = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    take_steps([param], [[grad], [torch.randn_like(grad)]], **options)
    assert param.isnan().nonzero().flatten().tolist() == [7]


def test_peaks_and_scales(device):
    peaks = torch.tensor([[448.0, 0.0], [447.9, 1e-30], [3e38, 1e-44]], device=device).double()
    scales = scales_for(peaks, (FP8, torch.float16))
    assert scales.dtype == torch.float32
    assert scales[0].tolist() == [1.0, 1.0]  # the limit itself fits
    assert scales[1, 0] == 1.0
    assert (peaks / scales <= peaks.new_tensor([448.0, 32768.0])).all()
    assert scales.log2().frac().eq(0).all()


def test_peaks_of_several_chunks(device):
    """A chunk has 65,536 elements: the largest one is alone in its chunk."""
    values, (grads, firsts, seconds, _) = make([5, 65_537], device, torch.bfloat16)
    seconds = [s.abs() for s in seconds]
    for each, largest in ((grads, 1024), (firsts, 256), (seconds, 4096)):
        each[1][-1] = largest
    hyper = (0.1, 0.9, 0.999, 1e-8, 0.1, 1, True, True, 1.0)
    peaks = adam_compact_peaks(values, grads, firsts, seconds, [], None, *hyper)
    for own, *given in zip(peaks, grads, firsts, seconds, strict=True):
        g, m, v = (t.double() for t in given)
        expected = (0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g)
        expected = torch.stack([t.abs().max() for t in expected])
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=0)


def test_ops_pass_opcheck(device):
    values, (grads, firsts, seconds, *_) = make([5, 130], device, torch.bfloat16)
    # Not float8_e4m3fn, which the tools of opcheck cannot multiply.
    moments = [[t.half() for t in firsts], [t.abs() for t in seconds]]
    scales = torch.ones(2, 3, device=device)
    masters = [v.float() for v in values]
    rests = [torch.zeros_like(v, dtype=torch.int16) for v in values]
    wide = [g.float() for g in grads]
    hyper = (0.1, 0.9, 0.999, 1e-8, 0.1, 1, True, False, -1.0)
    for lists in ([masters, grads], [values, grads], [values, wide]):
        opcheck_samples(adam_compact_peaks, [(*lists, *moments, [], scales, *hyper)])
    halves = [v.half() for v in values]
    opcheck_samples(adam_compact_peaks, [(values, grads, *moments, halves, None, *hyper)])
    for own, masters_ in ((masters, []), (values, masters), (values, rests), (values, halves)):
        sample = (own, wide, *moments, masters_, scales, scales * 2, *hyper)
        opcheck_samples(adam_step_compact, [sample])


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("kind", [None, torch.float32, torch.float16, torch.int16], ids=str)
def test_peaks_check_lists_that_they_do_not_read(kind, decoupled, device):
    """They are read by the step that follows."""
    params, (grads, firsts, seconds, *_) = make([5, 3], device, torch.bfloat16)
    masters = [torch.zeros_like(p, dtype=kind) for p in params] if kind else []
    lists = {"params": params, "masters": masters}
    hyper = (0.1, 0.9, 0.999, 1e-8, 0.1, 1, True, decoupled)

    def peaks():
        return adam_compact_peaks(params, grads, firsts, seconds, masters, None, *hyper)

    assert peaks().shape == (2, 3 if kind is torch.float16 else 2)
    for name in ("params", "masters") if kind else ("params",):
        whole = lists[name][1]
        for bad, text in (
            (whole.clone(), rf"{name}\[1\] .*its data is not allocated yet"),
            (whole.new_zeros(2), rf"size mismatch.*{name}\[1\]|size mismatch.*params\[1\]"),
        ):
            if bad.shape == whole.shape:
                bad.untyped_storage().resize_(0)
            lists[name][1] = bad
            with pytest.raises(RuntimeError, match=f"adam_compact_peaks: {text}"):
                peaks()
        lists[name][1] = whole
    peaks()
    if kind:
        del masters[1]
        with pytest.raises(RuntimeError, match="masters has 1 tensors, but params has 2"):
            peaks()


def test_bad_lists(device):
    params, (grads, firsts, seconds, *_) = make([5], device, torch.float32)
    hyper = (0.1, 0.9, 0.999, 1e-8, 0.1, 1, True, True)
    with pytest.raises(RuntimeError, match="exp_avgs must be float32, float16, bfloat16 or"):
        adam_step_compact(
            params, grads, [f.double() for f in firsts], seconds, [], None, None, *hyper
        )
    rests = [torch.zeros(5, dtype=torch.int16, device=device)]
    with pytest.raises(RuntimeError, match="masters must be float32, or float16 for params"):
        adam_step_compact(params, grads, firsts, seconds, rests, None, None, *hyper)
    two = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="scales must be contiguous, three numbers per tensor"):
        adam_step_compact(params, grads, firsts, seconds, [], two, None, *hyper)
    wide = [p.double() for p in params]
    with pytest.raises(RuntimeError, match="params must be float32, float16 or bfloat16"):
        adam_step_compact(wide, grads, firsts, seconds, [], None, None, *hyper)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_float64_parameters_keep_float64_moments(dtype, device):
    param = torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.float64))
    optimizer = take_steps([param], [[torch.ones_like(param)]], exp_avg_dtype=dtype)
    assert optimizer.state[param]["exp_avg"].dtype == torch.float64
