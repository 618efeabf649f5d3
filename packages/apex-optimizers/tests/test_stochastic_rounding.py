"""bfloat16 parameters rounded by chance: unbiased, of known bits, and bitwise resumable."""

import copy
import io

import pytest
import torch

from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.optimizers._shared.native.philox import philox
from apex_testkit.optimizers import run_steps

BF16 = torch.bfloat16
ROUNDED = {
    "adam": (FusedAdam, {"lr": 1e-3, "weight_decay": 0.1}),
    "adam capturable": (FusedAdam, {"lr": 1e-3, "capturable": True}),
    "sgd": (FusedSGD, {"lr": 1e-3}),
    "sgd momentum": (FusedSGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    "lamb": (FusedLAMB, {"lr": 1e-3, "weight_decay": 0.1}),
    "lamb capturable": (FusedLAMB, {"lr": 1e-3, "capturable": True}),
}
every_optimizer = pytest.mark.parametrize(("cls", "options"), ROUNDED.values(), ids=ROUNDED.keys())


def expected_halves(key, count, step, tensor):
    """The 16 random bits of each element of a tensor, from the definition."""
    runs = (count + 511) // 512
    number = torch.arange(8 * runs)
    third, fourth = torch.full_like(number, step), torch.full_like(number, tensor)
    words = torch.stack(philox([number, number * 0, third, fourth], torch.tensor(key)), -1)
    halves = torch.stack([words & 0xFFFF, words >> 16], -1).view(runs, 8, 8)
    places = [(), (1,), (2,), (3,), (1, 2), (1, 3), (1, 4), (1, 5)]
    parts = [halves.clone() for _ in places]
    for part, own in zip(parts, places, strict=True):
        for place in own:
            part ^= halves.roll(-place, -1)
    return torch.stack(parts, 1).flatten()[:count]


def rounded(exact, halves):
    """Float32 numbers rounded to bfloat16, away from zero where the lower bits and these carry."""
    return ((exact.view(torch.int32) + halves.int()) >> 16).to(torch.int16).view(BF16)


def exact_numbers(count, seed):
    """Parameters and gradients whose step with lr = 2**-9 float32 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    params = 1 + torch.randint(0, 128, (count,), generator=generator) / 128
    grads = torch.randint(-255, 256, (count,), generator=generator) / 256
    return params.to(BF16), grads.to(BF16)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_random_bits_are_those_of_the_definition(seed, device):
    sizes = [(5, 1003, 8, 200_000), (64, 7)]
    pairs = [[exact_numbers(n, 10 * i + n) for n in own] for i, own in enumerate(sizes)]
    params = [[torch.nn.Parameter(p.to(device, copy=True)) for p, _ in own] for own in pairs]
    optimizer = FusedSGD(
        [{"params": own} for own in params],
        lr=2**-9,
        stochastic_rounding=True,
        rounding_seed=seed,
    )
    values = [[p for p, _ in own] for own in pairs]
    for step in (1, 2):
        for own, given in zip(params, pairs, strict=True):
            for param, (_, grad) in zip(own, given, strict=True):
                param.grad = grad.to(device)
        optimizer.step()
        for index, (own, given) in enumerate(zip(params, pairs, strict=True)):
            key = seed + (len(sizes[0]) * index << 32)
            for row, (param, (_, grad)) in enumerate(zip(own, given, strict=True)):
                exact = values[index][row].float() - 2**-9 * grad.float()
                halves = expected_halves(key, len(grad), step, row)
                values[index][row] = rounded(exact, halves)
                assert torch.equal(param.detach().cpu(), values[index][row])


@every_optimizer
def test_a_million_roundings_have_no_bias(cls, options, device):
    """Neighbours of the exact value, with a mean error within 3 sigma of 0."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(1_000_000, generator=generator).to(BF16)
    grad = torch.randn(1_000_000, generator=generator).to(BF16)
    wide = torch.nn.Parameter(value.float().to(device))
    run_steps(cls, [wide], [[grad.float().to(device)]], **options)
    exact = wide.detach().cpu()
    param = torch.nn.Parameter(value.to(device))
    run_steps(cls, [param], [[grad.to(device)]], stochastic_rounding=True, **options)
    below = (exact.view(torch.int32) >> 16 << 16).view(torch.float32).double()
    step = ((exact.view(torch.int32) >> 16) + 1 << 16).view(torch.float32).double() - below
    share = (exact.double() - below) / step  # in [0, 1): the chance of the neighbour beyond
    up = (param.detach().cpu().double() - below) / step
    assert ((up == 0) | ((up == 1) & (share > 0))).all()
    sigma = (share * (1 - share)).sum().sqrt()
    assert sigma > 300
    assert abs((up - share).sum()) < 3 * sigma
    signed = (step.sign() * (up - share)).sum()  # not away from zero either
    assert abs(signed) < 3 * sigma


@every_optimizer
def test_updates_far_below_the_precision_add_up(cls, options, device):
    """Where rounding to nearest would leave every parameter as it is."""
    kept = {key: value for key, value in options.items() if key != "weight_decay"}
    options = {**kept, "lr": 1e-4, "weight_decay": 0.0}
    ends = {}
    for by_chance in (False, True):
        param = torch.nn.Parameter(torch.ones(20_000, device=device, dtype=BF16))
        grads = [[torch.full_like(param, -1.0)] for _ in range(50)]
        run_steps(cls, [param], grads, stochastic_rounding=by_chance, **options)
        ends[by_chance] = param.detach().double().mean().item()
    wide = torch.nn.Parameter(torch.ones(20_000, device=device))
    run_steps(cls, [wide], [[torch.full_like(wide, -1.0)] for _ in range(50)], **options)
    moved = wide.detach().double().mean().item() - 1
    assert ends[False] == 1.0 or "momentum" in options
    # 20,000 numbers, each off by at most the deviation of sums of roundings to steps of 2**-7.
    deviation = (moved * 2**-7 / 20_000) ** 0.5
    assert abs(ends[True] - 1 - moved) < 4 * deviation + 1e-6


def models_steps(optimizer, params, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()


def make(cls, options, device, **more):
    generator = torch.Generator().manual_seed(7)
    sizes = [(3,), (33, 65), (0,), (1000,)]
    dtypes = [BF16, BF16, BF16, torch.float32]
    params = [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(device, d))
        for s, d in zip(sizes, dtypes, strict=True)
    ]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    return cls(groups, stochastic_rounding=True, **{**options, **more}), params


def assert_equal(params, others):
    for one, other in zip(params, others, strict=True):
        assert torch.equal(one, other)


@every_optimizer
def test_goes_on_bit_by_bit_from_a_checkpoint(cls, options, device):
    optimizer, params = make(cls, options, device, rounding_seed=99)
    models_steps(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    saved, values = io.BytesIO(file.getvalue()), [p.detach().clone() for p in params]
    pair = copy.deepcopy((optimizer, params))
    models_steps(optimizer, params, range(3, 6))
    resumed, own = make(cls, options, device)  # the seed comes from the checkpoint
    for param, value in zip(own, values, strict=True):
        param.data.copy_(value)
    resumed.load_state_dict(torch.load(saved))
    models_steps(resumed, own, range(3, 6))
    assert_equal(params, own)
    models_steps(*pair, range(3, 6))
    assert_equal(params, pair[1])
    assert {group["rounding_seed"] for group in resumed.param_groups} == {99}


@every_optimizer
def test_seeds_and_steps_differ(cls, options, device):
    ends = []
    for seed in (0, 1):
        optimizer, params = make(cls, options, device, rounding_seed=seed)
        models_steps(optimizer, params, range(2))
        ends.append(params[1].detach().clone())
    assert not torch.equal(*ends)
    params = [torch.nn.Parameter(torch.ones(1000, device=device, dtype=BF16)) for _ in range(2)]
    grads = [torch.full_like(p, 0.5) for p in params]
    optimizer = cls(
        [{"params": [p]} for p in params], stochastic_rounding=True, **{**options, "lr": 0.001}
    )
    masks = []
    for _ in range(2):
        for param, grad in zip(params, grads, strict=True):
            param.data.fill_(1.0)
            param.grad = grad
        optimizer.step()
        masks += [p.detach() != 1 for p in params]
    assert all(mask.any() and not mask.all() for mask in masks)
    for index, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:index])


@pytest.mark.parametrize(("cls", "options"), [ROUNDED["adam"], ROUNDED["lamb"]])
def test_on_the_device_steps_are_the_same(cls, options, device):
    ends = []
    for capturable in (False, True):
        optimizer, params = make(cls, options, device, capturable=capturable)
        models_steps(optimizer, params, range(3))
        ends.append(params)
    for param, other in zip(*ends, strict=True):
        torch.testing.assert_close(param, other, rtol=2**-7, atol=0)  # pow of the device
        assert (param != other).double().mean().nan_to_num() < 0.01


def test_any_number_of_threads_rounds_alike(device):
    before, ends = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            value, grad = exact_numbers(300_007, 5)
            param = torch.nn.Parameter(value.to(device))
            run_steps(FusedSGD, [param], [[grad.to(device)]], lr=2**-9, stochastic_rounding=True)
            ends.append(param.detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*ends)


def test_many_small_tensors_are_rounded_as_large_ones(device):
    """Their lists stay in C++ from step to step."""
    sizes = [1 + i % 17 for i in range(64)]
    pairs = [exact_numbers(n, n) for n in sizes]
    params = [torch.nn.Parameter(p.to(device, copy=True)) for p, _ in pairs]
    optimizer = FusedSGD(params, lr=2**-9, stochastic_rounding=True)
    values = [p for p, _ in pairs]
    for step in range(1, 5):
        for param, (_, grad) in zip(params, pairs, strict=True):
            param.grad = grad.to(device)
        optimizer.step()
        for row, (_, grad) in enumerate(pairs):
            exact = values[row].float() - 2**-9 * grad.float()
            values[row] = rounded(exact, expected_halves(0, len(grad), step, row))
    assert_equal([p.detach().cpu() for p in params], values)


@pytest.mark.parametrize(("cls", "options"), [ROUNDED["adam"], ROUNDED["sgd"]])
def test_special_values(cls, options, device):
    special = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.38e38]
    param = torch.nn.Parameter(torch.tensor(special * 100, device=device).to(BF16))
    options = {**options, "weight_decay": 0.0}
    before = param.detach().clone()
    run_steps(cls, [param], [[torch.zeros_like(param)]], stochastic_rounding=True, **options)
    torch.testing.assert_close(param.detach(), before, rtol=0, atol=0, equal_nan=True)


@every_optimizer
def test_float16_is_refused(cls, options, device):
    param = torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.float16))
    with pytest.raises(TypeError, match=r"stochastic_rounding is for bfloat16 .* params\[0\]"):
        cls([param], stochastic_rounding=True, **options)
    param.data = param.data.bfloat16()
    optimizer = cls([param], stochastic_rounding=True, **options)
    param.data = param.data.half()
    param.grad = torch.ones_like(param)
    with pytest.raises(TypeError, match="stochastic_rounding is for bfloat16"):
        optimizer.step()
    assert param.detach().tolist() == [1.0] * 3


@every_optimizer
@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, None])
def test_bad_seeds(cls, options, seed, device):
    param = torch.nn.Parameter(torch.ones(3, device=device, dtype=BF16))
    with pytest.raises(ValueError, match=r"rounding_seed must be an int in \[0, 2\*\*32\)"):
        cls([param], stochastic_rounding=True, rounding_seed=seed, **options)


@pytest.mark.parametrize(
    "more",
    [{"master_weights": True}, {"exp_avg_dtype": BF16}, {"use_decoupled_grad": True}],
    ids=str,
)
def test_states_that_do_not_go_with_it(more, device):
    param = torch.nn.Parameter(torch.ones(3, device=device, dtype=BF16))
    with pytest.raises(ValueError, match="stochastic_rounding=True keeps no masters"):
        FusedAdam([param], stochastic_rounding=True, **more)


@pytest.mark.parametrize(
    ("cls", "counterpart", "options"),
    [(FusedAdam, torch.optim.AdamW, {}), (FusedSGD, torch.optim.SGD, {"momentum": 0.9})],
)
def test_checkpoints_of_torch_load_and_load_there(cls, counterpart, options, device):
    options = {"lr": 1e-3, **options}
    ours, params = make(cls, options, device)
    models_steps(ours, params, range(2))
    theirs = counterpart([{"params": params[:2]}, {"params": params[2:]}], **options)
    theirs.load_state_dict(ours.state_dict())
    models_steps(theirs, params, range(2, 4))
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    ours = cls([dict(group) for group in groups], stochastic_rounding=True, **options)
    plain = counterpart([dict(group) for group in groups], **options)
    models_steps(plain, params, range(4, 5))
    ours.load_state_dict(plain.state_dict())
    models_steps(ours, params, range(5, 6))
    assert all(group["rounding_seed"] == 0 for group in ours.param_groups)
