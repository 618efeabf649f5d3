"""A training step on 2 gloo processes: DistributedFusedAdam and what users have today.

"torch_ddp" is DistributedDataParallel with torch's fused AdamW, "torch_zero" the same with
ZeroRedundancyOptimizer, "torch_fsdp2" is fully_shard of every layer. With "apex" new parameters
arrive in ``step()``, with "apex_overlap" in the next forward (``module=``, ``overlap_param_sync``).
A step is forward, backward, step and zero_grad. All live in the same two processes and take turns;
rank 1 does what rank 0 tells it through a pipe.

Bytes of state per parameter are printed for each, and for our options.

Last, the two processes live in two network namespaces, of which tc limits the rate. Exposed is the
time of a step minus that of a plain module with torch's fused AdamW. That needs root and the
commands ip and tc; where they are missing it says so and ends.
"""

import multiprocessing
import sys
import tempfile
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex_testkit.bench import compare

sys.path.append(str(Path(__file__).resolve().parents[3]))
from ci.hosts import exposed

WORLD = 2
RATES = {"1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit"}
CAP_MB = 8  # of our buckets
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
# Options, and the dtype of the parameters whose state's bytes are printed.
OPTIONS = {
    "apex": ({}, torch.float32),
    "apex, store_params=False": ({"store_params": False}, torch.float32),
    "apex, remainders": (
        {
            "store_params": False,
            "store_param_remainders": True,
            "param_sync_dtype": BFLOAT16,
        },
        BFLOAT16,
    ),
    "apex, bfloat16 states": ({"dtype": BFLOAT16}, BFLOAT16),
    "apex, scaled float16 states": ({"dtype": FLOAT16, "with_scaled_states": True}, FLOAT16),
}


class Layers(nn.Module):
    """Of GPT-2's shapes: 4 layers of 256 channels and 4 heads, 64 tokens of 8,192."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(8192, 256), nn.Linear(256, 8192, bias=False)
        layer = partial(nn.TransformerEncoderLayer, 256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Vectors(nn.Module):
    """1,000 parameters of 64 numbers, in 10 layers."""

    def __init__(self, count=1000):
        super().__init__()
        self.layers = nn.ModuleList(Vectors(0) for _ in range(10 * (count > 0)))
        for layer in self.layers:
            for i in range(count // 10):
                layer.register_parameter(f"own{i}", nn.Parameter(torch.randn(64)))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x if self.layers else x + sum(self._parameters.values())


MODELS = {
    "GPT, 4 layers of 256": (Layers, lambda: torch.randint(8192, (2, 64))),
    "1,000 parameters of 64": (Vectors, lambda: torch.randn(4, 64)),
}


def contestants(name):
    """Steps, and their optimizers; the same on every rank, because constructors communicate."""
    build, make_input = MODELS[name]
    x, steps, optimizers = make_input(), {}, {}

    def add(contestant, wrap, make_optimizer, **options):
        torch.manual_seed(0)
        model = wrap(build())
        if options:
            options["module"] = model
        optimizer = make_optimizer(model.parameters(), **options)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[contestant], optimizers[contestant] = step, optimizer

    def plain(model):
        return model

    def sharded(model):
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    fused = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True)
    ours = partial(DistributedFusedAdam, lr=1e-4, weight_decay=0.01, bucket_cap_mb=CAP_MB)
    add("apex", plain, ours)
    add("apex_overlap", plain, ours, overlap_param_sync=True)
    add("torch_ddp", DistributedDataParallel, fused)
    add("torch_zero", DistributedDataParallel, zero)
    add("torch_fsdp2", sharded, fused)
    add(exposed.ALONE, plain, fused)
    return steps, optimizers


def tensors_in(value):
    """All tensors of a state, those of our buckets included."""
    if isinstance(value, torch.Tensor):
        yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from tensors_in(inner)
    elif hasattr(value, "exp_avg_shard"):
        yield from tensors_in(vars(value))


def bytes_of(optimizer, numel):
    """Bytes of state per parameter on this rank."""
    inner = getattr(optimizer, "optim", optimizer)
    state = {key: value for key, value in inner.state.items() if key != "step"}
    tensors = {id(t): t for t in tensors_in(state) if t.numel() > 1}
    return sum(t.numel() * t.element_size() for t in tensors.values()) / numel


def report_bytes(optimizers=None):
    """Take a step with each option, and print what each optimizer keeps."""
    if optimizers is None:
        optimizers = {}
        for label, (options, dtype) in OPTIONS.items():
            param = nn.Parameter(torch.randn(1 << 20).to(dtype))
            sync = {"param_sync_dtype": dtype, "bucket_cap_mb": 1}
            optimizer = DistributedFusedAdam([param], **{**sync, **options})
            param.grad = torch.ones_like(param)
            optimizer.step()
            optimizers[label] = optimizer
    for label, optimizer in optimizers.items():
        numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        if dist.get_rank() == 0:
            print(f"{label:<32} {bytes_of(optimizer, numel):6.2f} bytes of state per parameter")


def work(rank, connection, init_file):
    """One rank's part: rank 0 leads, and rank 1 does what it is told."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    address, limit = f"file://{init_file}", timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=limit)
    for model in MODELS:
        steps, optimizers = contestants(model)

        def together(name, steps=steps):
            connection.send(name)
            steps[name]()

        if rank == 0:
            calls = {name: partial(together, name) for name in steps if name != exposed.ALONE}
            compare("distributed_adam", f"{model}, {WORLD} ranks", **calls)
            connection.send(None)
        else:
            while (name := connection.recv()) is not None:
                steps[name]()
        report_bytes(optimizers)
    report_bytes()
    dist.destroy_process_group()


def two_processes():
    """All cases over the machine's own network."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.NamedTemporaryFile() as file:
        init_file = f"{file.name}.init"
        follower = context.Process(target=work, args=(1, there, init_file))
        follower.start()
        there.close()  # so that a follower that dies ends the leader's send, too
        try:
            work(0, here, init_file)
            follower.join(60)
        finally:
            follower.kill()


def steps_of_first_model():
    return contestants(next(iter(MODELS)))[0]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank, case, address = sys.argv[1:]
        title = f"{next(iter(MODELS))}, {case}"
        exposed.measure("distributed_adam", int(rank), title, address, steps_of_first_model)
    else:
        two_processes()
        exposed.run_program("distributed_adam", __file__, RATES)
