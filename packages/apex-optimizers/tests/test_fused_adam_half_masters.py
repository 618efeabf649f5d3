"""Masters in float16 with a scale per tensor, as TransformerEngine keeps them, against float64."""

import copy
import io
import math

import pytest
import torch

from apex.optimizers import FusedAdam
from apex_testkit.grids import HALVES, LAYOUTS, channels_last
from apex_testkit.optimizers import run_steps

MASTER, SCALES = "master_param", "state_scales"
HALF = {"master_weights": True, "master_weight_dtype": torch.float16}
HYPER = {"lr": 0.05, "weight_decay": 0.125}  # in float32, too, a decay cancels a gradient or not
UNIT = 2.0**-11  # of rounding to float16
KINDS = {
    "alone": {},
    "l2": {"adam_w_mode": False},
    "maximize": {"maximize": True},
    "decoupled": {"use_decoupled_grad": True},
    "float16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "float8": {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.bfloat16},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
both_dtypes = pytest.mark.parametrize("dtype", HALVES, ids=str)


def make(device, dtype=torch.bfloat16, sizes=((7,), (1,), (0,), (33, 65)), scale=1.0):
    generator = torch.Generator().manual_seed(3)
    values = [(scale * torch.randn(n, generator=generator)).to(device, dtype) for n in sizes]
    return values, [torch.nn.Parameter(v.clone()) for v in values]


def make_grads(values, steps, seed=0):
    generator = torch.Generator().manual_seed(100 + seed)
    return [[torch.randn(v.shape, generator=generator).to(v) for v in values] for _ in range(steps)]


def go_on(optimizer, grads):
    params = optimizer.param_groups[0]["params"]
    for own in grads:
        for p, g in zip(params, own, strict=True):
            if optimizer.use_decoupled_grad:
                p.decoupled_grad = g.clone()
            else:
                p.grad = g.clone()
        optimizer.step()


def stored(whole):
    """What float16 with a scale, a power of two, keeps of float64 numbers."""
    peak = whole.abs().max().item() if whole.numel() else 0.0
    scale = 2.0 ** (math.floor(math.log2(peak / 32768)) + 1) if peak else 1.0
    return (whole / scale).half().double() * scale


def model_step(model, grad, step, options):
    """One step in float64, from moments and masters as they are kept."""
    grad = -grad if options.get("maximize") else grad
    decay = HYPER["weight_decay"] * model["master"]
    is_decoupled = options.get("adam_w_mode", True)
    grad = grad if is_decoupled else grad + decay
    m, v = 0.9 * model["m"] + 0.1 * grad, 0.999 * model["v"] + 0.001 * grad * grad
    update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    update = update + decay if is_decoupled else update
    return m, v, model["master"] - HYPER["lr"] * update


@every_kind
@both_dtypes
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 30.0])
def test_masters_follow_the_formula(scale, dtype, kind, device):
    values, params = make(device, dtype, scale=scale)
    optimizer = FusedAdam(params, **HYPER, **HALF, **kind)
    models = [
        {"master": v.double(), "m": torch.zeros_like(v.double()), "v": torch.zeros_like(v.double())}
        for v in values
    ]
    for step, grads in enumerate(make_grads(values, 6), start=1):
        go_on(optimizer, [grads])
        for p, g, model in zip(params, grads, models, strict=True):
            _, _, exact = model_step(model, g.double(), step, kind)
            master = optimizer.get_unscaled_state(p, MASTER)
            assert master.dtype == torch.float32
            # Rounded once to float16, of what float32 arithmetic makes of it.
            expected = stored(exact)
            peak = exact.abs().max().item() if exact.numel() else 0.0
            near = (master - expected).abs() <= 2.1 * UNIT * expected.abs() + 1e-6 * peak
            assert near.all()
            is_same = master.double() == expected
            assert is_same.double().mean().nan_to_num(1.0) > 0.97 or p.numel() < 100
            assert torch.equal(p, master.to(dtype))
            model["master"] = master.double()
            model["m"] = optimizer.get_unscaled_state(p, "exp_avg").double()
            model["v"] = optimizer.get_unscaled_state(p, "exp_avg_sq").double()


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e4, 1e30])
def test_scales_put_the_largest_near_the_end_of_float16(scale, device):
    values, params = make(device, scale=scale)
    optimizer = FusedAdam(params, lr=1e-3 * scale, **HALF)
    for grads in make_grads(values, 3):
        go_on(optimizer, [grads])
        for p in params:
            kept, factor = optimizer.state[p][MASTER], optimizer.state[p][SCALES][2]
            assert kept.dtype == torch.float16
            if p.numel():
                assert 16384 < kept.abs().max() <= 32768
                assert torch.frexp(factor).mantissa == 0.5
                master = kept.float() * factor
                assert torch.equal(p.detach(), master.bfloat16())
            else:
                assert factor == 1


def test_a_master_that_grows_a_thousandfold_in_one_step_fits(device):
    """And one that shrinks keeps its precision: scales are those of the new values."""
    param = torch.nn.Parameter(torch.full((50,), 0.01, device=device, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], lr=100.0, **HALF)
    for sign in (-1.0, 1.0):
        go_on(optimizer, [[torch.full_like(param, sign)]])
        master = optimizer.get_unscaled_state(param, MASTER)
        assert master.isfinite().all()
    zeros = torch.nn.Parameter(torch.zeros(50, device=device, dtype=torch.bfloat16))
    optimizer = FusedAdam([zeros], lr=1.0, **HALF)
    go_on(optimizer, [[torch.ones_like(zeros)]])
    torch.testing.assert_close(zeros.detach(), -torch.ones_like(zeros))


@both_dtypes
def test_they_collect_steps_that_a_parameter_would_lose(dtype, device):
    """Three bits more than bfloat16; as many as float16, whose small numbers have fewer."""
    start, lr = {torch.bfloat16: (1.0, 2.0**-9), torch.float16: (2.0**-20, 2.0**-26)}[dtype]
    ends = []
    for options in ({}, HALF, {"master_weights": True}):
        param = torch.nn.Parameter(torch.full((65,), start, device=device, dtype=dtype))
        grads = [[torch.full_like(param, -1.0)] for _ in range(20)]
        run_steps(FusedAdam, [param], grads, lr=lr, **options)
        ends.append(param[0].item())
    plain, half, wide = ends
    assert plain == start
    assert half == pytest.approx(wide, rel=2**-8)
    assert half > start


@every_kind
@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_continues_bit_for_bit(kind, way, device):
    values, params = make(device)
    grads = make_grads(values, 6)
    options = {**HYPER, **HALF, **kind}
    go_on(FusedAdam(params, **options), grads)
    _, own = make(device)
    half = FusedAdam(own, **options)
    go_on(half, grads[:3])
    if way == "deepcopy":
        resumed = copy.deepcopy(half)
    else:
        resumed = FusedAdam([torch.nn.Parameter(p.detach().clone()) for p in own], **options)
        file = io.BytesIO()
        torch.save(half.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        for p, q in zip(own, resumed.param_groups[0]["params"], strict=True):
            assert torch.equal(
                half.get_unscaled_state(p, MASTER), resumed.get_unscaled_state(q, MASTER)
            )
    go_on(resumed, grads[3:])
    for p, q in zip(params, resumed.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


def test_checkpoints_are_float32_and_go_to_other_masters_and_torch(device):
    values, params = make(device)
    half = FusedAdam(params, **HYPER, **HALF)
    go_on(half, make_grads(values, 2))
    saved = half.state_dict()
    for entry, param in zip(saved["state"].values(), params, strict=True):
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", MASTER}
        assert all(value.dtype == torch.float32 for value in entry.values())
        assert torch.equal(entry[MASTER], half.get_unscaled_state(param, MASTER))
    wide = FusedAdam(params, master_weights=True)
    wide.load_state_dict(saved)
    for index, param in enumerate(params):
        assert torch.equal(wide.state[param][MASTER], saved["state"][index][MASTER])
    go_on(wide, make_grads(values, 1, seed=1))
    back = FusedAdam(params, **HALF)
    back.load_state_dict(wide.state_dict())
    for param in params:
        master = wide.state[param][MASTER]
        kept = back.get_unscaled_state(param, MASTER)
        assert torch.equal(kept, stored(master.double()).float())
        assert back.state[param][MASTER].dtype == torch.float16
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(saved)
    assert theirs.state[params[0]]["step"] == 2


def test_masters_can_be_made_read_and_set(device):
    values, params = make(device)
    optimizer = FusedAdam(params, **HYPER, **HALF)
    for value, param in zip(values, params, strict=True):
        optimizer.initialize_state(param, store_param_remainders=False)
        assert optimizer.state[param][MASTER].dtype == torch.float16
        assert torch.equal(optimizer.get_unscaled_state(param, MASTER), value.float())
        assert optimizer.state[param][MASTER].data_ptr() != param.data_ptr() or not param.numel()
    wanted = torch.randn(33, 65, device=device) * 1e3
    optimizer.set_scaled_state(params[3], MASTER, wanted)
    kept = optimizer.get_unscaled_state(params[3], MASTER)
    torch.testing.assert_close(kept, wanted, rtol=UNIT, atol=0)
    masters = [own for group in optimizer.param_groups_master for own in group["params"]]
    assert all(own is optimizer.state[p][MASTER] for own, p in zip(masters, params, strict=True))


def test_dtypes_mix_and_only_16_bits_have_masters(device):
    dtypes = [torch.float32, torch.float64, *HALVES, torch.complex64]
    params = [torch.nn.Parameter(torch.ones(9, device=device, dtype=d)) for d in dtypes]
    grads = [[torch.full_like(p, 0.5) for p in params] for _ in range(3)]
    optimizer = run_steps(FusedAdam, params, grads, **HYPER, **HALF)
    kept = [MASTER in optimizer.state[p] for p in params]
    assert kept == [False, False, True, True, False]
    assert [SCALES in optimizer.state[p] for p in params] == kept
    twins = [torch.nn.Parameter(torch.ones(9, device=device, dtype=d)) for d in dtypes]
    run_steps(FusedAdam, twins, grads, **HYPER)
    for p, q, has in zip(params, twins, kept, strict=True):
        assert has or torch.equal(p, q)


def test_a_parameter_may_change_its_dtype(device):
    """Masters appear and disappear; those that others made in float32 are kept in float16."""
    param = torch.nn.Parameter(torch.randn(40, device=device).bfloat16())
    other = torch.nn.Parameter(torch.randn(40, device=device))
    optimizer = FusedAdam([param, other], **HYPER, **HALF)
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float32):
        param.data = param.data.to(dtype)
        go_on(optimizer, [[torch.ones_like(p) for p in (param, other)]])
        state = optimizer.state[param]
        assert (MASTER in state, SCALES in state) == (dtype.itemsize == 2,) * 2
    param.data = param.data.bfloat16()
    optimizer.state[param][MASTER] = param.detach().float()
    go_on(optimizer, [[torch.ones_like(p) for p in (param, other)]])
    assert optimizer.state[param][MASTER].dtype == torch.float16
    assert torch.equal(param, optimizer.get_unscaled_state(param, MASTER).bfloat16())


def test_remainders_of_another_dtype_are_of_no_use(device):
    param = torch.nn.Parameter(torch.full((4,), 3.0, device=device, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], lr=0.5, master_weights=True, store_param_remainders=True)
    go_on(optimizer, [[torch.ones_like(param)]])
    param.data = torch.full_like(param, 7.0, dtype=torch.float16)
    go_on(optimizer, [[torch.zeros_like(param)]])
    assert optimizer.state[param][MASTER].dtype == torch.float32
    assert param.sub(7).abs().max() < 0.5


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_every_layout(layout, device):
    value = torch.randn(4, 5, 3, 7, device=device) if layout == "channels_last" else None
    value = channels_last(value) if value is not None else LAYOUTS[layout](torch.randn(4, 7))
    value = value.to(device, torch.bfloat16)
    plain = torch.nn.Parameter(value.clone().contiguous())
    param = torch.nn.Parameter(value.clone())
    grads = [[torch.randn_like(plain)] for _ in range(3)]
    for own in (plain, param):
        optimizer = run_steps(FusedAdam, [own], grads, **HYPER, **HALF)
        assert optimizer.state[own][MASTER].stride() == own.stride()
    assert torch.equal(plain, param)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_inf_and_nan_stay_where_they_are(bad, device):
    param = torch.nn.Parameter(torch.ones(130, device=device, dtype=torch.bfloat16))
    grads = [torch.ones_like(param) for _ in range(2)]
    grads[0][7] = bad
    optimizer = run_steps(FusedAdam, [param], [[g] for g in grads], **HYPER, **HALF)
    assert param.isnan().nonzero().flatten().tolist() == [7]
    assert optimizer.state[param][SCALES].isfinite().all()
    with torch.no_grad():
        param[9] = torch.inf  # which wins over the master
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert param[9].isinf()
    assert param.isfinite().sum() == 128


def test_a_failed_step_changes_nothing(device):
    values, params = make(device)
    optimizer = FusedAdam(params, **HYPER, **HALF)
    go_on(optimizer, make_grads(values, 2))
    before = copy.deepcopy((params, dict(enumerate(optimizer.state.values()))))
    for wrong in (torch.ones(5), torch.ones(1).to_sparse()):
        params[1].grad = None
        params[1].grad = torch.ones_like(params[1])
        if wrong.is_sparse:
            params[1].grad = wrong.to(params[1])
        else:
            params[1].grad.data = wrong.to(params[1])
        with pytest.raises(RuntimeError, match="parameter 1"):
            optimizer.step()
        assert all(map(torch.equal, params, before[0]))
        for index, entry in enumerate(optimizer.state.values()):
            assert entry.keys() == before[1][index].keys()
            assert all(torch.equal(entry[key], before[1][index][key]) for key in entry)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"master_weight_dtype": torch.float16}, ValueError, "needs master_weights=True"),
        ({**HALF, "store_param_remainders": True}, ValueError, "cannot be combined with"),
        ({**HALF, "capturable": True}, RuntimeError, "capturable=True needs float32 moments"),
        ({**HALF, "stochastic_rounding": True}, ValueError, "stochastic_rounding=True keeps no"),
        (
            {"master_weights": True, "master_weight_dtype": torch.uint8},
            ValueError,
            "must be torch.float32 or float16, got torch.uint8",
        ),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **options)
