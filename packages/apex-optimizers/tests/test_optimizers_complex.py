"""Complex parameters, of every optimizer: parts are numbers, norms are those of complex numbers."""

import copy
import io
from functools import partial

import pytest
import torch

import apex.optimizers
from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from apex_testkit.optimizers import run_steps

C64, C128 = torch.complex64, torch.complex128
SHAPES = [(37,), (1,), (0,), (), (5, 8), (3, 4, 2, 2)]
MAKERS = {
    "adam": partial(FusedAdam, lr=0.1, weight_decay=0.1),
    "adam_capturable": partial(FusedAdam, lr=0.1, capturable=True),
    "amsgrad": partial(FusedAdam, lr=0.1, amsgrad=True, betas=(0.9, 0.6)),
    "adagrad": partial(FusedAdagrad, lr=0.1, weight_decay=0.1),
    "lamb": partial(FusedLAMB, lr=0.1),
    "lamb_mixed": partial(FusedMixedPrecisionLamb, lr=0.1),
    "lars": partial(FusedLARS, lr=0.1, momentum=0.9, weight_decay=0.1),
    "novograd": partial(FusedNovoGrad, lr=0.1, weight_decay=0.1),
    "novograd_max": partial(FusedNovoGrad, lr=0.1, norm_type=0),
    "sgd": partial(FusedSGD, lr=0.1, momentum=0.9, weight_decay=0.1),
}
all_optimizers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
DECAY = {"lr": 0.1, "weight_decay": 0.1}
AMSGRAD = {"amsgrad": True, "betas": (0.9, 0.6)}
PAIRS = {
    "adamw": (FusedAdam, {}, torch.optim.AdamW, {}, DECAY),
    "adam": (FusedAdam, {"adam_w_mode": False}, torch.optim.Adam, {}, DECAY),
    "amsgrad": (FusedAdam, {}, torch.optim.AdamW, {}, {**DECAY, **AMSGRAD}),
    "amsgrad_l2": (
        FusedAdam,
        {"adam_w_mode": False},
        torch.optim.Adam,
        {},
        {**DECAY, **AMSGRAD, "maximize": True},
    ),
    "sgd": (FusedSGD, {}, torch.optim.SGD, {}, {**DECAY, "momentum": 0.9, "nesterov": True}),
    "sgd_plain": (FusedSGD, {}, torch.optim.SGD, {}, {**DECAY, "maximize": True}),
    "adagrad": (FusedAdagrad, {}, torch.optim.Adagrad, {}, DECAY),
}
all_pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())


def random(shape, dtype, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    parts = scale * torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
    return torch.view_as_complex(parts).to(dtype)


def make_params(device, dtype=C64, shapes=SHAPES):
    return [
        torch.nn.Parameter(random(shape, dtype, seed).to(device))
        for seed, shape in enumerate(shapes)
    ]


def make_grads(params, steps, scale=1.0):
    return [
        [random(p.shape, p.dtype, 100 * t + i, scale).to(p.device) for i, p in enumerate(params)]
        for t in range(1, steps + 1)
    ]


def go_on(optimizer, params, grads):
    for own in grads:
        for param, grad in zip(params, own, strict=True):
            param.grad = grad
        optimizer.step()


def real_twins(params):
    return [torch.nn.Parameter(torch.view_as_real(p.detach()).clone()) for p in params]


def test_every_optimizer_is_here():
    names = {*apex.optimizers.__all__} - {"CPUOffload"}
    assert {make.func.__name__ for make in MAKERS.values()} == names


@all_pairs
def test_steps_and_states_are_those_of_torch(pair, device):
    ours, our_options, theirs, their_options, options = pair
    params, twins = make_params(device, C128), make_params(device, C128)
    grads = make_grads(params, 6)
    own = run_steps(ours, params, grads, **our_options, **options)
    other = run_steps(theirs, twins, grads, **their_options, **options)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
        for key, value in other.state[q].items():
            if value is not None:  # the buffer of SGD without momentum
                kept = own.state[p][key]
                assert kept.dtype == value.dtype
                torch.testing.assert_close(kept, value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
@all_pairs
def test_checkpoints_exchange_with_torch(pair, dtype, direction, device):
    ours, our_options, theirs, their_options, options = pair
    params, twins = make_params(device, dtype), make_params(device, dtype)
    grads = make_grads(params, 4)
    run_steps(theirs, twins, grads, **their_options, **options)
    optimizers = [
        ours(params, **our_options, **options),
        theirs(params, **their_options, **options),
    ]
    if direction == "from_torch":
        optimizers.reverse()
    go_on(optimizers[0], params, grads[:2])
    file = io.BytesIO()
    torch.save(optimizers[0].state_dict(), file)
    file.seek(0)
    optimizers[1].load_state_dict(torch.load(file, weights_only=True))
    go_on(optimizers[1], params, grads[2:])
    tolerance = {C64: 1e-5, C128: 1e-12}[dtype]  # orders of operations differ
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@all_optimizers
def test_parts_are_stepped_as_real_numbers(make, device):
    """Bit for bit; but the largest modulus is not the largest part."""
    params = make_params(device)
    twins, grads = real_twins(params), make_grads(params, 4)
    ours, theirs = make(params), make(twins)
    go_on(ours, params, grads)
    go_on(theirs, twins, [list(map(torch.view_as_real, own)) for own in grads])
    if make.keywords.get("norm_type") == 0:
        assert not torch.equal(torch.view_as_real(params[0].detach()), twins[0])
        return
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(torch.view_as_real(p.detach()), q)
        assert p.grad.is_complex()


def test_the_largest_modulus_is_taken(device):
    param = torch.nn.Parameter(torch.zeros(3, dtype=C64, device=device))
    grad = torch.tensor([3 + 4j, -4.5 + 0j, 4.5j], device=device)
    optimizer = run_steps(FusedNovoGrad, [param], [[grad]], lr=1.0, norm_type=0, eps=0.0)
    assert optimizer.param_groups[0]["exp_avg_sq"][1].tolist() == [5.0]
    # m = 0.1 g, of which the correction makes g, and 5 / sqrt(1 - 0.999)
    expected = -grad / (5 / (1 - 0.999) ** 0.5)
    torch.testing.assert_close(param.detach(), expected)
    huge = torch.full_like(grad, 3e38 + 1e37j)  # whose square float32 cannot hold
    optimizer = run_steps(FusedNovoGrad, [param], [[huge]], lr=1.0, norm_type=0)
    assert optimizer.param_groups[0]["exp_avg_sq"][1].isfinite().all()


@all_optimizers
def test_norms_are_of_the_modulus(make, device):
    """A number turned in the complex plane has the same norms: steps of these turn with it."""
    if make.func not in (FusedLAMB, FusedLARS, FusedNovoGrad, FusedMixedPrecisionLamb):
        return
    param = torch.nn.Parameter(torch.full((8,), 2 + 0j, device=device))
    turned = torch.nn.Parameter(param.detach() * 1j)
    grad = torch.full_like(param, 0.5)
    for own, g in ((param, grad), (turned, grad * 1j)):
        optimizer = make([own])
        go_on(optimizer, [own], [[g]] * 3)
    torch.testing.assert_close(turned.detach(), param.detach() * 1j, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["plain", "capturable"])
def test_clips_as_torch_does(options, device):
    params, twins = make_params(device, C128), make_params(device, C128)
    real = [torch.nn.Parameter(torch.ones(5, device=device, dtype=torch.float64)) for _ in "ab"]
    (grads,) = make_grads(params, 1)
    ours = FusedAdam([*params, real[0]], lr=0.1, **options)
    theirs = torch.optim.AdamW([*twins, real[1]], lr=0.1, weight_decay=0.0)
    for own, other, grad in zip(params, twins, grads, strict=True):
        own.grad, other.grad = grad.clone(), grad.clone()
    for own in real:
        own.grad = torch.full_like(own, 0.5)
    norm = torch.nn.utils.clip_grad_norm_([*twins, real[1]], 0.1)
    ours.step(max_norm=0.1)
    theirs.step()
    torch.testing.assert_close(ours.grad_norm[0], norm, rtol=1e-12, atol=0)
    for p, q in zip([*params, real[0]], [*twins, real[1]], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)  # lr is float32 on the device


def layouts(grad):
    """The same gradient, conjugated where it is read, in gaps, and in another order."""
    yield grad.conj().resolve_conj().conj()
    yield torch.stack([grad, grad], -1)[..., 0]
    yield grad.t().contiguous().t()
    yield torch._neg_view((-grad).contiguous())
    yield grad.conj().resolve_conj().t().contiguous().t().conj()


@all_optimizers
def test_gradients_of_every_layout(make, device):
    (grads,) = make_grads(make_params(device, shapes=[(5, 8)]), 1)
    ends = []
    for grad in (grads[0], *layouts(grads[0])):
        assert torch.equal(grad, grads[0])
        params = make_params(device, shapes=[(5, 8)])
        go_on(make(params), params, [[grad]] * 3)
        ends.append(params[0].detach())
        assert torch.equal(grad, grads[0])  # only read
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_scaled_gradients_are_unscaled_in_every_layout(device):
    """In memory, as with real gradients; also in that of conjugates."""
    (grads,) = make_grads(make_params(device, shapes=[(5, 8)]), 1)
    expected = make_params(device, shapes=[(5, 8)])
    go_on(FusedAdam(expected, lr=0.1, capturable=True), expected, [grads])
    for grad in (grads[0] * 8, *layouts(grads[0] * 8)):
        params = make_params(device, shapes=[(5, 8)])
        optimizer = FusedAdam(params, lr=0.1, capturable=True)
        optimizer.grad_scale = torch.tensor(8.0, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
        go_on(optimizer, params, [[grad]])
        assert torch.equal(params[0], expected[0])
        assert torch.equal(grad, grads[0])
        optimizer.found_inf += 1
        before = params[0].detach().clone()
        optimizer.step()
        assert torch.equal(params[0], before)


@all_optimizers
def test_parameters_of_every_layout_beside_real_ones(make, device):
    (grads,) = make_grads(make_params(device, shapes=[(4, 6, 3, 2)]), 1)
    ends = []
    for form in ("contiguous", "channels_last", "transposed"):
        (param,) = make_params(device, shapes=[(4, 6, 3, 2)])
        if form == "channels_last":
            param.data = param.data.contiguous(memory_format=torch.channels_last)
        elif form == "transposed":
            param.data = param.data.transpose(0, 3).contiguous().transpose(0, 3)
        real = [
            torch.nn.Parameter(torch.ones(3, device=device, dtype=d))
            for d in (torch.half, torch.float64)
        ]
        params, optimizer = [param, *real], make([param, *real])
        own = [grads[0], *(torch.ones_like(p) for p in real)]
        go_on(optimizer, params, [own] * 3)
        for key, value in optimizer.state[param].items():
            if key != "step":
                assert value.dtype == C64
                assert value.stride() == param.stride()
        ends.append(param.detach().contiguous())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-6)  # norms in another order
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-6, atol=1e-6)


@all_optimizers
def test_copies_and_checkpoints_continue_bit_for_bit(make, device):
    params = make_params(device)
    grads = make_grads(params, 4)
    go_on(make(params), params, grads)
    own = make_params(device)
    half = make(own)
    go_on(half, own, grads[:2])
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in own]
    loaded = make(resumed)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied, copies = copy.deepcopy((half, own))
    for optimizer, others in ((loaded, resumed), (copied, copies)):
        go_on(optimizer, others, grads[2:])
        assert all(map(torch.equal, others, params))


@pytest.mark.parametrize(
    "options",
    [
        {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
        {"master_weights": True, "master_weight_dtype": torch.float16},
        {"master_weights": True, "store_param_remainders": True},
        {"stochastic_rounding": True},
        {"use_decoupled_grad": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_small_states_are_not_for_complex_parameters(options, device):
    """They keep all bits, as float64 parameters do."""
    params, twins = make_params(device), make_params(device)
    grads = make_grads(params, 3)
    optimizer = FusedAdam(params, lr=0.1, **options)
    for own in grads:
        for p, g in zip(params, own, strict=True):
            setattr(p, "decoupled_grad" if "use_decoupled_grad" in options else "grad", g)
        optimizer.step()
    run_steps(FusedAdam, twins, grads, lr=0.1)
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert torch.equal(
            optimizer.get_unscaled_state(p, "exp_avg"), optimizer.state[p]["exp_avg"]
        )


def spoiled(kind, param):
    grad = torch.ones_like(param.detach())
    if kind == "sparse":
        param.grad = grad.to_sparse()
        return
    param.grad = grad
    dtype = {"real": torch.float32, "complex128": C128, "complex64": C64}[kind]
    grad.data = torch.ones(param.shape, dtype=dtype, device=param.device)


@pytest.mark.parametrize("kind", ["real", "complex128", "sparse"])
@all_optimizers
def test_a_gradient_that_cannot_be_used_changes_nothing(make, kind, device):
    params = make_params(device, shapes=[(5, 8), (2,)])
    optimizer = make(params)
    for own in make_grads(params, 2):
        go_on(optimizer, params, [own])
    before = copy.deepcopy((params, optimizer.state_dict()))
    params[0].grad = torch.ones_like(params[0])
    spoiled(kind, params[1])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="parameter 1"):
            optimizer.step()
        assert all(map(torch.equal, params, before[0]))
        state = optimizer.state_dict()["state"]
        for index, entry in before[1]["state"].items():
            assert all(torch.equal(entry[key], state[index][key]) for key in entry)


@all_optimizers
def test_a_complex_gradient_of_a_real_parameter_is_refused(make, device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    spoiled("complex64", param)
    with pytest.raises(RuntimeError, match=r"parameter 0 and its gradient differ.* complex64"):
        make([param]).step()
    assert param.eq(1).all()


@all_optimizers
def test_a_conjugated_parameter_is_refused(make, device):
    """Its memory holds other numbers than it means."""
    param = torch.nn.Parameter(random((3,), C64, 0).to(device).conj())
    before, param.grad = param.detach().clone(), torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"parameter 0.* is a conjugated view"):
        make([param]).step()
    assert torch.equal(param, before)


@all_optimizers
def test_states_of_real_parameters_are_refused(make, device):
    params = make_params(device, shapes=[(5,)])
    real = torch.nn.Parameter(torch.ones(5, device=device))
    states = {}
    for param in (real, params[0]):
        optimizer = make([param])
        go_on(optimizer, [param], [[torch.ones_like(param)]])
        states[param] = optimizer.state_dict()
    for own, other in ((real, params[0]), (params[0], real)):
        optimizer = make([own])
        with pytest.raises(ValueError, match="states of complex parameters are complex"):
            optimizer.load_state_dict(states[other])
        assert not optimizer.state


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@all_optimizers
def test_complex_numbers_of_32_bits_are_refused(make, device):
    """They are experimental in torch, which loads no wide states for them."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex32, device=device))
    with pytest.raises(TypeError, match=r"params\[0\] must be .* complex128, got \[3\] complex32"):
        make([param])


def test_initial_values_of_adagrad_are_torchs(device):
    """Both parts of a sum start with the value."""
    params, twins = make_params(device, C128), make_params(device, C128)
    grads = make_grads(params, 2)
    groups = [{"params": params, "initial_accumulator_value": 0.5}]
    ours = FusedAdagrad(groups, lr=0.1)
    assert ours.state_dict()["state"][0]["sum"].eq(0.5 + 0.5j).all()
    go_on(ours, params, grads)
    run_steps(torch.optim.Adagrad, twins, grads, lr=0.1, initial_accumulator_value=0.5)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
