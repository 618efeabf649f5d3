"""DistributedDataParallel under what drives or copies it: autograd, pickle, compilers, amp."""

import copy
import importlib.util
import pickle
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex.parallel import DistributedDataParallel
from apex.parallel.ddp import lanes
from apex_testkit.branches import Branches, values

MODES = {"buckets": {"message_size": 1}, "one bucket": {}, "delayed": {"delay_allreduce": True}}
every_mode = pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())


def check_gradient_penalty(rank, world, options):
    """autograd.grad reduces nothing; its second-order graph is reduced with the rest."""
    weight = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    model = nn.Module()
    model.weight, model.forward = weight, lambda x: weight * x.square()
    ddp = DistributedDataParallel(model, **options)
    for _ in range(2):
        ddp.zero_grad()
        x = torch.tensor(1.0 + rank, dtype=torch.float64, requires_grad=True)
        y = ddp(x)
        (slope,) = torch.autograd.grad(y, x, create_graph=True)  # 2 w x
        (y + slope.square()).backward()  # d/dw: x^2 + 8 w x^2
        assert weight.grad.item() == sum(25.0 * (1 + r) ** 2 for r in range(world)) / world


@every_mode
def test_gradient_penalty(two_ranks, options):
    two_ranks(check_gradient_penalty, options=options)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]).double()

    def forward(self, x, reentrant):
        for layer in self.layers:
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        return {"deep": [x.square().sum()]}


def check_checkpoint(rank, world, options):
    inputs = [torch.full((2, 3), r + 1.0, dtype=torch.float64) for r in range(world)]
    alone = Checkpointed()
    (sum(alone(x, None)["deep"][0] for x in inputs) / world).backward()
    for reentrant in (True, False):
        ddp = DistributedDataParallel(Checkpointed(), **options)
        for _ in range(2):
            ddp.zero_grad()
            ddp(inputs[rank].clone().requires_grad_(), reentrant)["deep"][0].backward()
            for mine, wanted in zip(ddp.module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-13, atol=1e-15)


@every_mode
def test_checkpoints(two_ranks, options):
    two_ranks(check_checkpoint, options=options)


@dataclass
class Output:
    """What a model may return; ``holder`` makes a cycle of it."""

    losses: list
    holder: object = None


class ReturnsDataclass(Checkpointed):
    def forward(self, x, reentrant):
        output = Output(super().forward(x, reentrant)["deep"])
        output.holder = output
        return output


def check_dataclass(rank, world, options):
    """Hooks on the outputs are needed: all gradients arrive in nested backwards."""
    ddp = DistributedDataParallel(ReturnsDataclass(), **options)
    plain = DistributedDataParallel(Checkpointed(), **options)
    x = torch.full((2, 3), rank + 1.0, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        ddp.zero_grad()
        plain.zero_grad()
        ddp(x, True).losses[0].backward()
        plain(x, None)["deep"][0].backward()
        for mine, wanted in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-13, atol=1e-15)


@every_mode
def test_dataclass_outputs(two_ranks, options):
    two_ranks(check_dataclass, options=options)


def check_copies(rank, world):
    params = list((model := Branches(3)).parameters())
    ddp = DistributedDataParallel(
        model, allreduce_trigger_params=params[1:2], num_allreduce_streams=2, gradient_average=False
    )
    ddp([0, 1, 2]).backward()
    for duplicate in (pickle.loads(pickle.dumps(ddp)), copy.deepcopy(ddp)):
        assert type(duplicate) is DistributedDataParallel
        assert duplicate.allreduce_trigger_params[0] is duplicate.module.branches[1]
        assert duplicate.state_dict().keys() == ddp.state_dict().keys()
        for _ in range(2):
            duplicate.zero_grad()
            duplicate([0, 1, 2], factor=rank).backward()
            assert values(duplicate) == [world - 1.0] * 3
        assert duplicate.num_buckets == 2  # the trigger's, and the rest
        assert values(ddp) == [2.0] * 3
    handle = copy.deepcopy(ddp).module.branches[0]
    handle.sum().backward()  # its wrapper is gone: a plain parameter again
    assert handle.grad.tolist() == [1.0, 1.0]


def test_pickle_and_deepcopy(two_ranks):
    two_ranks(check_copies)


def check_overlap(rank, world):
    """Complete buckets are in flight while backward still runs; later ones are not."""
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    ddp = DistributedDataParallel(layers, message_size=1)
    seen = []
    layers[0].register_full_backward_pre_hook(
        lambda *_: seen.append((ddp.next_bucket, len(ddp._reducer.pending)))
    )
    for _ in range(2):
        ddp(torch.ones(1, 4)).sum().backward()
    assert seen == [(0, 0), (2, 2)]  # the first backward only records
    assert ddp._reducer.pending == []


def test_buckets_leave_during_backward(two_ranks):
    two_ranks(check_overlap)


def check_out_of_order(rank, world):
    """Rank 1's gradients arrive in another order than rank 0's, every time."""
    ddp = DistributedDataParallel(Branches(4), message_size=1)
    for step in range(3):
        ddp.zero_grad()
        ddp([0, 1, 2, 3] if (rank + step) % 2 else [3, 2, 1, 0], factor=rank).backward()
        assert values(ddp) == [(world - 1) / 2] * 4


def test_ranks_with_different_orders(two_ranks, four_ranks):
    two_ranks(check_out_of_order)
    four_ranks(check_out_of_order)


def check_compiled(rank, world):
    """A compiled module inside, and the wrapper itself compiled (it breaks the graph)."""
    for inside in (True, False):
        layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
        plain = DistributedDataParallel(copy.deepcopy(layers))
        layers = torch.compile(layers, backend="aot_eager") if inside else layers
        ddp = DistributedDataParallel(layers, message_size=1)
        compiled = ddp if inside else torch.compile(ddp, backend="aot_eager")
        x = torch.full((3, 2), rank + 1.0, dtype=torch.float64)
        for _ in range(3):
            for model in (plain, compiled):
                model.zero_grad()
                model(x).sum().backward()
            for a, b in zip(plain.parameters(), ddp.parameters(), strict=True):
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-13, atol=1e-15)
        assert ddp.num_buckets == 4


def test_compiled(two_ranks):
    two_ranks(check_compiled)


def check_amp(rank, world, level, options):
    """Gradients are averaged while they carry the loss scale; parameters stay the same on ranks."""
    from apex import amp

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    ddp = DistributedDataParallel(model, **options)
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        loss = ddp(torch.randn(3, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    for old, param in zip(before, model.parameters(), strict=True):
        copies = [torch.empty_like(param) for _ in range(world)]
        dist.all_gather(copies, param.detach())
        assert all(torch.equal(other, copies[0]) for other in copies)
        assert not torch.equal(param, old)


@pytest.mark.skipif(
    importlib.util.find_spec("apex.amp") is None,
    reason="apex-amp is not installed; it and apex-parallel are used together, never required",
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_with_amp(two_ranks, level):
    two_ranks(check_amp, level=level, options={})
    two_ranks(check_amp, level=level, options={"delay_allreduce": True})
    two_ranks(check_amp, level=level, options={"retain_allreduce_buffers": True})


class FakeAccelerator:
    """Streams and events that write down what they are asked to do."""

    def __init__(self):
        self.log = []
        self.current = FakeStream("main", self.log)

    def current_stream(self, device=None):
        return self.current

    def Stream(self, device=None):
        return FakeStream("side", self.log)

    def Event(self):
        return self

    def record(self, stream):
        self.log.append(f"event on {stream.name}")

    def stream(self, stream):
        self.log.append(f"enter {stream.name}")
        return lanes.nullcontext()


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for event")


def test_streams_are_ordered(monkeypatch):
    """A lane starts after the streams that write gradients, and is waited for at the end."""
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    first, second = lanes.make_lanes([None, None], torch.device("cuda"))
    assert first.stream is not second.stream
    assert not first.wait_blocks  # so that its results are written back during backward
    with first.entered(after=[fake.current]):
        first.mark_done()
    first.join()
    wanted = ["side waits for main", "enter side", "event on side", "main waits for event"]
    assert fake.log == wanted
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    assert all(lane.wait_blocks for lane in lanes.make_lanes([None], torch.device("cuda")))
    assert lanes.make_lanes([None], torch.device("cpu"))[0].stream is None


class Watched(DistributedDataParallel):
    """Overrides the steps of a reduction, as drivers that watch or change them do."""

    def create_hooks(self):
        self.called = ["create_hooks"]
        super().create_hooks()

    def comm_ready_buckets(self, param):
        self.called.append("comm_ready_buckets")
        super().comm_ready_buckets(param)

    def sync_bucket_structure(self):
        self.called.append("sync_bucket_structure")
        super().sync_bucket_structure()

    def allreduce_fallback(self):
        self.called.append("allreduce_fallback")
        super().allreduce_fallback()


def check_overridden_steps(rank, world):
    model = nn.Linear(2, 1)
    for delay, last in ((False, "sync_bucket_structure"), (True, "allreduce_fallback")):
        ddp = Watched(copy.deepcopy(model), delay_allreduce=delay)
        for watched in (ddp, copy.deepcopy(ddp)):
            watched(torch.full((3, 2), float(rank))).sum().backward()
            assert watched.called == ["create_hooks", *["comm_ready_buckets"] * 2, last]
            assert torch.equal(watched.module.weight.grad, torch.full((1, 2), 1.5))
        reducer = weakref.ref(ddp._reducer)
        del ddp, watched
        assert reducer() is None


def test_overridden_steps(two_ranks):
    two_ranks(check_overridden_steps)
