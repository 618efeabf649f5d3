"""FusedMixedPrecisionLamb: masters, loss scale, overflow flag, and numbers on the device."""

import inspect
import warnings

import pytest
import torch

from apex.optimizers import FusedMixedPrecisionLamb
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.grids import HALVES, channels_last
from apex_testkit.optimizers import run_steps
from apex_testkit.optimizers_lamb import lamb_reference

LR = 2**-6  # exact in float32, which lr is kept in
OPTIONS = {
    "default": {},
    "l2": {"adam_w_mode": False, "weight_decay": 0.1},
    "nvlamb": {"weight_decay": 0.0, "use_nvlamb": True},
    "unclipped": {"max_grad_norm": 0.0, "grad_averaging": False},
    "betas": {"betas": (0.5, 0.8), "bias_correction": False},
    "maximize": {"maximize": True},
}
SIZES = [0, 1, 7, (), 1023]


def make(dtype, device, steps, sizes=SIZES):
    values = [torch.randn(n, device=device).to(dtype) for n in sizes]
    grads = [[torch.randn_like(v) for v in values] for _ in range(steps)]
    return values, grads, [torch.nn.Parameter(v.clone()) for v in values]


def wide(tensors):
    return [t.float() for t in tensors]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_follows_the_formula_without_masters(dtype, options, device):
    values, grads, params = make(dtype, device, steps=10)
    run_steps(FusedMixedPrecisionLamb, params, grads, lr=LR, **options)
    # The parameter is rounded once in each of ten steps.
    assert_as_accurate_as(
        lambda p, *g: lamb_reference(p, *g, lr=LR, **options),
        [p.detach() for p in params],
        values,
        *grads,
        ulps=10,
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masters_follow_the_formula_for_a_hundred_steps(dtype, options, device):
    values, grads, params = make(dtype, device, steps=100)
    optimizer = run_steps(
        FusedMixedPrecisionLamb, params, grads, lr=LR, reduced_precision_dtype=dtype, **options
    )
    masters = optimizer.param_groups_full_precision[0]["params"]
    # Rounded once in each of a hundred steps, mostly in both directions.
    assert_as_accurate_as(
        lambda p, *g: lamb_reference(p, *g, lr=LR, **options),
        masters,
        wide(values),
        *map(wide, grads),
        ulps=20,
    )
    for p, master, g in zip(params, masters, grads[-1], strict=True):
        assert torch.equal(p.detach(), master.to(dtype))
        assert torch.equal(p.grad, g)


def test_dtypes_mix_and_only_the_reduced_one_has_masters(device):
    values = [torch.randn(33, device=device).to(d) for d in FLOATS]
    grads = [[torch.randn_like(v) for v in values] for _ in range(2)]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = FusedMixedPrecisionLamb(params, lr=LR, reduced_precision_dtype=torch.float16)
    assert optimizer.param_groups_full_precision == [{"params": [None] * 4}]
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    masters = optimizer.param_groups_full_precision[0]["params"]
    assert [m is None for m in masters] == [p.dtype != torch.float16 for p in params]
    doubles = [v.double() for v in values], *([g.double() for g in step] for step in grads)
    for p, e in zip(params, lamb_reference(*doubles, lr=LR), strict=True):
        # Rounded once in each of two steps. The norm of float32 gradients is float32.
        eps = max(torch.finfo(p.dtype).eps, torch.finfo(torch.float32).eps)
        torch.testing.assert_close(p.detach().double(), e, rtol=0, atol=2 * eps * e.abs().max())


def test_masters_are_taken_from_the_weights_of_the_first_step(device):
    """DistributedDataParallel broadcasts weights after optimizers were made."""
    _, grads, params = make(torch.bfloat16, device, steps=1, sizes=[5])
    optimizer = FusedMixedPrecisionLamb(params, lr=0.0, reduced_precision_dtype=torch.bfloat16)
    with torch.no_grad():
        params[0].fill_(3.0)
    params[0].grad = grads[0][0]
    optimizer.step()
    assert params[0].eq(3.0).all()


def test_weights_loaded_later_are_copied_into_the_masters(device):
    _, grads, params = make(torch.bfloat16, device, steps=2, sizes=[5])
    optimizer = FusedMixedPrecisionLamb(params, lr=0.0, reduced_precision_dtype=torch.bfloat16)
    for value, step in zip((1.0, 3.0), grads, strict=True):
        with torch.no_grad():
            params[0].fill_(value)
            for master in optimizer.param_groups_full_precision[0]["params"]:
                if master is not None:
                    master.copy_(params[0])
        params[0].grad = step[0]
        optimizer.step()
        assert params[0].eq(value).all()


def test_channels_last_and_gradients_of_another_format(device):
    value = channels_last(torch.randn(4, 5, 3, 7, device=device)).bfloat16()
    grads = [torch.randn_like(value), torch.randn(4, 5, 3, 7, device=device).bfloat16()]
    param = torch.nn.Parameter(value.clone())
    optimizer = run_steps(
        FusedMixedPrecisionLamb,
        [param],
        [[g] for g in grads],
        lr=LR,
        reduced_precision_dtype=torch.bfloat16,
    )
    master = optimizer.state[param]["master_param"]
    assert master.stride() == value.stride()
    assert_as_accurate_as(
        lambda p, *g: lamb_reference([p], *([x] for x in g), lr=LR)[0],
        master,
        value.float(),
        *(g.float() for g in grads),
        ulps=2,  # rounded once in each of two steps
    )


def scaled_step(optimizer, scaler, grads, how):
    """As after the backward pass of a scaled loss."""
    params = optimizer.param_groups[0]["params"]
    scaler.scale(torch.zeros(1, device=params[0].device))
    for p, g in zip(params, grads, strict=True):
        p.grad = (g * scaler.get_scale()).to(p.dtype)
    before = [p.grad.clone() for p in params]
    if how == "unscaled":
        scaler.unscale_(optimizer)
    if how in ("argument", "positional"):
        optimizer.step(grad_scaler=scaler) if how == "argument" else optimizer.step(None, scaler)
    else:
        scaler.step(optimizer)
    if how != "unscaled":
        for p, g in zip(params, before, strict=True):
            assert torch.equal(p.grad, g) or g.isnan().any()  # left as they were
    scaler.update()


@pytest.mark.parametrize("how", ["scaler", "unscaled", "argument", "positional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_grad_scaler_skips_and_unscales(bad, dtype, how, device):
    if device.type == "cuda" and dtype == torch.bfloat16:
        pytest.skip("torch's GradScaler takes no bfloat16 on a GPU")
    values, grads, params = make(dtype, device, steps=3, sizes=[17, 130])
    optimizer = FusedMixedPrecisionLamb(params, lr=LR, reduced_precision_dtype=torch.bfloat16)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_step(optimizer, scaler, grads[0], how)
        held = [p.detach().clone() for p in params]
        scaled_step(optimizer, scaler, [grads[1][0], torch.full_like(values[1], bad)], how)
        assert all(torch.equal(p, h) for p, h in zip(params, held, strict=True))
        assert int(optimizer.param_groups[0]["step"]) == 1
        assert scaler.get_scale() == 1024.0  # doubled, then halved
        scaled_step(optimizer, scaler, grads[2], how)
    assert len(calls) == 3  # hooks run once per step, whoever calls whom
    assert "step" not in vars(optimizer)
    assert int(optimizer.param_groups[0]["step"]) == 2
    assert int(optimizer.state[params[0]]["step"]) == 2
    # Rounded once in each of two steps; scales are powers of two.
    assert_as_accurate_as(
        lambda p, *g: lamb_reference(p, *g, lr=LR),
        [p.detach() for p in params],
        values,
        grads[0],
        grads[2],
        ulps=2,
    )


def test_a_disabled_scaler_and_a_closure(device):
    _, grads, params = make(torch.float32, device, steps=1, sizes=[5])
    optimizer = FusedMixedPrecisionLamb(params, lr=LR)
    before = params[0].detach().clone()

    def closure():
        params[0].grad = grads[0][0].clone()
        return "loss"

    scaler = torch.amp.GradScaler(device, enabled=False)
    assert optimizer.step(closure, grad_scaler=scaler) == "loss"
    assert not torch.equal(params[0], before)
    # GradScaler hands itself over, and warns, where it sees the argument.
    assert "grad_scaler" not in inspect.signature(optimizer.step).parameters


def test_numbers_live_on_the_device(device):
    _, grads, params = make(torch.float32, device, steps=1, sizes=[5])
    lr = torch.tensor(0.5, device=device)
    optimizer = FusedMixedPrecisionLamb(params, lr=lr, step=3)
    group = optimizer.param_groups[0]
    late = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer.add_param_group({"params": [late], "lr": 0.25})
    for own, expected in ((group, 0.5), (optimizer.param_groups[1], 0.25)):
        assert (own["lr"].dtype, own["step"].dtype) == (torch.float32, torch.int32)
        assert own["lr"].device.type == own["step"].device.type == torch.device(device).type
        assert own["step"].tolist() == [3]
        assert own["lr"] == expected
    assert group["step"] is not optimizer.param_groups[1]["step"]
    lr.fill_(9.0)
    assert group["lr"] == 0.5  # a copy of the group's own
    params[0].grad = grads[0][0]
    optimizer.step()
    assert group["step"].tolist() == [4]
    assert int(optimizer.state[params[0]]["step"]) == 4
    # Bias corrections are those of the fourth step.
    m, v = (optimizer.state[params[0]][k].double() for k in ("exp_avg", "exp_avg_sq"))
    start = torch.nn.Parameter(params[0].detach().clone())
    assert start.grad is None
    clip = max(1.0, grads[0][0].double().norm().item())
    torch.testing.assert_close(m, 0.1 * grads[0][0].double() / clip, rtol=1e-6, atol=0)
    torch.testing.assert_close(v, 1e-3 * (grads[0][0].double() / clip) ** 2, rtol=1e-6, atol=0)


def test_the_step_argument_decides_bias_corrections(device):
    value, grad = torch.randn(2, 9, device=device, dtype=torch.float64)
    param = torch.nn.Parameter(value.clone())
    hyper = {"lr": LR, "weight_decay": 0.0, "max_grad_norm": 0.0}
    run_steps(FusedMixedPrecisionLamb, [param], [[grad]], step=3, **hyper)
    update = (0.1 * grad / (1 - 0.9**4)) / ((1e-3 * grad**2 / (1 - 0.999**4)).sqrt() + 1e-6)
    torch.testing.assert_close(param.detach(), value - LR * update)


@pytest.mark.parametrize("kind", ["scheduler", "assigned", "filled"])
def test_learning_rates_change_in_any_way(kind, device):
    param = torch.nn.Parameter(torch.zeros(3, device=device, dtype=torch.float64))
    optimizer = FusedMixedPrecisionLamb([param], lr=1.0, eps=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for lr in (1.0, 0.5):
        if kind == "assigned":
            optimizer.param_groups[0]["lr"] = lr
        elif kind == "filled":
            optimizer.param_groups[0]["lr"].fill_(lr)
        param.grad = torch.ones_like(param)
        with torch.no_grad():
            param.zero_()  # so that updates are not scaled
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full_like(param, -lr))
        if kind == "scheduler":
            scheduler.step()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def test_parameters_count_their_own_steps(device):
    values, grads, params = make(torch.float64, device, steps=4, sizes=[5, 6])
    optimizer = FusedMixedPrecisionLamb(params, lr=LR)
    grads = [[g if i == 0 or t > 1 else None for i, g in enumerate(s)] for t, s in enumerate(grads)]
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g
        optimizer.step()
    for p, e in zip(params, lamb_reference(values, *grads, lr=LR), strict=True):
        torch.testing.assert_close(p.detach(), e)
    assert int(optimizer.param_groups[0]["step"]) == 4
    assert int(optimizer.state[params[1]]["step"]) == 2


def test_nothing_to_do(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedMixedPrecisionLamb([param])
    assert optimizer.step() is None
    assert not optimizer.state_dict()["state"]
    assert optimizer.param_groups[0]["step"].tolist() == [1]  # Apex counts calls
    assert FusedMixedPrecisionLamb([{"params": []}]).step() is None


def test_bad_arguments():
    params = [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match="reduced_precision_dtype must be None"):
        FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float32)
    for step in (-1, 0.5):
        with pytest.raises(ValueError, match=f"step must be an integer >= 0, got {step}"):
            FusedMixedPrecisionLamb(params, step=step)
    optimizer = FusedMixedPrecisionLamb(params)
    with pytest.raises(TypeError, match=r"grad_scaler must be a torch\.amp\.GradScaler, got float"):
        optimizer.step(None, 2.0)
    with pytest.raises(TypeError, match=r"at most closure and grad_scaler.*\['grads'\]"):
        optimizer.step(grads=[])
    with pytest.raises(TypeError, match="2 positional arguments"):
        optimizer.step(None, None, None)
