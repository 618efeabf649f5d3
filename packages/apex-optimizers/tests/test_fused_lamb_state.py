"""Checkpoints and copies of both LAMB classes, and input that they refuse."""

import copy
import io
import pickle

import pytest
import torch

from apex.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from apex_testkit import FLOATS
from apex_testkit.optimizers import run_steps
from apex_testkit.optimizers_lamb import lamb_reference

CLASSES = [FusedLAMB, FusedMixedPrecisionLamb]
both = pytest.mark.parametrize("cls", CLASSES, ids=["lamb", "mixed"])


def save_and_load(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def continue_with(optimizer, param, grads):
    for g in grads:
        param.grad = g.clone()
        optimizer.step()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("masters", [None, False, True], ids=["lamb", "mixed", "masters"])
def test_checkpoint_continues_bit_for_bit(dtype, masters, device):
    cls = FusedLAMB if masters is None else FusedMixedPrecisionLamb
    hyper = {"lr": 0.1, "weight_decay": 0.1}
    options = {}
    if masters:
        options["reduced_precision_dtype"] = dtype if dtype.itemsize == 2 else torch.float16
    value = torch.randn(37, device=device, dtype=dtype)
    grads = [torch.randn_like(value) for _ in range(6)]
    straight = torch.nn.Parameter(value.clone())
    run_steps(cls, [straight], [[g] for g in grads], **hyper, **options)

    param = torch.nn.Parameter(value.clone())
    first = run_steps(cls, [param], [[g] for g in grads[:3]], **hyper, **options)
    saved = save_and_load(first.state_dict())
    keys = {"exp_avg", "exp_avg_sq", "step"}
    if masters and dtype.itemsize == 2:
        keys.add("master_param")
        assert saved["state"][0]["master_param"].dtype == torch.float32
    assert set(saved["state"][0]) == keys
    assert saved["state"][0]["exp_avg"].dtype == (dtype if dtype.itemsize == 8 else torch.float32)

    optimizer = cls([param], **options)
    optimizer.load_state_dict(saved)
    continue_with(optimizer, param, grads[3:])
    assert torch.equal(param, straight)
    assert int(optimizer.param_groups[0]["step"]) == 6


@both
def test_state_of_before_the_first_step(cls, device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = cls([param], lr=1.0)
    optimizer.load_state_dict(save_and_load(cls([param], lr=0.5).state_dict()))
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    continue_with(optimizer, param, [torch.ones_like(param)])
    assert int(optimizer.param_groups[0]["step"]) == 1


@both
def test_checkpoint_in_apex_layout_with_group_step(cls, device):
    """Apex keeps the step in the group, moments in the parameter's dtype, and no masters."""
    value = torch.randn(5, device=device, dtype=torch.float64)
    grads = [torch.randn_like(value) for _ in range(4)]
    param = torch.nn.Parameter(value.clone())
    state = run_steps(cls, [param], [[g] for g in grads[:2]], lr=0.125).state_dict()
    del state["state"][0]["step"], state["param_groups"][0]["maximize"]
    optimizer = cls([param])
    optimizer.load_state_dict(state)
    continue_with(optimizer, param, grads[2:])
    expected = lamb_reference([value], *([g] for g in grads), lr=0.125)[0]
    torch.testing.assert_close(param.detach(), expected)


@both
def test_states_pass_between_the_classes(cls, device):
    other = CLASSES[1 - CLASSES.index(cls)]
    value = torch.randn(37, device=device)
    grads = [torch.randn_like(value) for _ in range(4)]
    param = torch.nn.Parameter(value.clone())
    saved = run_steps(cls, [param], [[g] for g in grads[:2]], lr=0.125).state_dict()
    optimizer = other([param])
    optimizer.load_state_dict(save_and_load(saved))
    continue_with(optimizer, param, grads[2:])
    expected = torch.nn.Parameter(value.clone())
    run_steps(cls, [expected], [[g] for g in grads], lr=0.125)
    assert torch.equal(param, expected)


@both
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_keep_what_the_formula_depends_on(clone, cls, device):
    param = torch.nn.Parameter(torch.randn(4, device=device, dtype=torch.bfloat16))
    options = {"adam_w_mode": False, "use_nvlamb": True, "weight_decay": 0.5}
    if cls is FusedMixedPrecisionLamb:
        options["reduced_precision_dtype"] = torch.bfloat16
    optimizer = run_steps(cls, [param], [[torch.ones_like(param)]], lr=0.1, **options)
    twin = clone(optimizer)
    own = twin.param_groups[0]["params"][0]
    for p, o in ((param, optimizer), (own, twin)):
        p.grad = torch.tensor([1.0, -2.0, 3.0, -4.0], device=device).bfloat16()
        o.step()
    assert twin.state[own].keys() == optimizer.state[param].keys()
    assert torch.equal(param, own)


@both
def test_a_state_of_another_model_changes_nothing(cls, device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = run_steps(cls, [param], [[torch.ones_like(param)]])
    before = copy.deepcopy(optimizer.state_dict())
    other = run_steps(cls, [torch.nn.Parameter(torch.ones(5))], [[torch.ones(5)]]).state_dict()
    two = cls([torch.nn.Parameter(torch.ones(4)) for _ in range(2)]).state_dict()
    for state, message in (
        (other, r"'exp_avg' has shape \[5\].*\[4\] float32"),
        (two, r"groups of \[1\] parameters.*groups of \[2\]"),
    ):
        with pytest.raises(ValueError, match=f"{cls.__name__}.load_state_dict.*{message}"):
            optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, value in before["state"][0].items():
        assert torch.equal(after["state"][0][key], value)


@pytest.mark.parametrize("several_buckets", [False, True])
@pytest.mark.parametrize("warm", [False, True], ids=["first_step", "later_step"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@both
def test_a_failed_step_changes_nothing(cls, max_grad_norm, warm, several_buckets, device):
    dtypes = [torch.float32, torch.bfloat16 if several_buckets else torch.float32]
    params = [torch.nn.Parameter(torch.ones(4, 4, device=device, dtype=d)) for d in dtypes]
    optimizer = cls(params, lr=0.1, max_grad_norm=max_grad_norm)
    if warm:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    for kind, message in (
        ("sparse", "gradient of parameter 0 is sparse|gradient of parameter 1 is sparse"),
        ("dtype", "and its gradient differ: .*float64"),
        ("shape", r"and its gradient differ: .*\[4, 2\]"),
    ):
        before = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
        for p in params:
            p.grad = torch.ones_like(p)
        if kind == "sparse":
            params[1].grad = params[1].grad.to_sparse()
        elif kind == "dtype":  # changed after the gradient was set
            params[1].grad.data = params[1].grad.data.double()
        else:
            params[1].grad.data = params[1].grad.data[:, :2]
        with pytest.raises(RuntimeError, match=f"{cls.__name__}.step: .*{message}"):
            optimizer.step()
        after = optimizer.state_dict()
        assert all(torch.equal(a, b) for a, b in zip(before[0], params, strict=True))
        assert after["param_groups"] == before[1]["param_groups"]
        assert after["state"].keys() == before[1]["state"].keys()
        for index, entry in before[1]["state"].items():
            assert all(torch.equal(entry[k], after["state"][index][k]) for k in entry)


@both
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be >= 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be in \[0, 1\), got 1.0"),
        ({"eps": -1e-8}, ValueError, "eps must be >= 0"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay must be >= 0, got nan"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be >= 0, got -1.0"),
        ({"lr": torch.ones(2)}, ValueError, r"lr must have one element, got shape \[2\]"),
        ({"amsgrad": True}, RuntimeError, "amsgrad=True is not supported"),
    ],
)
def test_bad_hyper_parameters(options, error, message, cls):
    with pytest.raises(error, match=f"{cls.__name__}: {message}"):
        cls([torch.nn.Parameter(torch.ones(1))], **options)


@both
def test_bad_groups_are_not_added(cls):
    optimizer = cls([torch.nn.Parameter(torch.ones(2))])
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="lr must be >= 0, got -1"):
        optimizer.add_param_group({"params": [param], "lr": -1.0})
    short_param = torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"params\[0\] must be float64.*float8_e5m2"):
        optimizer.add_param_group({"params": [short_param]})
    assert len(optimizer.param_groups) == 1


@both
def test_attributes_of_apex(cls):
    import amp_C

    optimizer = cls([torch.nn.Parameter(torch.ones(2))], adam_w_mode=False, use_nvlamb=True)
    kernel = "multi_tensor_lamb" if cls is FusedLAMB else "multi_tensor_lamb_mp"
    assert optimizer.multi_tensor_lamb is getattr(amp_C, kernel)
    assert optimizer.multi_tensor_l2norm is amp_C.multi_tensor_l2norm
    assert optimizer.adam_w_mode == 0
    assert optimizer.use_nvlamb
    assert optimizer._dummy_overflow_buf.dtype == torch.int32
