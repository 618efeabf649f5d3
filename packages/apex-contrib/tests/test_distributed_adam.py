"""DistributedFusedAdam on real processes: its steps are those of one process, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.contrib.optimizers.distributed_adam import distributed_adam_step
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex_testkit import assert_as_accurate_as

SHAPES = [(7, 3), (5,), (40, 9), (1,), (), (0, 4), (2, 3, 4, 5)]
TINY = {"bucket_cap_mb": 0}
HYPER = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


class Model(nn.Module):
    """Each parameter in a submodule of its own, as forward hooks expect."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Module() for _ in SHAPES)
        for part, shape in zip(self.parts, SHAPES, strict=True):
            value = torch.randn(shape).to(dtype)
            if len(shape) == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            part.weight = nn.Parameter(value)
            part.forward = lambda x, part=part: (part.weight * x).sum()

    def forward(self, xs, order=1):
        """Gradients arrive in the order of the parts, or with -1 in the other."""
        pairs = list(zip(self.parts, xs, strict=True))
        return sum(part(x) for part, x in pairs[::order])


def gradients(dtype, step, rank):
    """Small integers: every dtype and order adds them up without rounding."""
    torch.manual_seed(1000 * step + rank)
    return [torch.randint(-4, 5, shape).to(dtype) for shape in SHAPES]


class OneProcess:
    """The same steps of whole parameters by the operator alone."""

    def __init__(self, params, dtype, keeps_params, adam_w):
        self.params = [param.detach().clone() for param in params]
        self.masters = [p.to(dtype) if keeps_params else p for p in self.params]
        self.moments = [[torch.zeros_like(p, dtype=dtype) for p in self.params] for _ in "mv"]
        self.adam_w = adam_w

    def step(self, grads, count):
        distributed_adam_step(
            self.masters, grads, *self.moments, [], [], None, None, None, None, None, None,
            HYPER["lr"], *HYPER["betas"], HYPER["eps"], HYPER["weight_decay"], count, True,
            self.adam_w,
        )  # fmt: skip
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)


def sub_group(world, size):
    """A group of the first ranks; the others get groups of their own."""
    groups = [dist.new_group(range(size)), *(dist.new_group([r]) for r in range(size, world))]
    return groups[max(0, dist.get_rank() - size + 1)]


def check_steps(rank, world, size, dtype, all_options):
    group = sub_group(world, size)
    inside = range(size) if rank < size else [rank]
    for options in all_options:
        model = Model(dtype)
        params = list(model.parameters())
        overlap = options.get("overlap_param_sync")
        optimizer = DistributedFusedAdam(
            params, average_grad_sync=False, process_group=group, **HYPER, **options,
            module=model if overlap else None,
        )  # fmt: skip
        state, adam_w = options.get("dtype", FLOAT32), options.get("adam_w_mode", True)
        one = OneProcess(params, state, options.get("store_params", True), adam_w)
        for step in range(1, 4):
            optimizer.zero_grad()
            model(gradients(dtype, step, rank), order=(-1) ** step).backward()
            optimizer.step()
            every = [gradients(FLOAT32, step, r) for r in inside]
            total = [sum(parts) for parts in zip(*every, strict=True)]
            layout = zip(total, one.params, strict=True)
            one.step([torch.empty_like(p, dtype=FLOAT32).copy_(g) for g, p in layout], step)
            optimizer.param_sync()
            for i, (param, expected) in enumerate(zip(params, one.params, strict=True)):
                assert torch.equal(param, expected), f"{options}, step {step}, parameter {i}"
                assert param.stride() == expected.stride()


CAPS = [{"bucket_cap_mb": cap} for cap in (0, 0.001, 0.004, 100.0)]
OPTIONS = [
    {},
    {"adam_w_mode": False},
    {"overlap_grad_sync": False},
    {"contiguous_grad_buffer": True},
    {"contiguous_grad_buffer": True, "overlap_grad_sync": False, "pipeline_size": 1},
    {"store_params": False},
    {"overlap_param_sync": True},
]
FOR_FLOAT32 = [
    *({**cap, **options} for cap, options in zip(CAPS * 2, OPTIONS, strict=False)),
    *({**cap, **options} for cap, options in zip(CAPS[1:], OPTIONS, strict=False)),
    {"contiguous_param_buffer": True, "bucket_cap_mb": 0.001},
    {"contiguous_param_buffer": True, "store_params": False, "contiguous_grad_buffer": True},
    {"grad_sync_dtype": BFLOAT16, "bucket_cap_mb": 0.001},
]
FOR_BFLOAT16 = [
    *({**cap, "param_sync_dtype": BFLOAT16} for cap in CAPS),
    {"grad_sync_dtype": BFLOAT16, "bucket_cap_mb": 0.001},
    {"dtype": BFLOAT16, "bucket_cap_mb": 0.001},
    {"dtype": BFLOAT16, "store_params": False},
    {"param_sync_dtype": BFLOAT16, "contiguous_param_buffer": True, "overlap_param_sync": True},
]


def test_one_rank_and_two(two_ranks):
    two_ranks(check_steps, size=1, dtype=FLOAT32, all_options=FOR_FLOAT32[1::3])
    two_ranks(check_steps, size=2, dtype=FLOAT32, all_options=FOR_FLOAT32)


def test_three_ranks_and_four(four_ranks):
    four_ranks(check_steps, size=3, dtype=FLOAT32, all_options=FOR_FLOAT32[::2])
    four_ranks(check_steps, size=4, dtype=FLOAT32, all_options=FOR_FLOAT32[1::2])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_16_bit_parameters(two_ranks, dtype):
    options = [{k: dtype if v == BFLOAT16 else v for k, v in o.items()} for o in FOR_BFLOAT16]
    two_ranks(check_steps, size=2, dtype=dtype, all_options=options)


def check_remainders(rank, world, size, count, steps, cap):
    """The float32 values behind bfloat16 parameters are those of whole masters."""
    torch.manual_seed(0)
    value, group = torch.randn(count).bfloat16(), sub_group(world, size)
    for adam_w in (True, False):
        both = []
        for options in (
            {"store_params": True, "param_sync_dtype": FLOAT32},
            {"store_params": False, "store_param_remainders": True, "param_sync_dtype": BFLOAT16},
        ):
            param = nn.Parameter(value.clone())
            optimizer = DistributedFusedAdam(
                [param],
                adam_w_mode=adam_w,
                process_group=group,
                bucket_cap_mb=cap,
                **HYPER,
                **options,
            )
            generator = torch.Generator().manual_seed(rank)
            for _ in range(steps):
                param.grad = torch.randn(count, generator=generator).bfloat16()
                optimizer.step()
                optimizer.zero_grad()
            both.append((param, optimizer.state_dict()["state"][0]))
        (_, whole), (param, split) = both
        for key in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(whole[key], split[key]), key
        rounded = whole["param"].bfloat16().float()
        ulp = rounded.abs() * 2.0**-8
        assert ((param.float() - whole["param"]).abs() <= ulp).all()


def test_remainders_are_whole_masters_after_100_steps(two_ranks):
    two_ranks(check_remainders, size=1, count=3000, steps=100, cap=1)
    two_ranks(check_remainders, size=2, count=3000, steps=100, cap=1)
    two_ranks(check_remainders, size=2, count=300, steps=50, cap=0)


def adam(p, *grads, adam_w=True):
    """The float64 oracle."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    beta1, beta2 = HYPER["betas"]
    for t, g in enumerate(grads, start=1):
        g = g if adam_w else g + HYPER["weight_decay"] * p
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + HYPER["eps"])
        p = p - HYPER["lr"] * (update + (HYPER["weight_decay"] * p if adam_w else 0))
    return p


def check_accuracy(rank, world, options):
    torch.manual_seed(0)
    value = torch.randn(700)
    grads = [[torch.randn(700) for _ in range(4)] for _ in range(world)]
    param = nn.Parameter(value.clone())
    optimizer = DistributedFusedAdam([param], bucket_cap_mb=0, **HYPER, **options)
    for grad in grads[rank]:
        (param * grad).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = [sum(parts) / world for parts in zip(*grads, strict=True)]
    adam_w = options.get("adam_w_mode", True)
    assert_as_accurate_as(lambda p, *g: adam(p, *g, adam_w=adam_w), param.detach(), value, *mean)


@pytest.mark.parametrize("options", [{}, {"adam_w_mode": False}], ids=str)
def test_accuracy(two_ranks, options):
    two_ranks(check_accuracy, options=options)


def check_scaled(rank, world, dtype, sync):
    """Second moments of 1e-12 are below float16's range without a scale."""
    torch.manual_seed(0)
    values = [torch.randn(n) for n in (300, 5)]
    params = [nn.Parameter(v.to(dtype)) for v in values]
    optimizer = DistributedFusedAdam(
        params, dtype=dtype, param_sync_dtype=sync, with_scaled_states=True, **HYPER, **TINY
    )
    masters = [p.detach().double() for p in params]
    grads = [[torch.randn(300), torch.randn(5) * 2.0**-20] for _ in range(4)]
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    scales = optimizer._state_scales
    assert all(set(entry) == {"param", "exp_avg", "exp_avg_sq"} for entry in scales.values())
    for i, (param, master) in enumerate(zip(params, masters, strict=True)):
        expected = adam(master, *(step[i].to(dtype).double() for step in grads))
        # Parameters, and moments of which steps are made, are rounded to 16 bits in each step.
        bound = 4 * torch.finfo(dtype).eps * (1 + expected.abs())
        assert ((param.double() - expected).abs() <= bound).all(), i


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_scaled_states(two_ranks, dtype):
    two_ranks(check_scaled, dtype=dtype, sync=dtype)


def check_bytes(rank, world):
    """Of an integer dtype, the leading bytes of parameters are sent: float16's are e5m2."""
    torch.manual_seed(0)
    for dtype, sync in ((FLOAT16, torch.uint8), (FLOAT32, torch.int16), (BFLOAT16, torch.uint8)):
        param = nn.Parameter(torch.randn(300).to(dtype))
        optimizer = DistributedFusedAdam([param], param_sync_dtype=sync, bucket_cap_mb=0, **HYPER)
        param.grad = torch.randn(300).to(dtype)
        optimizer.step()
        master = optimizer.state_dict()["state"][0]["param"].to(dtype)
        raw = master.view(torch.uint8).view(300, -1).clone()
        raw[:, : dtype.itemsize - sync.itemsize] = 0
        assert torch.equal(param.detach(), raw.view(dtype).view(-1))


def test_leading_bytes(two_ranks):
    two_ranks(check_bytes)


def check_redundant(rank, world):
    """Two shards, each on two ranks."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    both = []
    for options in (
        {},
        {
            "distributed_process_group": rows[rank // 2],
            "redundant_process_group": columns[rank % 2],
        },
    ):
        model = Model(FLOAT32)
        params = model.parameters()
        optimizer = DistributedFusedAdam(params, bucket_cap_mb=0.001, **HYPER, **options)
        for step in range(3):
            model(gradients(FLOAT32, step, rank)).backward()
            norm = optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        both.append([norm, *model.parameters()])
    assert optimizer.redundant_size == 2
    assert optimizer.distributed_rank == rank % 2
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match=r"process_group has 4 ranks.*\(2\).*\(1\)"):
        DistributedFusedAdam(Model(FLOAT32).parameters(), distributed_process_group=rows[rank // 2])


def test_redundant_process_group(four_ranks):
    four_ranks(check_redundant)


def check_sums(rank, world):
    """Reduced gradients: added up in the order of ranks, in float32, and rounded once."""
    torch.manual_seed(0)
    grads = [[torch.randn(shape) for shape in SHAPES] for _ in range(world)]
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        for average, cap in ((True, 0), (True, 0.001), (False, 0.001), (True, 100)):
            params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
            optimizer = DistributedFusedAdam(
                params, grad_sync_dtype=dtype, bucket_cap_mb=cap, average_grad_sync=average
            )
            for param, grad in zip(params, grads[rank], strict=True):
                param.grad = grad.clone()
            optimizer.grad_sync()
            for i, param in enumerate(params):
                total = grads[0][i].to(dtype).float()
                for other in grads[1:]:
                    total = total + other[i].to(dtype).float()
                expected = (total / world if average else total).to(dtype).view(-1)
                for fragment in optimizer.state[param]["fragments"]:
                    if fragment.in_local_shard:
                        shard = optimizer.grads_buckets[fragment.bucket_id].grads_shard
                        found = shard[slice(*fragment.shard_range)]
                        assert torch.equal(found, expected[slice(*fragment.shard_param_range)])


def test_sums_are_those_in_the_order_of_ranks(two_ranks, four_ranks):
    two_ranks(check_sums)
    four_ranks(check_sums)
