"""CPUOffload against its optimizer without it, bit by bit; random calls: test_optimizers_machine.

On the CPU a LazyLink is between device and host: who does not wait for it finds old values.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from apex.optimizers import (
    CPUOffload,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from apex.optimizers.cpu_offload import pipeline, threads
from apex_testkit.simulated_link import LazyLink, SimulatedLink

BF16 = torch.bfloat16
SIZES = [(64, 100), (7,), (300, 40), (33, 3, 3, 5), (4096,)]
CASES = {
    "adam": (FusedAdam, {"weight_decay": 0.1}),
    "adam_masters": (FusedAdam, {"master_weights": True}),
    "adam_float8": (FusedAdam, {"exp_avg_dtype": torch.float8_e4m3fn, "master_weights": True}),
    "adam_remainders": (FusedAdam, {"master_weights": True, "store_param_remainders": True}),
    "lamb": (FusedLAMB, {"weight_decay": 0.1}),
    "novograd": (FusedNovoGrad, {"weight_decay": 0.1}),
    "adagrad": (FusedAdagrad, {}),
    "sgd": (FusedSGD, {"momentum": 0.9, "nesterov": True}),
    "lars": (FusedLARS, {"momentum": 0.9}),
}
all_cases = pytest.mark.parametrize("case", CASES)
both_ways = pytest.mark.parametrize("takes", [False, True], ids=["kept", "taken"])


def make_params(device, dtype=BF16, sizes=SIZES):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in sizes]
    made[3] = made[3].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(p) for p in made]


def groups_of(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]


def offloaded(params, cls=FusedAdam, **options):
    """On the CPU, parameters are as far away as those of a GPU are."""
    if params[0].device.type == "cpu":
        options.setdefault("link", LazyLink())
    return CPUOffload(groups_of(params), cls, **{"lr": 0.05, **options})


def loss_of(params, step):
    return sum((p * (1 + step + i) - 1).float().square().mean() for i, p in enumerate(params))


def assert_same(ours, theirs):
    """Of nested containers; without tolerance."""
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def train(ours, theirs, optimizer, plain, steps=3, **limits):
    """The same gradients for both: those of a GPU may differ in a bit."""
    for step in range(steps):
        loss_of(theirs, step).backward()
        for own, other in zip(ours, theirs, strict=True):
            own.grad = other.grad.to(own.device)
        optimizer.step(**limits)
        plain.step(**limits)
        optimizer.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)
        assert_same(ours, theirs)


@both_ways
@all_cases
def test_same_bits_as_without(case, takes, device, monkeypatch):
    monkeypatch.setattr(pipeline, "_PART", 5000)  # several parts a group
    cls, options = CASES[case]
    ours, theirs = make_params(device), make_params("cpu")
    optimizer = offloaded(ours, cls, offload_gradients=takes, **options)
    plain = cls(groups_of(theirs), lr=0.05, **options)
    train(ours, theirs, optimizer, plain)
    assert_same(optimizer.state_dict(), plain.state_dict())
    moments = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    assert moments
    assert {v.device.type for v in moments} <= {"cpu", device.type}


@both_ways
def test_backward_by_autograd(takes, device):
    """Hooks take gradients as they come, and add those of several backwards."""
    ours, theirs = make_params(device, torch.float32), make_params(device, torch.float32)
    optimizer = offloaded(ours, offload_gradients=takes, minimal_size=100)
    plain = FusedAdam(groups_of(theirs), lr=0.05)
    for step in range(3):
        for _ in range(step + 1):
            for params in (ours, theirs):
                loss_of(params, step).backward()
            assert [p.grad is None for p in ours] == [takes and p.numel() >= 100 for p in ours]
        optimizer.step()
        plain.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        if not takes:  # a step uses up what was taken
            optimizer.zero_grad()
        else:
            ours[1].grad = None
        plain.zero_grad()


def test_against_float64(device):
    """Adam by its formula, from gradients of 16 bits, with float32 masters."""
    params = make_params(device)
    optimizer = offloaded(params, master_weights=True, weight_decay=0.1)
    exact = [p.detach().cpu().double() for p in params]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in exact]
    for step in range(1, 6):
        loss_of(params, step).backward()
        for index, (p, (m, v)) in enumerate(zip(exact, moments, strict=True)):
            g = params[index].grad.cpu().double()
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            update = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            p.sub_((0.05 if index < 2 else 0.02) * (update + 0.1 * p))
        optimizer.step()
        optimizer.zero_grad()
    for param, p in zip(params, exact, strict=True):
        master = optimizer.state[param]["master_param"].cpu()
        torch.testing.assert_close(master.double(), p, rtol=1e-5, atol=1e-6)
        assert torch.equal(param.detach().cpu(), master.to(BF16))


LIMITS = [{"max_norm": 0.1}, {"skip_nonfinite": True}, {"skip_above": 0.0}]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@both_ways
def test_limits(limits, takes, device):
    ours, theirs = make_params(device), make_params("cpu")
    optimizer = offloaded(ours, offload_gradients=takes)
    plain = FusedAdam(groups_of(theirs), lr=0.05)
    train(ours, theirs, optimizer, plain, **limits)
    if device.type == "cpu":  # two devices add the norm in another order
        assert_same(optimizer.grad_norm, plain.grad_norm)


def test_parts_overlap(monkeypatch):
    """All gradients are asked for before the first is waited for; each part leaves at once."""
    monkeypatch.setattr(pipeline, "_PART", 1000)
    params = [torch.nn.Parameter(torch.ones(1000)) for _ in range(4)]
    link = LazyLink()
    optimizer = CPUOffload(params, FusedAdam, minimal_size=0, link=link)
    for _ in range(2):
        link.log.clear()
        sum(p.sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    receive, send = ("receive", [1000]), ("send", [1000])
    waits = [("wait", "receive"), send]
    assert link.log == [*[receive] * 4, *waits * 4, *[("wait", "send")] * 4]


def test_gradients_that_arrive_first_are_stepped_first(monkeypatch):
    monkeypatch.setattr(pipeline, "_PART", 10)
    layers = torch.nn.Sequential(*(torch.nn.Linear(n, n + 1, bias=False) for n in range(4, 8)))
    link = LazyLink()
    optimizer = CPUOffload(
        layers.parameters(), FusedAdam, offload_gradients=True, minimal_size=0, link=link
    )
    assert len(link.log) == 8  # parameters, and waiting for them
    layers(torch.randn(2, 4)).sum().backward()
    sizes = [p.numel() for p in layers.parameters()]
    gradients = [("receive", [size]) for size in reversed(sizes)]
    assert link.log[8:] == gradients
    optimizer.step()
    assert [own for way, own in link.log if way == "send"] == [[s] for s in reversed(sizes)]


def test_what_is_being_sent_is_not_written_to(monkeypatch):
    """Only a GPU waits for what was sent when a step ends."""
    params, link = [torch.nn.Parameter(torch.ones(100))], LazyLink()
    monkeypatch.setattr(link, "join", lambda: None)
    optimizer = CPUOffload(params, FusedAdam, minimal_size=0, link=link)
    link.log.clear()
    for _ in range(2):
        params[0].grad = torch.ones(100)
        optimizer.step()
    step = [("receive", [100]), ("wait", "receive"), ("send", [100])]
    again = [("receive", [100]), ("wait", "receive"), ("wait", "send"), ("send", [100])]
    assert link.log == step + again


def test_threads_of_a_link():
    """The same where copies really go on beside the step."""
    ours, theirs = make_params("cpu"), make_params("cpu")
    optimizer = offloaded(ours, link=SimulatedLink(speed=5e6, delay=1e-4), master_weights=True)
    plain = FusedAdam(groups_of(theirs), lr=0.05, master_weights=True)
    train(ours, theirs, optimizer, plain, steps=5)


@both_ways
def test_a_step_that_is_refused_changes_nothing(takes, device):
    params = make_params(device)
    optimizer = offloaded(params, offload_gradients=takes)
    loss_of(params, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy([[p.detach() for p in params], optimizer.state_dict()])
    for p in params:
        p.grad = torch.ones_like(p)
    params[2].grad = torch.zeros_like(params[2].detach()).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    optimizer.param_groups[1]["eps"] = -1.0
    params[2].grad = torch.ones_like(params[2])
    with pytest.raises(RuntimeError, match="eps"):
        optimizer.step()
    optimizer.param_groups[1]["eps"] = 1e-8
    assert_same([[p.detach() for p in params], optimizer.state_dict()], before)


def test_a_link_that_fails():
    ours, theirs = make_params("cpu", torch.float32), make_params("cpu", torch.float32)
    link = LazyLink()
    optimizer = offloaded(ours, link=link, minimal_size=0)
    plain = FusedAdam(groups_of(theirs), lr=0.05)
    train(ours, theirs, optimizer, plain)
    for p in ours:
        p.grad = torch.ones_like(p)
    link.fails = {"receive"}
    with pytest.raises(RuntimeError, match="the link failed"):
        optimizer.step()
    assert_same(ours, theirs)  # the first part failed
    train(ours, theirs, optimizer, plain)


def test_steps_under_inference_mode():
    ours, theirs = make_params("cpu"), make_params("cpu")
    optimizer, plain = offloaded(ours), FusedAdam(groups_of(theirs), lr=0.05)
    train(ours, theirs, optimizer, plain)
    for params, own in ((ours, optimizer), (theirs, plain)):
        loss_of(params, 7).backward()
        with torch.inference_mode():
            own.step()
        own.zero_grad()
    train(ours, theirs, optimizer, plain)


def test_several_processes_keep_gradients(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    offloaded(make_params("cpu"))
    with pytest.raises(ValueError, match="offload_gradients must be False where there are several"):
        offloaded(make_params("cpu"), offload_gradients=True)


def test_parameters_changed_by_others(device):
    ours, theirs = make_params(device), make_params("cpu")
    optimizer = offloaded(ours, master_weights=True)
    plain = FusedAdam(groups_of(theirs), lr=0.05, master_weights=True)
    train(ours, theirs, optimizer, plain)
    with torch.no_grad():
        ours[0].clamp_(-0.1, 0.1)
        theirs[0].clamp_(-0.1, 0.1)
    train(ours, theirs, optimizer, plain)
    ours[2].data.zero_()
    optimizer.fetch_parameters()
    with torch.no_grad():
        theirs[2].zero_()
    train(ours, theirs, optimizer, plain)


@pytest.mark.parametrize("is_ours_saved", [True, False])
@all_cases
def test_checkpoints_both_ways(case, is_ours_saved, device):
    cls, options = CASES[case]
    ours, theirs = make_params(device), make_params("cpu")
    optimizer, plain = offloaded(ours, cls, **options), cls(groups_of(theirs), lr=0.05, **options)
    train(ours, theirs, optimizer, plain)
    saved = copy.deepcopy((optimizer if is_ours_saved else plain).state_dict())
    for params in (ours, theirs):
        params[:] = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer, plain = offloaded(ours, cls, **options), cls(groups_of(theirs), lr=0.05, **options)
    optimizer.load_state_dict(saved)
    plain.load_state_dict(copy.deepcopy(saved))
    train(ours, theirs, optimizer, plain)
    assert_same(optimizer.state_dict(), plain.state_dict())


def test_distributed_checkpoint():
    """Names of torch.distributed.checkpoint are found by the model's own parameters."""
    model = torch.nn.Linear(80, 60)
    optimizer = CPUOffload(model.parameters(), FusedAdam, link=LazyLink())
    model(torch.ones(2, 80)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = get_optimizer_state_dict(model, optimizer)["state"]
    assert_same(found["weight"]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_hooks_and_schedulers():
    params = make_params("cpu")
    optimizer = offloaded(params)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["more"]))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    loss_of(params, 0).backward()
    optimizer.step()
    scheduler.step()
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert_same([p.detach() for p in params], before)  # lr is 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["step", "step", 1]


def test_groups_change(device):
    """A group that is added, a frozen parameter, and one that is moved to the CPU."""
    ours, theirs = make_params(device), make_params("cpu")
    optimizer, plain = offloaded(ours), FusedAdam(groups_of(theirs), lr=0.05)
    train(ours, theirs, optimizer, plain)
    for params, own in ((ours, optimizer), (theirs, plain)):
        params.append(torch.nn.Parameter(torch.ones(5000, dtype=BF16, device=params[0].device)))
        own.add_param_group({"params": params[-1:], "lr": 0.1})
    train(ours, theirs, optimizer, plain)
    ours[0].requires_grad_(False)
    assert_same(optimizer.state_dict(), plain.state_dict())
    ours[0].requires_grad_(True)
    train(ours, theirs, optimizer, plain)
    with pytest.raises(ValueError, match="lr must be >= 0"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))], "lr": -1.0})
    if device.type != "cpu":
        ours[0].data = ours[0].data.cpu()
    train(ours, theirs, optimizer, plain)


def test_nothing_is_left_behind():
    params = make_params("cpu")
    optimizer = offloaded(params, offload_gradients=True)
    for step in range(3):
        loss_of(params, step).backward()
        optimizer.step()
    gc.collect()
    count = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    for step in range(20):
        loss_of(params, step).backward()
        optimizer.step()
    gc.collect()
    # Fewer, where another test's are collected at last.
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= count
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    loss_of(params, 0).backward()
    assert all(p.grad is not None for p in params)


def test_threads(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert threads.share_of_cores() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert threads.share_of_cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "50")
    assert threads.share_of_cores() == 1
    params, before = make_params("cpu"), torch.get_num_threads()
    optimizer, seen = offloaded(params, cpu_threads=before + 1), []
    optimizer.host_optimizer.register_step_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    loss_of(params, 0).backward()
    optimizer.step()
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_grad_scaler(is_scaled):
    """The scaler unscales what is on the device; an infinite gradient skips the step."""
    ours, theirs = make_params("cpu", torch.float32), make_params("cpu", torch.float32)
    optimizer, plain = offloaded(ours), FusedAdam(groups_of(theirs), lr=0.05)
    for params, own in ((ours, optimizer), (theirs, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=is_scaled)
        for step in range(3):
            scaler.scale(loss_of(params, step)).backward()
            if is_scaled and step == 1:
                params[0].grad[0] = torch.inf
            scaler.step(own)
            scaler.update()
            own.zero_grad()
    assert_same(ours, theirs)
    assert optimizer.param_groups[0]["step"] == 3 - is_scaled


def test_a_scaler_cannot_unscale_what_was_taken():
    params = make_params("cpu", torch.float32)
    optimizer = offloaded(params, offload_gradients=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(params, 0)).backward()
    with pytest.raises(RuntimeError, match="offload_gradients=True takes"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optimizer_class": torch.optim.AdamW}, TypeError, "optimizer_class must be .* got AdamW"),
        ({"optimizer_class": FusedMixedPrecisionLamb}, TypeError, "optimizer_class must be"),
        ({"capturable": True}, ValueError, "capturable must be False"),
        ({"cpu_threads": 0}, ValueError, "cpu_threads must be >= 1 or None, got 0"),
        ({"no_such": 1}, TypeError, "no_such"),
        ({"lr": -1.0}, ValueError, "lr must be >= 0"),
    ],
    ids=str,
)
def test_refused(options, error, words):
    with pytest.raises(error, match=words):
        CPUOffload(make_params("cpu"), **options)


def test_other_devices_are_refused():
    with pytest.raises(TypeError, match="params has a tensor on meta; expected"):
        CPUOffload([torch.nn.Parameter(torch.ones(5000, device="meta"))])


def test_a_model_is_no_list_of_parameters():
    with pytest.raises(TypeError, match="params is a Linear; pass its parameters"):
        CPUOffload(torch.nn.Linear(3, 3), FusedAdam)


def test_copies_are_refused():
    optimizer = offloaded(make_params("cpu"))
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(optimizer)


def test_cpu_parameters_are_stepped_where_they_are():
    params = make_params("cpu")
    optimizer = CPUOffload(params, FusedAdam)
    assert optimizer.host_copy(params[0]) is params[0]
    theirs = make_params("cpu")
    plain = FusedAdam(theirs)
    train(params, theirs, optimizer, plain)
