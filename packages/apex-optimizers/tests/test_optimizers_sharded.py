"""FSDP2's sharded parameters on gloo processes, against one process with whole parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

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

FP8 = torch.float8_e4m3fn
OPTIMIZERS = (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
CASES = {
    "adam": (FusedAdam, {"weight_decay": 0.1}),
    "adam_l2": (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}),
    "adam_masters": (FusedAdam, {"master_weights": True}),
    "adam_amsgrad": (FusedAdam, {"weight_decay": 0.1, "amsgrad": True, "betas": (0.9, 0.5)}),
    "adam_half_masters": (
        FusedAdam,
        {"master_weights": True, "master_weight_dtype": torch.float16},
    ),
    "adam_bf16": (FusedAdam, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}),
    "lamb": (FusedLAMB, {"weight_decay": 0.1}),
    "lamb_l2": (FusedLAMB, {"weight_decay": 0.1, "adam_w_mode": False, "max_grad_norm": 0.0}),
    "lamb_mixed": (FusedMixedPrecisionLamb, {"reduced_precision_dtype": torch.bfloat16}),
    "lars": (FusedLARS, {"momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.1}),
    "novograd": (FusedNovoGrad, {"weight_decay": 0.1}),
    "novograd_max": (FusedNovoGrad, {"norm_type": 0}),
    "adagrad": (FusedAdagrad, {"weight_decay": 0.1}),
    "sgd": (FusedSGD, {"momentum": 0.9, "weight_decay": 0.1}),
}


def make_model(dtype, rows=(7, 1)):
    torch.manual_seed(0)
    # 7 rows: shards of different sizes; 1 row: a shard without elements.
    layers = [torch.nn.Linear(5, rows[0]), torch.nn.Linear(*rows)]
    return torch.nn.Sequential(*layers).to(dtype)


def set_grads(whole, sharded, step):
    """The same gradients for both, in the placement of each."""
    generator = torch.Generator().manual_seed(step)
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        wide = torch.complex64 if p.is_complex() else torch.float32
        p.grad = torch.randn(p.shape, generator=generator, dtype=wide).to(p.dtype)
        q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements)


def assert_same(whole, sharded, rtol=0.0):
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert isinstance(q, DTensor)
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=rtol, atol=rtol / 10)


def check_steps(rank, world_size, case, dtype):
    cls, options = CASES[case]
    mesh = init_device_mesh("cpu", (world_size,))
    whole, sharded = make_model(dtype), make_model(dtype)
    fully_shard(sharded, mesh=mesh)
    optimizers = [cls(m.parameters(), lr=0.1, **options) for m in (whole, sharded)]
    for step in range(3):
        set_grads(whole, sharded, step)
        for optimizer in optimizers:
            optimizer.step()
    # Norms are rounded once more per shard; elements alone are the same bits.
    unit = torch.finfo(dtype).eps
    rtol = 0.0 if cls in (FusedAdagrad, FusedAdam, FusedSGD) else 8 * unit
    assert_same(whole, sharded, rtol)
    for entry in optimizers[1].state_dict()["state"].values():
        moments = [v for k, v in entry.items() if k != "step"]
        assert all(isinstance(v, DTensor) for v in moments)

    # A checkpoint of whole tensors, loaded into fresh shards, continues.
    options_full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(sharded, optimizers[1], options=options_full)
    resumed = cls(sharded.parameters(), lr=0.1, **options)
    resumed.zero_grad(set_to_none=True)  # torch makes states by a step without gradients
    load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(sharded, resumed, copy.deepcopy(saved), options=load)
    set_grads(whole, sharded, 3)
    optimizers[0].step()
    resumed.step()
    assert_same(whole, sharded, rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_shards_are_updated_as_the_whole_is(two_ranks, case, dtype):
    two_ranks(check_steps, case=case, dtype=dtype)


@pytest.mark.parametrize("case", ["adam", "adam_amsgrad", "lamb", "novograd_max", "sgd"])
def test_complex_shards_are_updated_as_the_whole_is(two_ranks, case):
    two_ranks(check_steps, case=case, dtype=torch.complex64)


def check_mesh_of_two_dimensions(rank, world_size, case):
    """FSDP2 over tensor parallelism, whose first placement is none of the usual classes."""
    cls, options = CASES[case]
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data", "tensor"))
    # Tensor parallelism needs shards of one size.
    whole, sharded = make_model(torch.float32, (8, 4)), make_model(torch.float32, (8, 4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(sharded, mesh["tensor"], plan)
    fully_shard(sharded, mesh=mesh["data"])
    optimizers = [cls(m.parameters(), lr=0.1, **options) for m in (whole, sharded)]
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for model, optimizer in zip((whole, sharded), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert q.device_mesh.ndim == 2
        # Gradients themselves are added up in another order.
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case", ["adam", "lamb", "lamb_mixed", "lars", "novograd", "novograd_max", "sgd"]
)
def test_mesh_of_two_dimensions(four_ranks, case):
    four_ranks(check_mesh_of_two_dimensions, case=case)


def check_training(rank, world_size):
    """Forward, reduced gradients and steps of FSDP2 itself, with 8-bit moments."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole, sharded = make_model(torch.float32), make_model(torch.float32)
    fully_shard(sharded, mesh=mesh)
    options = {"lr": 0.01, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8}
    optimizers = [FusedAdam(m.parameters(), **options) for m in (whole, sharded)]
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(20):
        for model, optimizer in zip((whole, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    # Scales are per shard, so that the trajectories are close, not equal.
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p, rtol=0, atol=0.05)


def test_training_with_fsdp(two_ranks):
    two_ranks(check_training)


def check_offloaded_by_fsdp(rank, world_size, case):
    """Parameters that FSDP2 keeps on the CPU are stepped where they are."""
    cls, options = CASES[case]
    mesh = init_device_mesh("cpu", (world_size,))
    models = make_model(torch.bfloat16), make_model(torch.bfloat16)
    for model in models:
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    plain = cls(models[0].parameters(), lr=0.1, **options)
    offloaded = CPUOffload(models[1].parameters(), cls, lr=0.1, minimal_size=0, **options)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(3):
        for model, optimizer in zip(models, (plain, offloaded), strict=True):
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


@pytest.mark.parametrize("case", ["adam_masters", "lamb", "sgd"])
def test_offloaded_by_fsdp(two_ranks, case):
    two_ranks(check_offloaded_by_fsdp, case=case)


def check_grad_scaler(rank, world_size, cls, options):
    """An overflow in one shard skips the step everywhere; scaled gradients are unscaled."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole, sharded = make_model(torch.float32), make_model(torch.float32)
    fully_shard(sharded, mesh=mesh)
    optimizers = [cls(m.parameters(), lr=0.1, **options) for m in (whole, sharded)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.zeros(1))  # makes the scale, as a loss would
    for step in range(3):
        set_grads(whole, sharded, step)
        for param in sharded.parameters():
            param.grad = param.grad * scaler.get_scale()
        if step == 1 and rank == 0:
            next(sharded.parameters()).grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizers[1])
        scaler.update()
        if step != 1:
            optimizers[0].step()
        assert_same(whole, sharded, rtol=2e-6)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(
    ("cls", "options"),
    [(FusedAdam, {"capturable": True}), (FusedMixedPrecisionLamb, {}), (FusedAdam, {})],
    ids=["adam_capturable", "lamb_mixed", "adam"],
)
def test_grad_scaler_with_shards(two_ranks, cls, options):
    two_ranks(check_grad_scaler, cls=cls, options=options)


def check_refusals(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    for cls in OPTIMIZERS:
        optimizer = cls([param], lr=0.1)
        param.grad = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        with pytest.raises(RuntimeError, match="not sharded alike"):
            optimizer.step()
    assert torch.equal(param.full_tensor(), torch.ones(4))
    dist.barrier()


def test_gradients_placed_otherwise_are_refused(two_ranks):
    two_ranks(check_refusals)


def check_whole_states(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for name in ("adagrad", "adam", "lamb", "lars", "novograd", "sgd"):
        cls, options = CASES[name]
        whole = torch.nn.Parameter(torch.ones(4))
        whole.grad = torch.ones(4)
        optimizer = cls([whole], lr=0.5, **options)
        optimizer.step()
        param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        sharded = cls([param], lr=0.1, **options)
        with pytest.raises(ValueError, match="is a plain tensor, but its parameter is a DTensor"):
            sharded.load_state_dict(optimizer.state_dict())
        assert not sharded.state
        assert sharded.param_groups[0]["lr"] == 0.1


def test_whole_states_of_shards_are_refused(two_ranks):
    two_ranks(check_whole_states)
