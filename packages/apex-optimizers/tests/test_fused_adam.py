"""FusedAdam's steps against float64, over dtypes, sizes, layouts and options."""

import copy

import pytest
import torch

from apex.optimizers import FusedAdam
from apex_testkit import FLOATS, LARGE, assert_as_accurate_as
from apex_testkit.grids import HALVES
from apex_testkit.optimizers import adam_reference, run_steps

SIZES = {
    "one": [1],
    "odd": [1, 7, 1023],
    "empty": [0, 5],
    "scalar": [()],
    "many": [3] * 200,
    "large": LARGE,
}


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_follows_the_formula(sizes, dtype, adam_w_mode, device):
    hyper = {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    values = [torch.randn(n, device=device, dtype=dtype) for n in sizes]
    grads = [[torch.randn_like(v) for v in values] for _ in range(3)]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    run_steps(FusedAdam, params, grads, **hyper)
    for i, (p, v) in enumerate(zip(params, values, strict=True)):
        if v.numel():
            own = [g[i] for g in grads]
            # The parameter is rounded once in each of three steps.
            assert_as_accurate_as(
                lambda p, *g: adam_reference(p, *g, **hyper), p.detach(), v, *own, ulps=3
            )


@pytest.mark.parametrize(
    "hyper",
    [
        {"bias_correction": False},
        {"betas": (0.0, 0.0)},
        {"betas": (0.5, 0.9)},
        {"eps": 1e-2},
        {"lr": torch.tensor(0.05)},
    ],
    ids=lambda h: next(iter(h)),
)
def test_options_follow_the_formula(hyper, device):
    value = torch.randn(1001, device=device)
    grads = [torch.randn_like(value) for _ in range(5)]
    param = torch.nn.Parameter(value.clone())
    options = {"lr": 1e-2, "weight_decay": 0.01, **hyper}
    run_steps(FusedAdam, [param], [[g] for g in grads], **options)
    options["lr"] = float(options["lr"])
    assert_as_accurate_as(
        lambda p, *g: adam_reference(p, *g, **options), param.detach(), value, *grads, ulps=5
    )


def test_hundred_steps_match_torch_adamw(device):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Linear(65, 5))
    model.to(device, torch.float64)
    twin = copy.deepcopy(model)
    ours = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    x = torch.randn(16, 33, device=device, dtype=torch.float64)
    for _ in range(100):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # float64 rounding grows over 100 steps of a chaotic map; 1e-9 is far below any real error
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("grad_format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_memory_formats_of_parameter_and_gradient(memory_format, grad_format, device):
    value = torch.randn(4, 5, 3, 7, device=device).to(memory_format=memory_format)
    grad = torch.randn(4, 5, 3, 7, device=device).to(memory_format=grad_format)
    param = torch.nn.Parameter(value.clone())
    run_steps(FusedAdam, [param], [[grad]], lr=0.1)
    assert param.stride() == value.stride()
    assert_as_accurate_as(lambda p, g: adam_reference(p, g, lr=0.1), param.detach(), value, grad)


def test_dtypes_mix_in_one_group(device):
    values = [torch.randn(65, device=device, dtype=d) for d in FLOATS]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    grads = [torch.randn_like(v) for v in values]
    run_steps(FusedAdam, params, [grads], lr=0.1)
    for p, v, g in zip(params, values, grads, strict=True):
        assert_as_accurate_as(lambda p, g: adam_reference(p, g, lr=0.1), p.detach(), v, g)


def test_state_is_wide_and_in_the_parameters_format(device):
    param = torch.nn.Parameter(
        torch.randn(2, 3, 4, 5, device=device, dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )
    )
    optimizer = run_steps(FusedAdam, [param], [[torch.ones_like(param)]])
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[param][key].dtype == torch.float32
        assert optimizer.state[param][key].stride() == param.stride()
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("capturable", [False, True])
def test_master_weights_collect_steps_below_one_ulp(dtype, capturable, device):
    """1 - 1e-4 is 1 in bfloat16; a float32 master keeps the difference, a 16-bit parameter not."""
    start = torch.full((257,), 1.0, device=device, dtype=dtype)
    grads = [[torch.full_like(start, 0.5)] for _ in range(100)]
    param = torch.nn.Parameter(start.clone())
    optimizer = run_steps(
        FusedAdam, [param], grads, lr=1e-4, master_weights=True, capturable=capturable
    )
    master = optimizer.param_groups_master[0]["params"][0]
    expected = adam_reference(start.double(), *(g[0].double() for g in grads), lr=1e-4)
    torch.testing.assert_close(master.double(), expected, rtol=1e-5, atol=0)  # 100 float32 steps
    assert torch.equal(param.detach(), master.to(dtype))


def test_groups_added_later_are_updated(device):
    first, second = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    optimizer = FusedAdam([first], lr=0.1)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(first.detach(), torch.full((3,), 0.9, device=device))
    torch.testing.assert_close(second.detach(), torch.full((3,), 0.5, device=device))


def test_frozen_parameters_count_their_own_steps(device):
    """After steps without gradient, a parameter goes on with its own bias correction."""
    values = [torch.randn(5, device=device, dtype=torch.float64) for _ in range(2)]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = FusedAdam(params, lr=0.1)
    grads = torch.randn(4, 5, device=device, dtype=torch.float64)
    for t in range(4):
        params[0].grad = grads[t].clone()
        params[1].grad = grads[t].clone() if t in (0, 3) else None
        optimizer.step()
    expected = adam_reference(values[1], grads[0], grads[3], lr=0.1)
    torch.testing.assert_close(params[1].detach(), expected)
    torch.testing.assert_close(params[0].detach(), adam_reference(values[0], *grads, lr=0.1))
    assert optimizer.param_groups[0]["step"] == 4


def test_replaced_state_and_gradient_tensors_are_noticed(device):
    param = torch.nn.Parameter(torch.zeros(9, device=device))
    optimizer = run_steps(FusedAdam, [param], [[torch.ones(9, device=device)]], lr=0.1)
    optimizer.state[param]["exp_avg"] = torch.zeros(9, device=device)
    optimizer.state[param]["exp_avg_sq"] = torch.ones(9, device=device)
    before = param.detach().clone()
    param.grad = torch.zeros(9, device=device)
    optimizer.step()
    assert torch.equal(param.detach(), before)  # no gradient, no momentum: no update
    optimizer.state.clear()
    param.grad = torch.ones(9, device=device)
    optimizer.step()
    assert torch.count_nonzero(optimizer.state[param]["exp_avg"]) == 9


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_grad_scaler_skips_and_unscales(capturable, bad, device):
    value = torch.randn(17, device=device)
    param = torch.nn.Parameter(value.clone())
    optimizer = FusedAdam([param], lr=0.1, capturable=capturable)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    grads = [torch.randn_like(value) for _ in range(2)]

    def scaled_step(grad):
        scaler.scale(torch.zeros(1, device=device))  # as after a backward of a scaled loss
        param.grad = grad * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()

    scaled_step(grads[0])
    held = param.detach().clone()
    scaled_step(torch.full_like(value, bad))
    assert torch.equal(param.detach(), held)
    assert scaler.get_scale() == 512.0
    scaled_step(grads[1])
    assert int(optimizer.param_groups[0]["step"]) == 2
    expected = adam_reference(value.double(), *(g.double() for g in grads), lr=0.1)
    torch.testing.assert_close(param.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_capturable_keeps_its_numbers_on_the_device(device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = run_steps(FusedAdam, [param], [[torch.ones_like(param)]], capturable=True)
    group = optimizer.param_groups[0]
    assert group["lr"].device.type == torch.device(device).type
    assert group["lr"].dtype == torch.float32
    assert group["step"].dtype == torch.int32
    assert group["step"].shape == (1,)
    group["lr"].fill_(0.0)  # a scheduler changes the learning rate between replays
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(param.detach(), before)


def test_learning_rate_schedulers_drive_it(device):
    param = torch.nn.Parameter(torch.zeros(3, device=device, dtype=torch.float64))
    optimizer = FusedAdam([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(param.detach(), torch.full_like(param, -1.1), rtol=1e-6, atol=0)


def test_hooks_and_closure_run(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedAdam([param], lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        loss = (param * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert calls == ["pre", "closure", "post"]
    assert torch.all(param < 1)


def test_zero_grad_obeys_set_grad_none(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    for set_grad_none, argument, expect_none in [
        (True, None, True),
        (False, None, False),
        (True, False, False),
        (False, True, True),
    ]:
        optimizer = FusedAdam([param], set_grad_none=set_grad_none)
        param.grad = torch.ones_like(param)
        optimizer.zero_grad() if argument is None else optimizer.zero_grad(set_to_none=argument)
        assert (param.grad is None) == expect_none
        assert expect_none or torch.count_nonzero(param.grad) == 0


def test_inf_and_nan_propagate(device):
    param = torch.nn.Parameter(torch.ones(130, device=device))
    grad = torch.zeros(130, device=device)
    grad[3], grad[129] = float("nan"), float("inf")
    run_steps(FusedAdam, [param], [[grad]], lr=0.1)
    finite = torch.isfinite(param)
    assert not finite[3]
    assert not finite[129]
    assert finite.sum() == 128
