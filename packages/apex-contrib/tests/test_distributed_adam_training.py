"""DistributedFusedAdam in training: parameters of every kind, accumulation, scalers, drivers."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex.contrib.optimizers.distributed_fused_adam import (
    DistributedFusedAdam,
    _coalescing_manager,
    _disable_pre_forward_hook,
    _multi_tensor_copy,
)

SMALL = {"lr": 1e-2, "weight_decay": 0.1, "bucket_cap_mb": 0.0005}


class Odd(nn.Module):
    """Parameters that are unused, used by some ranks only, shared, frozen, or without elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv2d(6, 4, 3).to(memory_format=torch.channels_last)
        self.large = nn.Linear(6, 150)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused, self.empty = nn.Linear(3, 3), nn.Parameter(torch.zeros(0, 5))

    def forward(self, x, deep):
        x = self.tied(self.frozen(self.first(x)).relu())
        if deep:
            x = self.extra(x)
        image = x[:, :, None, None].expand(-1, -1, 3, 3)
        return self.large(x).square().mean() + self.conv(image).square().mean() + self.empty.sum()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def check_odd(rank, world, options):
    model, one = Odd(), Odd()
    frozen = [p.detach().clone() for p in model.frozen.parameters()]
    optimizer = DistributedFusedAdam(model.parameters(), **SMALL, **options)
    reference = torch.optim.AdamW(trainable(one), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        torch.manual_seed(step)
        xs = torch.randn(world, 5, 6)
        for _ in range(2):  # two passes without no_sync
            model(xs[rank], deep=(rank + step) % 2 == 0).backward()
        sum(one(xs[r], (r + step) % 2 == 0) * 2 / world for r in range(world)).backward()
        for p in trainable(one):  # where nobody has a gradient, it is zero
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
            assert p.stride() == q.stride()
    for p, before in zip(model.frozen.parameters(), frozen, strict=True):
        assert torch.equal(p, before)
    assert len(optimizer.state["buckets"]) > 4
    assert max(len(optimizer.state[p]["fragments"]) for p in trainable(model)) > 2


ODD = [{}, {"overlap_grad_sync": False}, {"contiguous_grad_buffer": True}, {"store_params": False}]


@pytest.mark.parametrize("options", ODD, ids=str)
def test_parameters_of_every_kind(two_ranks, options):
    two_ranks(check_odd, options=options)


def test_parameters_over_several_shards(four_ranks):
    four_ranks(check_odd, options={})


def check_unfreezing(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = DistributedFusedAdam(model[1].parameters(), **SMALL)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.ones(2, 4)
    model[1].weight.requires_grad_(False)
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
            pairs = zip(model[0].parameters(), before[:2], strict=True)
            assert all(torch.equal(p, q) for p, q in pairs)
        if step == 2:
            model[1].weight.requires_grad_(True)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert moved == [step > 0, step > 0, step > 1, True], (step, moved)
    every = [torch.empty(20) for _ in range(world)]
    dist.all_gather(every, torch.cat([p.detach().flatten() for p in model[0].parameters()]))
    assert all(torch.equal(every[0], other) for other in every)


def test_unfreezing_and_new_groups(two_ranks):
    two_ranks(check_unfreezing)


def check_compiled(rank, world):
    """Compilers call a step instead of tracing it, wherever they meet it."""
    torch.manual_seed(0)
    models = [nn.Linear(5, 3) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    eager, compiled = (DistributedFusedAdam(m.parameters(), **SMALL) for m in models)
    steps = eager.step, torch.compile(lambda: compiled.step(), backend="eager")
    for model, step in zip(models, steps, strict=True):
        for _ in range(3):
            model(torch.ones(2, 5)).square().sum().backward()
            step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_steps_within_compiled_code(two_ranks):
    two_ranks(check_compiled)


def check_accumulation(rank, world, greedy, options):
    """Micro-batches under no_sync are one big batch."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    big, small = (DistributedFusedAdam(m.parameters(), **SMALL, **options) for m in models)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        parts = torch.randn(3, 4, 5).double()
        models[0](parts.flatten(0, 1)).square().sum().backward()
        with small.no_sync(greedy_grad_copy=greedy):
            for part in parts[:2]:
                models[1](part).square().sum().backward()
        models[1](parts[2]).square().sum().backward()
        assert abs(big.grad_norm() / small.grad_norm() - 1) < 1e-5
        for optimizer in (big, small):
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", ODD[:3], ids=str)
@pytest.mark.parametrize("greedy", [False, True], ids=["plain", "greedy"])
def test_no_sync(two_ranks, greedy, options):
    two_ranks(check_accumulation, greedy=greedy, options=options)


def check_experts(rank, world, greedy):
    """What one rank alone has from a pass under no_sync leaves with the next reduction."""
    params = [nn.Parameter(torch.ones(40)) for _ in range(2)]
    copies = [param.detach().clone() for param in params]
    optimizer = DistributedFusedAdam(params, **SMALL)
    plain = torch.optim.AdamW(copies, lr=SMALL["lr"], weight_decay=SMALL["weight_decay"])
    for _ in range(3):
        with optimizer.no_sync(greedy_grad_copy=greedy):
            (3 * params[rank]).sum().backward()
        (2 * params[1]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        copies[0].grad, copies[1].grad = torch.full((40,), 1.5), torch.full((40,), 3.5)
        plain.step()
        torch.testing.assert_close([p.detach() for p in params], copies)


@pytest.mark.parametrize("greedy", [False, True], ids=["plain", "greedy"])
def test_no_sync_with_parameters_of_one_rank(two_ranks, greedy):
    two_ranks(check_experts, greedy=greedy)


def check_norms(rank, world):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n)) for n in (300, 7)]
    optimizer = DistributedFusedAdam(params, **SMALL)
    grads = [[torch.randn(p.shape) for p in params] for _ in range(world)]
    for param, grad in zip(params, grads[rank], strict=True):
        param.grad = grad.clone()
    mean = [sum(parts) / world for parts in zip(*grads, strict=True)]
    whole = torch.cat(mean).double().norm()
    assert abs(optimizer.grad_norm() / whole - 1) < 1e-6
    assert all(param.grad is None for param in params)
    assert abs(optimizer.grad_norm([params[1]]) / mean[1].double().norm() - 1) < 1e-6
    assert abs(optimizer.grad_norm() / whole - 1) < 1e-6  # the cache is of all parameters
    found = optimizer.unscale_grads(0.5)
    assert [flag.item() for flag in found.values()] == [0.0]
    assert abs(optimizer.clip_grad_norm(1.0) / (whole / 2) - 1) < 1e-6
    assert abs(optimizer.grad_norm() - 1) < 1e-5
    before = [p.detach().clone() for p in params]
    optimizer.step()
    scaled = [g / whole.float() for g in mean]
    reference = torch.optim.AdamW([nn.Parameter(p) for p in before], lr=1e-2, weight_decay=0.1)
    copies = reference.param_groups[0]["params"]
    for copy, grad in zip(copies, scaled, strict=True):
        copy.grad = grad
    reference.step()
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="norm_type must be 2"):
        optimizer.grad_norm(norm_type=1)
    with pytest.raises(ValueError, match="max_norm must be > 0"):
        optimizer.clip_grad_norm(0)
    with pytest.raises(RuntimeError, match="not this optimizer's"):
        optimizer.grad_norm([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="either inv_scale or grad_scaler"):
        optimizer.unscale_grads()


def test_norms_and_scales(two_ranks):
    two_ranks(check_norms)


def check_scaler(rank, world, options):
    """An inf on one rank: nobody steps, and the scale goes down everywhere."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(200))
    optimizer = DistributedFusedAdam([param], **options, **SMALL)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    warnings.simplefilter("ignore", FutureWarning)  # torch will give step() no scaler one day
    history = []
    for step in range(4):
        optimizer.zero_grad()
        before, state = param.detach().clone(), optimizer.state_dict()
        factor = float("inf") if step == 1 and rank == 1 else 1.0
        scaler.scale((param * factor).sum()).backward()
        if step == 3:
            optimizer.unscale_grads(grad_scaler=scaler)
            with pytest.raises(RuntimeError, match="unscaled these gradients already"):
                optimizer.unscale_grads(grad_scaler=scaler)
            assert abs(optimizer.clip_grad_norm(1.0) - 200**0.5) < 1e-4
        scaler.step(optimizer)
        scaler.update()
        after = optimizer.state_dict()
        if step == 1:
            assert torch.equal(param, before)
            for key, value in state["state"].get(0, {}).items():
                assert torch.equal(value, after["state"][0][key])
        history.append((after["state"]["step"], scaler.get_scale(), not torch.equal(param, before)))
    assert history == [(1, 8.0, True), (1, 4.0, False), (2, 4.0, True), (3, 4.0, True)]


CAPTURABLE = [
    {"capturable": True},
    {"capturable": True, "store_params": False},
    {"capturable": True, "contiguous_param_buffer": True, "store_params": False},
    {"capturable": True, "param_sync_dtype": torch.int32},
]


@pytest.mark.parametrize("options", [{}, *CAPTURABLE], ids=str)
def test_inf_on_one_rank_skips_on_all(two_ranks, options):
    two_ranks(check_scaler, options=options)


def check_misused_scaler(rank, world):
    param = nn.Parameter(torch.ones(3))
    optimizer, scaler = DistributedFusedAdam([param]), torch.amp.GradScaler("cpu")
    warnings.simplefilter("ignore", FutureWarning)
    with pytest.raises(RuntimeError, match="has no scale"):
        optimizer.unscale_grads(grad_scaler=scaler)
    scaler.scale(param.sum()).backward()
    optimizer.grad_sync()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"Call optimizer\.unscale_grads"):
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones(3))


def check_disabled_scaler(rank, world):
    """As in scripts with GradScaler(enabled=use_amp): nothing is scaled, and the step is taken."""
    param = nn.Parameter(torch.ones(3))
    optimizer = DistributedFusedAdam([param], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(param.sum()).backward()
    found = optimizer.unscale_grads(grad_scaler=scaler)
    assert [flag.item() for flag in found.values()] == [0.0]
    assert abs(optimizer.clip_grad_norm(1.0) - 3**0.5) < 1e-6
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.5))


def test_disabled_scaler(two_ranks):
    two_ranks(check_disabled_scaler)


def test_misused_scaler(two_ranks):
    two_ranks(check_misused_scaler)


def check_drivers(rank, world):
    """A closure, reentrant checkpoints, views of buffers, buckets of a call's parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    layers = list(model)
    optimizer = DistributedFusedAdam(model.parameters(), contiguous_grad_buffer=True, **SMALL)
    optimizer.zero_grad()
    view = optimizer.grad_buffer_view(layers[0].weight)
    assert layers[0].weight.grad.data_ptr() == view.data_ptr()
    assert view.shape == (8, 8)
    plain = DistributedFusedAdam(nn.Linear(2, 2).parameters())
    with pytest.raises(RuntimeError, match="contiguous_grad_buffer is False"):
        plain.grad_buffer_view(plain.parameter(0, 0))

    def closure():
        x = torch.full((3, 8), rank + 1.0, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        loss = x.square().mean()
        loss.backward()
        return loss

    first = closure().item()
    optimizer.zero_grad()
    losses = [optimizer.step(closure).item()]
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(optimizer.step(closure).item())
    assert losses[0] == first
    assert losses[-1] < losses[0]


def test_closures_and_reentrant_checkpoints(two_ranks):
    two_ranks(check_drivers)


def check_buckets(rank, world):
    params = [nn.Parameter(torch.ones(n)) for n in (40, 100, 100, 40)]  # two buckets for 100 + 100
    optimizer = DistributedFusedAdam(params, bucket_cap_mb=0.0005)
    optimizer.init_params(params[0])
    optimizer.init_params_bucket(params[1:3])
    optimizer.init_params(params[3:], param_sync_dtype=torch.bfloat16)
    ids = [{f.bucket_id for f in optimizer.state[p]["fragments"]} for p in params]
    assert ids[1] == ids[2]
    assert ids[0].isdisjoint(ids[1])
    assert ids[3].isdisjoint(ids[0] | ids[1])
    fresh = DistributedFusedAdam([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="dtype must be"):
        fresh.init_params(dtype=torch.float16)
    fragment = optimizer.state[params[1]]["fragments"][0]
    assert optimizer.parameter(fragment) is params[1]
    assert optimizer.parameter(0, 2) is params[2]
    with pytest.raises(TypeError, match="expected a fragment"):
        optimizer.parameter("a")
    for _ in range(2):
        sum((p * p).sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = params[0].detach()
    for param in params[1:3]:
        assert torch.equal(param, expected[:1].expand(100))
    assert torch.equal(params[3], params[0].bfloat16().float())
    assert "bucket_cap_mb=0.0005" in repr(optimizer)


def test_buckets_of_chosen_parameters(two_ranks):
    two_ranks(check_buckets)


class LikeNeMo(DistributedFusedAdam):
    """Overrides and reads what NeMo's subclass does."""

    def __init__(self, *args, **kwargs):
        self.seen = set()
        super().__init__(*args, **kwargs)

    def _broadcast_params(self):
        self.seen.add("_broadcast_params")

    def _make_post_backward_hook(self, param, param_group_id, param_id):
        def hook(*unused):
            with self._lock:
                need_to_initialize = "fragments" not in self.state[param]
                if need_to_initialize:
                    self._init_param_state(param, param_group_id, param_id)
                if self.greedy_grad_copy:
                    self._grad_copy(param)
                    if self.overlap_grad_sync:
                        self._try_start_bucket_grad_sync(
                            params=[param], ignore_last_bucket=need_to_initialize
                        )

        return hook

    def init_params(self, params=None, param_sync_dtype=None, **kwargs):
        self.seen.add("init_params")
        super().init_params(params=params, param_sync_dtype=param_sync_dtype, **kwargs)

    def _init_param_state(self, param, param_group_id, param_id, param_sync_dtype=None, **kwargs):
        self.seen.add("_init_param_state")
        super()._init_param_state(
            param, param_group_id, param_id, param_sync_dtype=param_sync_dtype, **kwargs
        )

    def grad_norm(self, parameters=None, norm_type=2.0, force=False):
        if force or self._grad_norm is None:
            self.grad_sync()
            square = self._local_grad_norm(parameters=parameters, norm_type=norm_type)
            if self.redundant_size > 1:
                square /= self.redundant_size
            dist.all_reduce(square)
            self._grad_norm = square.sqrt()
        return super().grad_norm()

    @torch.no_grad()
    def _param_copy_fragments(self, fragments):
        self.seen.add("_param_copy_fragments")
        sources, targets = [], []
        for fragment in fragments:
            begin, end = fragment.param_range
            if end <= begin or fragment.bucket_id not in self._params_buckets:
                continue
            bucket = self._params_buckets[fragment.bucket_id]
            sources.append(bucket.params_bucket[slice(*fragment.bucket_range)])
            targets.append(self.parameter(fragment).detach().view(-1)[begin:end])
        _multi_tensor_copy(sources, targets, dummy_overflow_buf=self._dummy_overflow_buf)

    def _check_params_shard_dtypes(self, params_buckets):
        self.seen.add("_check_params_shard_dtypes")
        super()._check_params_shard_dtypes(params_buckets)

    def zero_grad(self, *args, **kwargs):
        super().zero_grad(*args, **kwargs)
        for param in self.parameters():
            with _disable_pre_forward_hook(param):
                param.main_grad = None


def check_nemo(rank, world):
    both = []
    for kind in (DistributedFusedAdam, LikeNeMo):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
        optimizer = kind(model.parameters(), **SMALL)
        for step in range(3):
            torch.manual_seed(step * world + rank)
            model(torch.randn(4, 9)).square().sum().backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        both.append(list(model.parameters()))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    expected = {"_broadcast_params", "_init_param_state", "_param_copy_fragments"}
    assert optimizer.seen >= {*expected, "_check_params_shard_dtypes"}
    assert optimizer._param_buffers == {}
    with _coalescing_manager(device="cpu", async_ops=True) as manager:
        tensors = [torch.ones(2), torch.ones(3)]
        for tensor in tensors:
            manager.append(dist.all_reduce(tensor, async_op=True))
    manager.wait()
    assert all((tensor == world).all() for tensor in tensors)


def test_a_subclass_like_nemos(two_ranks):
    two_ranks(check_nemo)
