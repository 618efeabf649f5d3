"""Small states of FusedAdam in checkpoints, made early, read and set; and bad arguments."""

import copy
import io
import pickle

import pytest
import torch

from apex.optimizers import FusedAdam

FP8 = torch.float8_e4m3fn
KINDS = {
    "fp8": {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": torch.uint8},
    "fp16_bf16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.bfloat16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "all": {
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": FP8,
        "master_weights": True,
        "store_param_remainders": True,
    },
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def save_and_load(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def take_steps(optimizer, grads):
    params = optimizer.param_groups[0]["params"]
    for step_grads in grads:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.clone()
        optimizer.step()


def make(device, steps=6):
    values = [torch.randn(n, device=device).bfloat16() for n in (37, 1, 300)]
    return values, [[torch.randn_like(v) for v in values] for _ in range(steps)]


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
@every_kind
def test_continues_bit_for_bit(kind, way, device):
    values, grads = make(device)
    straight = [torch.nn.Parameter(v.clone()) for v in values]
    take_steps(FusedAdam(straight, lr=0.1, **kind), grads)

    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = FusedAdam(params, lr=0.1, **kind)
    take_steps(optimizer, grads[:3])
    if way == "deepcopy":
        resumed = copy.deepcopy(optimizer)
    else:
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        resumed = FusedAdam(copies, lr=0.1, **kind)
        resumed.load_state_dict(save_and_load(optimizer.state_dict()))
    take_steps(resumed, grads[3:])
    for p, q in zip(straight, resumed.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("dtype", "peak", "tiny"),
    [(FP8, 447.9, 2.0**-9), (torch.float16, 32767.9, 2.0**-24)],
    ids=["fp8", "fp16"],
)
@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
def test_a_peak_that_is_rounded_up_to_the_limit_keeps_its_scale(dtype, peak, tiny, scale, device):
    """Twice the scale would cost the smallest numbers their last bit."""
    param = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = FusedAdam([param], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    optimizer.initialize_state(param)
    moment = torch.tensor([peak, tiny], device=device) * scale
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.set_scaled_state(param, key, moment)
    resumed = FusedAdam([param], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    resumed.load_state_dict(optimizer.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        kept = resumed.get_unscaled_state(param, key)
        assert torch.equal(kept, optimizer.get_unscaled_state(param, key))
        assert kept[1].item() == tiny * scale
    assert torch.equal(resumed.state[param]["state_scales"], optimizer.state[param]["state_scales"])


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@every_kind
def test_default_dtype_of_torch_changes_nothing(kind, default_dtype, device):
    params, results = [], []
    for dtype in (torch.float32, default_dtype):
        torch.set_default_dtype(dtype)
        param = torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.bfloat16, device=device))
        optimizer = FusedAdam([param], lr=0.1, **kind)
        optimizer.initialize_state(param)
        assert optimizer.state[param]["step"].dtype == torch.float32
        optimizer.set_scaled_state(param, "exp_avg", torch.full_like(param, 0.5))
        take_steps(optimizer, [[torch.full_like(param, 0.1)]] * 3)
        optimizer.load_state_dict(save_and_load(optimizer.state_dict()))
        take_steps(optimizer, [[torch.full_like(param, 0.1)]])
        params.append(param)
        results.append(optimizer.state_dict()["state"][0])
    assert torch.equal(*params)
    for key, value in results[0].items():
        assert value.dtype == results[1][key].dtype
        assert torch.equal(value, results[1][key])


@every_kind
def test_checkpoints_are_float32_and_load_into_torch(kind, device):
    values, grads = make(device, steps=2)
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = FusedAdam(params, lr=0.1, weight_decay=0.0, **kind)
    take_steps(optimizer, grads)
    saved = save_and_load(optimizer.state_dict())
    for entry, param in zip(saved["state"].values(), params, strict=True):
        assert set(entry) <= {"step", "exp_avg", "exp_avg_sq", "master_param"}
        assert all(value.dtype == torch.float32 for value in entry.values())
        if "master_param" in entry:
            torch.testing.assert_close(
                entry["master_param"].bfloat16(), param.detach(), rtol=2**-7, atol=0
            )
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    theirs = torch.optim.AdamW(wide, lr=0.1, weight_decay=0.0)
    theirs.load_state_dict(saved)
    assert theirs.state[wide[0]]["step"] == 2
    assert torch.equal(theirs.state[wide[0]]["exp_avg"], saved["state"][0]["exp_avg"])


def test_a_plain_checkpoint_loads_into_small_states(device):
    values, grads = make(device, steps=2)
    params = [torch.nn.Parameter(v.clone()) for v in values]
    plain = FusedAdam(params, lr=0.1, master_weights=True)
    take_steps(plain, grads)
    small = FusedAdam(params, lr=0.1, **KINDS["all"])
    small.load_state_dict(plain.state_dict())
    for p in params:
        assert small.state[p]["exp_avg_sq"].dtype == FP8
        for key, bound in (("exp_avg", 2**-8), ("exp_avg_sq", 2**-4)):
            actual, expected = small.get_unscaled_state(p, key), plain.state[p][key]
            # Half a unit in the last place; smallest float8 numbers have fewer digits.
            tiny = expected.abs().amax().item() * 2**-17
            torch.testing.assert_close(actual, expected, rtol=bound, atol=tiny)
        master = small.get_unscaled_state(p, "master_param")
        same = p.detach().float() - master
        assert same.abs().le(p.detach().abs().float() * 2**-8).all()


def test_states_can_be_made_read_and_set(device):
    value = torch.randn(9, device=device).bfloat16()
    param = torch.nn.Parameter(value.clone())
    optimizer = FusedAdam([param], lr=0.1, **KINDS["all"])
    optimizer.initialize_state(param, store_param_remainders=True)
    assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.get_unscaled_state(param, "exp_avg_sq").count_nonzero() == 0
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), value.float())
    moment = torch.rand(9, device=device)
    optimizer.set_scaled_state(param, "exp_avg_sq", moment)
    kept = optimizer.get_unscaled_state(param, "exp_avg_sq")
    torch.testing.assert_close(kept, moment, rtol=2**-4, atol=2**-17)
    other = torch.nn.Parameter(value.clone())
    twin = FusedAdam([other], lr=0.1, **KINDS["all"])
    twin.load_state_dict(optimizer.state_dict())
    for o in (optimizer, twin):
        take_steps(o, [[torch.ones_like(value)]])
    assert torch.equal(param, other)
    with pytest.raises(ValueError, match="must be given in full"):
        optimizer.set_scaled_state(param, "master_param", optimizer.state[param]["master_param"])
    with pytest.raises(ValueError, match="store_param_remainders is False"):
        optimizer.initialize_state(param, False)
    with pytest.raises(ValueError, match="not one of the optimizer's"):
        optimizer.initialize_state(torch.nn.Parameter(value.clone()))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exp_avg_dtype": torch.float64}, ValueError, "exp_avg_dtype must be"),
        ({"exp_avg_sq_dtype": torch.int8}, ValueError, "exp_avg_sq_dtype must be"),
        ({"master_weight_dtype": torch.bfloat16}, ValueError, "master_weight_dtype must be"),
        ({"master_weight_dtype": torch.float16}, ValueError, "needs master_weights=True"),
        ({"store_param_remainders": True}, ValueError, "needs master_weights=True"),
        ({"capturable": True, "exp_avg_dtype": FP8}, RuntimeError, "capturable=True needs"),
        ({"capturable": True, "use_decoupled_grad": True}, RuntimeError, "capturable=True needs"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **options)


def test_a_failed_step_changes_nothing(device):
    params = [torch.nn.Parameter(torch.ones(4, device=device).bfloat16()) for _ in range(2)]
    optimizer = FusedAdam(params, lr=0.1, use_decoupled_grad=True, **KINDS["all"])
    for p in params:
        p.decoupled_grad = torch.ones(4, device=device)
    optimizer.step()
    values = [p.detach().clone() for p in params]
    before = copy.deepcopy(optimizer.state_dict()["state"])
    for wrong in (torch.ones(5, device=device), torch.ones(4, device=device).to_sparse()):
        params[1].decoupled_grad = wrong
        with pytest.raises(RuntimeError, match="parameter 1"):
            optimizer.step()
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(p, v) for p, v in zip(params, values, strict=True))
    for index, entry in before.items():
        assert all(torch.equal(entry[key], after[index][key]) for key in entry)


def test_a_pickle_of_before_the_modules_moved_is_loaded():
    param = torch.nn.Parameter(torch.ones(3))
    pickled = pickle.dumps(FusedAdam([param], use_decoupled_grad=True), protocol=0)
    place = b"apex.optimizers.stepping.buckets\n"
    assert pickled.count(place) == 1
    clone = pickle.loads(pickled.replace(place, b"apex.optimizers._buckets\n"))
    clone.param_groups[0]["params"][0].decoupled_grad = torch.ones(3)
    clone.step()
    assert next(iter(clone.state.values()))["step"] == 1
