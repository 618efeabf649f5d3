"""NeMo's subclass of DistributedFusedAdam, its own file unmodified, on two and four processes.

NeMo 1.14 has what its first version overrides, NeMo 3.0 what its newest does. ``__init__`` files
are left out, because they import all of NeMo; Transformer Engine's version is said to be 0.
"""

import importlib
import importlib.metadata
import logging
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

NEMO = Path(find_spec("nemo").submodule_search_locations[0])
IS_NEW = find_spec("megatron") is not None  # whose groups NeMo 3 takes
HYPER = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.98)}
SMALL = {"bucket_cap_mb": 0.001}
STEPS = 4
_version = importlib.metadata.version


def import_nemo():
    """The module with NeMo's class, and the process groups that it looks at."""
    for name in ("nemo", "nemo.utils", "nemo.core", "nemo.core.optim"):
        package = types.ModuleType(name)
        package.__path__ = [str(NEMO.parent / name.replace(".", "/"))]
        sys.modules[name] = package
    if not IS_NEW:
        from apex.transformer import parallel_state

        return importlib.import_module("nemo.core.optim.distributed_adam"), parallel_state
    from megatron.core import parallel_state

    utils = sys.modules["nemo.utils"]
    utils.logging = logging.getLogger("nemo")
    utils.str_to_dtype = importlib.import_module("nemo.utils.dtype").str_to_dtype
    versions = {"transformer-engine": "0.0"}
    known = lambda name: versions.get(name) or _version(name)
    with patch.object(importlib.metadata, "version", known):
        return importlib.import_module("nemo.core.optim.distributed_adam"), parallel_state


module, parallel_state = import_nemo()
MegatronDistributedFusedAdam = module.MegatronDistributedFusedAdam
new_alone = pytest.mark.skipif(not IS_NEW, reason="NeMo 1.14's class has nothing of this")


def make_model():
    torch.manual_seed(0)
    layers = nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 12), nn.Tanh(), nn.Linear(12, 5)
    return nn.Sequential(*layers)


def batches(step, world):
    torch.manual_seed(100 + step)
    return torch.randn(world, 2, 6, 12)  # of two micro-batches


def loss_of(model, x):
    return model(x).square().mean()


def plain_losses(world, norms=None):
    """Losses and parameters of torch's AdamW on the averaged gradients."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    for step in range(STEPS):
        x = batches(step, world)
        optimizer.zero_grad()
        sum(loss_of(model, x[r, m]) for r in range(world) for m in range(2)).div(world).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if norms is not None:
            norms.append(norm.item())
        optimizer.step()
    return model


def split(model):
    """Parameters as NeMo's models order them: those that overlap, and embeddings, which do not."""
    params = list(model.parameters())
    params[0]._disable_greedy_grad_copy = params[0]._disable_overlap_grad_sync = True
    return params[1:], params[:1]


def train(rank, world, *, main_grads=False, pipelined=False, prepare=None, **options):
    """NeMo's loop: micro-batches without sums, the last one with; a norm of its own; a step."""
    model, norms = make_model(), []
    expected = plain_losses(world, norms)
    optimizer = MegatronDistributedFusedAdam(model.parameters(), **HYPER, **{**SMALL, **options})
    overlapped, others = split(model)
    if prepare:
        prepare(optimizer, model)
    optimizer.init_params(reversed(overlapped))
    optimizer.init_params(reversed(others))
    if optimizer.contiguous_param_buffer:
        optimizer.init_param_buffer()
    for step in range(STEPS):
        optimizer.zero_grad()
        if main_grads:
            assert all(param.main_grad.shape == param.shape for param in model.parameters())
        x = batches(step, world)[rank]
        with optimizer.no_sync(greedy_grad_copy=True):
            loss_of(model, x[0]).backward()
            if pipelined:
                loss_of(model, x[1]).backward()
        if pipelined:  # sums are started after the last backward
            optimizer.try_grad_sync(p for p in overlapped)
        else:
            loss_of(model, x[1]).backward()
        finish = optimizer._finish_bucket_grad_sync
        finish()
        assert clip(optimizer, 0.5) == pytest.approx(norms[step], rel=1e-5)
        optimizer.step()
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    return model, optimizer


def clip(optimizer, limit):
    """As NeMo's clip_grads.py: the norm over all ranks takes the place of the optimizer's."""
    params = list(optimizer.parameters())
    if IS_NEW:
        optimizer.grad_norm(parameters=params)
    else:
        square = optimizer._local_grad_norm(parameters=params, norm_type=2)
        dist.all_reduce(square)
        optimizer._grad_norm = square.sqrt()
    return float(optimizer.clip_grad_norm(limit))


def check_options(rank, world, options):
    train(rank, world, main_grads="contiguous_grad_buffer" in options, **options)


OPTIONS = [
    {},
    {"overlap_grad_sync": False},
    {"contiguous_grad_buffer": True, "bucket_cap_mb": 1},
    {"contiguous_param_buffer": True, "contiguous_grad_buffer": True, "bucket_cap_mb": 1},
    {"pipelined": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training(two_ranks, options):
    two_ranks(check_options, options=options)


def test_training_of_four(four_ranks):
    four_ranks(check_options, options={})


def check_hooks_that_initialize(rank, world):
    """Nothing is initialized before the first backward: hooks do it, in the order of gradients."""
    model = make_model()
    expected = plain_losses(world)
    optimizer = MegatronDistributedFusedAdam(model.parameters(), **HYPER, **SMALL)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batches(step, world)[rank]
        for part in x:
            loss_of(model, part).backward()
        clip(optimizer, 0.5)
        optimizer.step()
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_hooks_that_initialize(two_ranks):
    two_ranks(check_hooks_that_initialize)


def check_process_group(rank, world):
    """NeMo gives the data-parallel group: here each rank is a tensor-parallel half of its own."""
    parallel_state.initialize_model_parallel(2)
    try:
        optimizer = MegatronDistributedFusedAdam(make_model().parameters(), **HYPER)
        assert (optimizer.distributed_size, optimizer.distributed_rank) == (1, 0)
    finally:
        parallel_state.destroy_model_parallel()


def test_process_group(two_ranks):
    two_ranks(check_process_group)


def check_groups(rank, world, option):
    options = {option: True}
    if option == "disable_distributed_parameters":
        options["process_group"] = dist.group.WORLD  # without which NeMo raises a KeyError
    with patch.object(torch.cuda, "device_count", lambda: 2):
        _, optimizer = train(rank, world, **options)
    sizes = {"disable_distributed_parameters": (1, 2), "distribute_within_nodes": (2, 1)}
    assert (optimizer.distributed_size, optimizer.redundant_size) == sizes[option]


@new_alone
@pytest.mark.parametrize("option", ["disable_distributed_parameters", "distribute_within_nodes"])
def test_groups(two_ranks, option):
    two_ranks(check_groups, option=option)


def check_buckets(rank, world):
    """Buckets by hand; some gradients stay float32, in buckets that wait for all the others."""

    def prepare(optimizer, model):
        params = list(model.parameters())
        params[3]._with_fp32_optimizer = True
        optimizer.init_params_bucket(params[:4])
        optimizer.init_params_bucket(params[4:])

    train(rank, world, prepare=prepare, lock_timeout=30)


@new_alone
def test_buckets_by_hand(two_ranks):
    two_ranks(check_buckets)


def check_checkpoint(rank, world, folder):
    """megatron-core's checkpoints: whole tensors by name, saved and loaded by its own functions."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    parallel_state.initialize_model_parallel()
    try:
        model, optimizer = train(rank, world)

        def sharded(model, optimizer):
            named = {
                name: ShardedTensor.from_rank_offsets(name, param, replica_id=rank)
                for name, param in model.named_parameters()
            }
            return {"optimizer": optimizer.sharded_state_dict(named)}

        cpu = {"synchronize": lambda: None, "current_device": lambda: torch.device("cpu")}
        with patch.multiple(torch.cuda, **cpu):  # megatron-core asks for them anywhere
            dist_checkpointing.save(sharded(model, optimizer), folder)
        other = make_model()
        loaded = MegatronDistributedFusedAdam(other.parameters(), **HYPER, bucket_cap_mb=1)
        loaded.init_params()
        found = dist_checkpointing.load(sharded(other, loaded), folder)
        loaded.load_state_dict(found["optimizer"])
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
        states = optimizer.state_dict()["state"], loaded.state_dict()["state"]
        assert states[0]["step"] == states[1]["step"] == STEPS
        for index in range(len(list(model.parameters()))):
            for key, value in states[0][index].items():
                assert torch.equal(value, states[1][index][key])
    finally:
        parallel_state.destroy_model_parallel()


@new_alone
def test_checkpoint(two_ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    two_ranks(check_checkpoint, folder=str(folder))
