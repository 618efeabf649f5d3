"""DistributedDataParallel: every option gives the average over ranks, and does what it says."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.parallel import DistributedDataParallel, Reducer
from apex.parallel.ddp import broadcast

STEPS = 3


def build(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(rank, step, rows=4):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64)


def loss_of(output):
    return output.square().sum(1).mean()


def average_gradients(model, world, step):
    """What every rank must get: each rank's batch through a local copy, averaged."""
    copies = [copy.deepcopy(model) for _ in range(world)]
    for rank, replica in enumerate(copies):
        replica.zero_grad()
        loss_of(replica(batch(rank, step))).backward()
    replicas = zip(*(replica.parameters() for replica in copies), strict=True)
    return [torch.stack([p.grad for p in same]).mean(0) for same in replicas]


def assert_gradients(model, expected, factor=1.0):
    """float64, so that only the order of a sum over ranks can differ: a few units of 2e-16."""
    for param, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, wanted * factor, rtol=1e-13, atol=1e-15)


def resolve(options, model, world):
    """Turn what can be sent to a process into constructor arguments."""
    options = dict(options)
    if "triggers" in options:
        params = list(model.parameters())
        options["allreduce_trigger_params"] = [params[i] for i in options.pop("triggers")]
    if options.pop("communicators", False):
        groups = [dist.new_group() for _ in range(2)]
        options |= {"num_allreduce_streams": 2, "allreduce_communicators": (groups, [None, None])}
    return options


def check_average(rank, world, options, factor=1.0):
    model = build()
    ddp = DistributedDataParallel(model, **resolve(options, model, world))
    for step in range(STEPS):
        expected = average_gradients(model, world, step)
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        assert_gradients(model, expected, factor)
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad


def check_trigger_iterator(rank, world):
    model = build()
    triggers = model[4].parameters()  # an iterator, as modules give it
    ddp = DistributedDataParallel(model, allreduce_trigger_params=triggers)
    loss_of(ddp(batch(rank, 0))).backward()
    assert {4, 5} not in map(set, ddp.active_i_buckets)  # each of them closes a bucket
    assert ddp.num_buckets == 3


def test_triggers_may_be_an_iterator(two_ranks):
    two_ranks(check_trigger_iterator)


OPTIONS = {
    "default": {},
    "one bucket per parameter": {"message_size": 1},
    "two or three parameters a bucket": {"message_size": 40},
    "delayed": {"delay_allreduce": True},
    "triggers": {"triggers": [2, 5]},
    "no triggers": {"triggers": []},
    "retained": {"retain_allreduce_buffers": True, "message_size": 40},
    "retained, delayed": {"retain_allreduce_buffers": True, "delay_allreduce": True},
    "fp32": {"allreduce_always_fp32": True},  # float64 gradients are not narrowed
    "three streams": {"num_allreduce_streams": 3, "message_size": 1},
    "communicators": {"communicators": True, "message_size": 1},
    "predivided": {"gradient_predivide_factor": 3.0, "message_size": 40},
    "profiled": {"prof": True, "message_size": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients_are_averages(two_ranks, options):
    two_ranks(check_average, options=options)


@pytest.mark.parametrize("name", ["default", "two or three parameters a bucket", "three streams"])
def test_gradients_are_averages_over_four(four_ranks, name):
    four_ranks(check_average, options=OPTIONS[name])


def test_without_average_gradients_are_sums(two_ranks):
    two_ranks(check_average, options={"gradient_average": False}, factor=2.0)
    options = {"gradient_average": False, "gradient_predivide_factor": 4.0}
    two_ranks(check_average, options=options, factor=0.5)


def check_whole_batch(rank, world):
    model = build()
    whole = copy.deepcopy(model)
    loss_of(whole(torch.cat([batch(r, 0) for r in range(world)]))).backward()
    loss_of(DistributedDataParallel(model)(batch(rank, 0))).backward()
    assert_gradients(model, [param.grad for param in whole.parameters()])


def test_equals_one_process_on_the_whole_batch(two_ranks, four_ranks):
    two_ranks(check_whole_batch)
    four_ranks(check_whole_batch)


def check_structure(rank, world):
    """Buckets follow the order of arrival (last layer first) of rank 0 on every rank."""
    model = build()
    ddp = DistributedDataParallel(model, message_size=100, retain_allreduce_buffers=True)
    assert ddp.world_size == float(world)
    assert ddp.needs_refresh
    assert ddp.num_buckets == 0
    loss_of(ddp(batch(rank, 0))).backward()
    assert not ddp.needs_refresh
    arrived = [index for bucket in ddp.active_i_buckets for index in bucket]
    assert sorted(arrived) == list(range(6))
    assert set(arrived[:2]) == {4, 5}  # the last layer's weight and bias
    sizes = [sum(ddp.active_params[i].numel() for i in b) for b in ddp.active_i_buckets]
    assert all(size >= 100 for size in sizes[:-1])
    assert ddp.bucket_sizes == [len(bucket) for bucket in ddp.active_i_buckets]
    loss_of(ddp(batch(rank, 1))).backward()
    assert ddp.next_bucket == ddp.num_buckets
    assert ddp.ready_buckets_not_reduced == set()
    assert all(grad is not None for bucket in ddp.buckets for grad in bucket)


def test_bucket_structure(two_ranks):
    two_ranks(check_structure)


def check_retained(rank, world, always_fp32, dtype):
    model = build(dtype)
    ddp = DistributedDataParallel(
        model,
        message_size=100,
        retain_allreduce_buffers=True,
        allreduce_always_fp32=always_fp32,
    )
    for step in range(2):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step).to(dtype))).backward()
        assert len(ddp.allreduce_buffers) == ddp.num_buckets > 1
        for buffer, indices in zip(ddp.allreduce_buffers, ddp.active_i_buckets, strict=True):
            grads = [ddp.active_params[i].grad for i in indices]
            assert buffer.dtype == (torch.float32 if always_fp32 else dtype)
            assert torch.equal(buffer.to(dtype), torch.cat([g.flatten() for g in grads]))
            storages = {grad.untyped_storage().data_ptr() for grad in grads}
            assert len(storages) == 1
            assert always_fp32 or storages == {buffer.untyped_storage().data_ptr()}


def test_retained_buffers_hold_the_gradients(two_ranks):
    two_ranks(check_retained, always_fp32=False, dtype=torch.float32)
    two_ranks(check_retained, always_fp32=False, dtype=torch.bfloat16)
    two_ranks(check_retained, always_fp32=True, dtype=torch.bfloat16)


class Scales(nn.Module):
    """Gradient of parameter i is x, exactly, whatever its dtype."""

    def __init__(self, *dtypes):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(3, dtype=dtype) for dtype in dtypes])

    def forward(self, x):
        return sum((scale * x.to(scale.dtype)).sum().double() for scale in self.scales)


def check_mixed_dtypes(rank, world, options):
    dtypes = [torch.float16, torch.float32, torch.bfloat16, torch.float64] * 2
    ddp = DistributedDataParallel(Scales(*dtypes), **options)
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([1.0, 2.0, -4.0]) * (rank + step)).backward()
        mean = torch.tensor([1.0, 2.0, -4.0]) * ((world - 1) / 2 + step)
        for scale, dtype in zip(ddp.module.scales, dtypes, strict=True):
            assert scale.grad.dtype == dtype
            assert torch.equal(scale.grad, mean.to(dtype))
    if not options.get("delay_allreduce"):
        kinds = [{ddp.active_params[i].dtype for i in b} for b in ddp.active_i_buckets]
        assert all(len(kind) == 1 for kind in kinds)


@pytest.mark.parametrize(
    "options", [{}, {"message_size": 4}, {"delay_allreduce": True}, {"allreduce_always_fp32": True}]
)
def test_mixed_dtypes(two_ranks, four_ranks, options):
    two_ranks(check_mixed_dtypes, options=options)
    four_ranks(check_mixed_dtypes, options=options)


def check_fp16_range(rank, world):
    """40000 + 40000 overflows float16: the sum of fp32 copies or of pre-divided values does not."""
    for options in ({"allreduce_always_fp32": True}, {"gradient_predivide_factor": 2.0}, {}):
        ddp = DistributedDataParallel(Scales(torch.float16), **options)
        ddp(torch.full((3,), 40000.0)).backward()
        expected = 40000.0 if options else float("inf")
        assert ddp.module.scales[0].grad.tolist() == [expected] * 3


def test_fp32_and_predivision_avoid_overflow(two_ranks):
    two_ranks(check_fp16_range)


def check_broadcast(rank, world):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    model[1].running_mean.fill_(rank)
    ddp = DistributedDataParallel(model)
    weights = [torch.empty_like(model[0].weight) for _ in range(world)]
    dist.all_gather(weights, model[0].weight.detach())
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    torch.manual_seed(0)
    assert torch.equal(model[0].weight, nn.Linear(3, 3).double().weight)
    assert model[1].running_mean.tolist() == [rank] * 3  # buffers stay
    assert set(ddp.state_dict()) == {f"module.{key}" for key in model.state_dict()}


def check_broadcast_in_chunks(rank, world):
    """No flat copy of the whole model, whose memory would be needed twice."""
    shapes = [(3,), (5,), (0,), (40,), (2, 2), (), (7,)]
    params = nn.ParameterList([torch.full(shape, rank + i * 2.0) for i, shape in enumerate(shapes)])
    params[4] = nn.Parameter(params[4].detach().double())
    sent, own = [], dist.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "CHUNK_BYTES", 40)
        patch.setattr(dist, "broadcast", lambda x, *more: (sent.append(x.nbytes), own(x, *more))[1])
        DistributedDataParallel(params)
    assert sent == [32, 160, 32, 4, 28]  # by chunk and dtype
    assert [param.unique().tolist() for param in params] == [
        [i * 2.0] * bool(param.numel()) for i, param in enumerate(params)
    ]


def test_parameters_come_from_rank_zero(two_ranks):
    two_ranks(check_broadcast)
    two_ranks(check_broadcast_in_chunks)


def check_reducer(rank, world):
    torch.manual_seed(rank)
    model = build() if rank == 0 else nn.Sequential(*copy.deepcopy(list(build())))
    with torch.no_grad():
        model[0].weight += rank
    reducer = Reducer(model)
    assert torch.equal(model[0].weight, build()[0].weight)
    expected = average_gradients(model, world, 0)
    loss_of(model(batch(rank, 0))).backward()
    reducer.reduce()
    assert_gradients(model, expected)
    mine = [torch.full((2,), float(rank)), {"deep": [torch.full((3,), 2.0 * rank).half()]}]
    Reducer(mine).reduce()
    assert mine[0].tolist() == [(world - 1) / 2] * 2
    assert mine[1]["deep"][0].tolist() == [world - 1.0] * 3


def check_reducer_frozen(rank, world):
    """A gradient left on a frozen parameter is averaged like any other; int8 weights have none."""
    model = nn.ParameterList([torch.zeros(2) for _ in range(3)])
    model.append(nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False))
    reducer = Reducer(model)
    model[0].grad = torch.full((2,), float(rank))
    if rank == 1:
        model[1].grad = torch.full((2,), 3.0)
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    reducer.reduce()
    assert model[0].grad.tolist() == [(world - 1) / 2] * 2
    assert model[1].grad.tolist() == [3.0 / world] * 2
    assert model[2].grad is None
    assert model[3].grad is None


def test_reducer_with_frozen_parameters(two_ranks):
    two_ranks(check_reducer_frozen)


def test_reducer(two_ranks, four_ranks):
    two_ranks(check_reducer)
    four_ranks(check_reducer)
