"""DistributedFusedLAMB on real processes against LAMB in float64 on one."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from apex.contrib.optimizers.distributed_fused_lamb import (
    DistributedFusedLAMB,
    get_process_group_ranks,
)
from apex_testkit import assert_as_accurate_as
from apex_testkit.optimizers_lamb import lamb_reference

SHAPES = ((3, 5), (70,), (4, 3, 2, 2), (0,), (41, 257), ())
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-6}
STEPS = 3


def starts(dtype, world):
    """Parameters, and gradients by step and rank whose sums and averages are exact in 16 bits."""
    generator = torch.Generator().manual_seed(5)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]

    def grads():
        return [torch.randint(-8, 9, p.shape, generator=generator).to(dtype) / 8 for p in params]

    return params, [[grads() for _ in range(world)] for _ in range(STEPS)]


def average(own):
    """The averages over ranks of one step's gradients."""
    return [sum(grads) / len(grads) for grads in zip(*own, strict=True)]


def make_params(start, rank):
    """The parameters of a model; those of other ranks than 0 are wrong before the broadcast."""
    params = [torch.nn.Parameter(p.clone() + rank) for p in start]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    return params


def backward(params, grads, scale=1.0):
    """A backward pass whose gradients are these."""
    pairs = zip(params, grads, strict=True)
    sum((p.float() * (g.float() * scale)).sum() for p, g in pairs).backward()


def plain(start, all_grads, **options):
    averages = [average(own) for own in all_grads]
    return lamb_reference(start, *averages, **{**OPTIONS, "max_grad_norm": 0.0, **options})


def compare(params, start, all_grads, **options):
    wide = [p.float() for p in start], [[[g.float() for g in r] for r in own] for own in all_grads]
    actual = [p.detach().contiguous() for p in params]
    assert_as_accurate_as(lambda *args: plain(*args, **options), actual, *wide)


VARIANTS = {
    "plain": {},
    "full_ar": {"full_ar": True, "dwu_num_ar_pg": 2, "fused_norm": True, "max_grad_norm": 2.0},
    "fused": {"fuse_scale": True, "dwu_num_ag_pg": 2, "dwu_num_rs_pg": 2, "max_grad_norm": 1e6},
    "nodes": {"dwu_group_size": 2, "dwu_num_blocks": 3, "max_grad_norm": 2.0},
    "alone": {"dwu_group_size": 1, "dwu_num_chunks": 1, "use_nvlamb": True, "weight_decay": 0.0},
    "l2": {"adam_w_mode": False, "grad_averaging": False, "overlap_reductions": False},
    "views": {"set_param_views_to_flat_buffer": True, "bias_correction": False, "verbose": True},
}


def check_training(rank, world, variant, dtype):
    start, all_grads = starts(dtype, world)
    params = make_params(start, rank)
    options = {**OPTIONS, **VARIANTS[variant]}
    optimizer = DistributedFusedLAMB(params, **options)
    assert torch.equal(params[1], start[1])
    for own in all_grads:
        optimizer.zero_grad()
        backward(params, own[rank])
        optimizer.step()
    known = ("adam_w_mode", "grad_averaging", "bias_correction", "use_nvlamb", "max_grad_norm")
    given = {name: options[name] for name in (*known, "weight_decay") if name in options}
    compare(params, start, all_grads, **given)
    state = optimizer.state_dict()
    assert state["step"].item() == STEPS
    assert state["fp32_p"].dtype == torch.float32
    total = state["fp32_m"].numel() * optimizer._groups.shards
    assert total == optimizer._layout.total >= sum(p.numel() for p in params)
    assert optimizer.L2_grad_norm.item() == pytest.approx(
        torch.cat([g.flatten() for g in average(all_grads[-1])]).double().norm().item()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_of_four(variant, dtype, four_ranks):
    four_ranks(check_training, variant=variant, dtype=dtype)


@pytest.mark.parametrize("variant", ["full_ar", "nodes", "alone"])
def test_training_of_two(variant, two_ranks):
    two_ranks(check_training, variant=variant, dtype=torch.float16)


def check_protocol(rank, world):
    """What scripts for Apex call: stages, accumulation, a scaled loss, a learning rate tensor."""
    start, all_grads = starts(torch.float16, world)
    params = make_params(start, rank)
    optimizer = DistributedFusedLAMB(params, **{**OPTIONS, "lr": 7.0}, max_grad_norm=2.0)
    with torch.no_grad():
        params[0].add_(rank)  # stage 1 takes those of rank 0
    optimizer._lazy_init_stage1()
    lr = torch.zeros(1)
    optimizer._lr = lr
    for step, own in enumerate(all_grads):
        optimizer.zero_grad()
        optimizer.set_is_accumulation_step(True)
        optimizer.set_last_step(step == STEPS - 1)
        halves = [g / 2 for g in own[rank]]
        backward(params, halves, 64.0)
        assert optimizer._reductions.next_block == optimizer._layout.blocks - 1
        optimizer.set_is_accumulation_step(False)
        backward(params, halves, 64.0)
        assert optimizer._reductions.next_block == -1  # all blocks are under way already
        if step == 0:
            optimizer._lazy_init_stage2()
        optimizer.complete_reductions()
        optimizer.complete_reductions()
        lr.fill_(0.1)
        optimizer.set_global_scale(torch.tensor(64.0))
        assert optimizer.global_scale.item() == 64
        optimizer.step()
    compare(params, start, all_grads, max_grad_norm=2.0)
    backward(params, all_grads[0][rank])
    with pytest.raises(RuntimeError, match="arrived again after its reduction began"):
        backward(params, all_grads[0][rank])
    optimizer.zero_grad()
    assert optimizer._reductions.next_block == optimizer._layout.blocks - 1


def test_protocol(two_ranks):
    two_ranks(check_protocol)


def check_groups_and_order(rank, world):
    """Groups with numbers of their own, an order, a frozen and an unused parameter."""
    start, all_grads = starts(torch.float32, world)
    params = make_params(start, rank)
    params[1].requires_grad_(False)
    with torch.no_grad():
        params[1].copy_(start[1])
    own = [
        {"params": params[:2], "lr": torch.tensor(0.2)},
        {"params": params[2:5], "weight_decay": 0.0, "betas": (0.5, 0.9)},
        {"params": params[5:]},
    ]
    order = [params[i] for i in (4, 0, 5, 2, 3)]
    optimizer = DistributedFusedLAMB(own, param_order=order, **OPTIONS)
    optimizer._lr  # noqa: B018  (reading it changes nothing)
    for grads in all_grads:
        backward([p for p in params[:5] if p.requires_grad], [grads[rank][i] for i in (0, 2, 3, 4)])
        optimizer.step()
        optimizer.zero_grad()
    zero = [[[*r[:5], torch.zeros_like(r[5])] for r in grads] for grads in all_grads]
    assert torch.equal(params[1], start[1])

    def part(*indices):
        picked = [[[r[i] for i in indices] for r in grads] for grads in zero]
        return [params[i] for i in indices], [start[i] for i in indices], picked

    compare(*part(0), lr=0.2)
    compare(*part(2, 3, 4), weight_decay=0.0, betas=(0.5, 0.9))
    compare(*part(5))
    with pytest.raises(RuntimeError, match="laid out already"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def test_groups_and_order(two_ranks):
    two_ranks(check_groups_and_order)


def check_gathers(rank, world, e5m2, skips):
    start, all_grads = starts(torch.float16, world)
    params = make_params(start, rank)
    expected = make_params(start, 0)
    options = {"e5m2_allgather": e5m2, "skip_allgather": skips}
    optimizer = DistributedFusedLAMB(params, **OPTIONS, **options)
    exact = DistributedFusedLAMB(expected, **OPTIONS)
    for own in all_grads:
        before = params[4].detach().clone()
        for model, opt in ((params, optimizer), (expected, exact)):
            opt.zero_grad()
            backward(model, own[rank])
            opt.step()
        if skips:
            assert torch.equal(params[4], before)
            optimizer.gather_params()
    for param, want in zip(params, expected, strict=True):
        if e5m2:  # the upper bytes of the masters' float16 numbers
            want = (want.detach().view(torch.int16) & -256).view(torch.float16)
        assert torch.equal(param, want)
    ours, theirs = optimizer.state_dict(), exact.state_dict()
    assert skips or all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("e5m2", "skips"), [(True, False), (False, True)])
def test_gathers(e5m2, skips, two_ranks):
    two_ranks(check_gathers, e5m2=e5m2, skips=skips)


def check_own_clipping(rank, world, fuses):
    """Each rank clips its own gradient before the average."""
    start, all_grads = starts(torch.float32, world)
    params = make_params(start, rank)
    optimizer = DistributedFusedLAMB(
        params, **OPTIONS, max_grad_norm=2.0, clip_after_ar=False, fuse_scale=fuses
    )
    optimizer.set_global_scale(4.0)
    for own in all_grads:
        optimizer.zero_grad()
        backward(params, own[rank], 4.0)
        optimizer.step()
    norm = 4 * torch.cat([g.flatten() for g in all_grads[-1][rank]]).double().norm().item()
    assert optimizer.L2_grad_norm.item() == pytest.approx(norm)

    def clipped(start, all_grads):
        scaled = []
        for own in all_grads:
            norms = [torch.cat([g.flatten() for g in r]).square().sum().sqrt() for r in own]
            each = zip(own, norms, strict=True)
            scaled.append([[g * (2 / (n + 1e-6)).clamp(max=1) for g in r] for r, n in each])
        return plain(start, scaled)

    actual = [p.detach().contiguous() for p in params]
    assert_as_accurate_as(clipped, actual, start, all_grads)


@pytest.mark.parametrize("fuses", [False, True])
def test_own_clipping(fuses, two_ranks):
    two_ranks(check_own_clipping, fuses=fuses)


def check_overflow(rank, world, options):
    """An infinite gradient on one rank: nothing changes on any, and the scaler learns of it."""
    start, all_grads = starts(torch.float32, world)
    params = make_params(start, rank)
    optimizer = DistributedFusedLAMB(params, **OPTIONS, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    used = []
    for step, own in enumerate(all_grads):
        optimizer.zero_grad()
        grads = [g.clone() for g in own[rank]]
        if step == 1 and rank == world - 1:
            grads[1][3] = float("inf")
        before = [p.detach().clone() for p in params]
        state = optimizer.state_dict()
        backward(params, grads, scaler.scale(torch.ones(1)).item())
        with pytest.warns(FutureWarning, match="GradScaler is going to stop"):
            scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert all(map(torch.equal, before, params))
            after = optimizer.state_dict()
            assert all(torch.equal(after[name], state[name]) for name in state)
        else:
            used.append(own)
    assert scaler.get_scale() == 32
    known = {"max_grad_norm": options.get("max_grad_norm", 0.0)}
    compare(params, start, used, **known)
    optimizer.zero_grad()
    backward(params, all_grads[0][rank])
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_ was called"):
        optimizer.step(grad_scaler=scaler)
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "options",
    [{"max_grad_norm": 2.0}, {"clip_after_ar": False}, {"full_ar": True}],
    ids=["clip", "own", "full_ar"],
)
def test_overflow(options, two_ranks):
    two_ranks(check_overflow, options=options)


def check_discarded(rank, world):
    """Gradients that are given up, while one rank alone has started their reduction."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(300)) for _ in range(2)]
    optimizer = DistributedFusedLAMB(params, lr=0.1, dwu_num_blocks=1, dwu_num_ar_pg=1)
    used = params if rank == 0 else params[:1]
    for _ in range(3):
        sum(param.sum() for param in used).backward()
        optimizer.zero_grad()
    sum(param.sum() for param in used).backward()
    optimizer.complete_reductions()
    assert float(optimizer.L2_grad_norm) == pytest.approx((300 * (1 + 0.25)) ** 0.5)


def test_discarded_gradients(two_ranks):
    two_ranks(check_discarded)


def check_checkpoint(rank, world):
    start, all_grads = starts(torch.bfloat16, world)
    params = make_params(start, rank)
    optimizer = DistributedFusedLAMB(params, **OPTIONS)
    backward(params, all_grads[0][rank])
    optimizer.step()
    state = optimizer.state_dict()
    other = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = DistributedFusedLAMB(other, **OPTIONS)
    again.load_state_dict(state)
    again._lazy_init_stage1()  # keeps what was loaded
    for model, opt in ((params, optimizer), (other, again)):
        opt.zero_grad()
        backward(model, all_grads[1][rank])
        opt.step()
    assert all(map(torch.equal, params, other))
    expected = optimizer.state_dict()
    assert all(torch.equal(again.state_dict()[name], expected[name]) for name in expected)
    for spoiled in ({**state, "fp32_m": state["fp32_m"][1:]}, {"step": 1}):
        with pytest.raises(ValueError, match="must have"):
            again.load_state_dict(spoiled)
    assert all(torch.equal(again.state_dict()[name], expected[name]) for name in expected)
    assert optimizer.step(lambda: torch.is_grad_enabled()) is True


def test_checkpoint(two_ranks):
    two_ranks(check_checkpoint)


def check_bad_arguments(rank, world):
    params = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2).half())]
    for error, options, message in (
        (ValueError, {"lr": -1}, "lr must be"),
        (ValueError, {"eps": torch.tensor(-1.0)}, "eps must be"),
        (ValueError, {"betas": (1, 0.9)}, "betas must be"),
        (ValueError, {"dwu_num_blocks": 0}, "dwu_num_blocks must be an integer >= 1"),
        (ValueError, {"dwu_num_chunks": 1.5}, "dwu_num_chunks must be an integer >= 1, got 1.5"),
        (ValueError, {"dwu_group_size": world + 1}, "dwu_group_size must divide"),
        (ValueError, {"param_order": params[:1]}, "param_order must hold each of the 2"),
        (ValueError, {"set_param_views_to_flat_buffer": True}, "of one dtype"),
        (
            ValueError,
            {"set_param_views_to_flat_buffer": True, "e5m2_allgather": True},
            "own dtype in the buffer",
        ),
    ):
        with pytest.raises(error, match=message):
            DistributedFusedLAMB(params, **options)
    with pytest.raises(TypeError, match="must be dense and float32"):
        DistributedFusedLAMB([torch.nn.Parameter(torch.zeros(3).double())])
    own = [torch.nn.Parameter(torch.zeros(3 + rank))]
    with pytest.raises(RuntimeError, match="some ranks differ from those of others"):
        DistributedFusedLAMB(own)
    assert get_process_group_ranks(None) == list(range(world))
    group = dist.new_group([1])
    assert rank == 0 or get_process_group_ranks(group) == [1]
    optimizer = DistributedFusedLAMB(params, overlap_reductions=False)  # mixed: in float32
    params[0].grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="a gradient is sparse"):
        optimizer.step()


def test_bad_arguments(two_ranks):
    two_ranks(check_bad_arguments)


def check_dead_rank(rank, world):
    start, all_grads = starts(torch.float32, world)
    params = make_params(start, rank)
    optimizer = DistributedFusedLAMB(params, **OPTIONS)
    backward(params, all_grads[0][rank])
    optimizer.step()
    if rank == 1:
        os._exit(7)
    begin = time.monotonic()

    def go_on():
        for _ in range(3):
            optimizer.zero_grad()
            backward(params, all_grads[1][rank])
            optimizer.step()

    with pytest.raises(RuntimeError):  # gloo's, of a closed connection
        go_on()
    assert time.monotonic() - begin < 30


def test_a_dead_rank_is_an_error(doomed_ranks):
    doomed_ranks(check_dead_rank, expect_death={1})


def test_without_process_group():
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        DistributedFusedLAMB([torch.nn.Parameter(torch.zeros(3))])


def test_counter():
    counter = DistributedFusedLAMB.AtomicCounter()
    assert (counter.add(2), counter.add(3), counter.value) == (2, 5, 5)
