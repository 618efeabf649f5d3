"""Damaged states: a load is refused on all ranks with nothing changed, or it loads.

``APEX_SPOILS`` sets how many states of each optimizer are tried.
"""

import copy
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB

SPOILS = int(os.environ.get("APEX_SPOILS", "40"))
WRONG = [None, "x", -1, 2.5, float("nan"), [], {}, torch.ones(3), torch.zeros(2, dtype=torch.int8)]
KINDS = {"adam": DistributedFusedAdam, "lamb": DistributedFusedLAMB}


def places(value, path=()):
    """All containers of a nested state, with the keys in them."""
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield value, key
        yield from places(value[key], (*path, key))


def spoil(rng, state):
    """Change one thing: drop it, rename it, or put something wrong or shorter in its place."""
    holder, key = rng.choice(list(places(state)))
    value = holder[key]
    how = rng.choice(["drop", "rename", "replace", "replace", "bits"])
    if how == "bits" and isinstance(value, torch.Tensor) and value.numel():
        flat = value.view(-1).view(torch.uint8)
        flat[rng.randrange(flat.numel())] ^= 1 << rng.randrange(8)
    elif how == "rename" and isinstance(holder, dict):
        holder[f"{key}!"] = holder.pop(key)
    elif how == "drop":
        del holder[key]
    else:
        is_long = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim())
        holder[key] = rng.choice([*WRONG, value[:-1]] if is_long else WRONG)


def bits_of(optimizer, params):
    state = optimizer.state_dict()
    found = [t.detach().clone() for t in params]
    entries = state.get("state", {"whole": state})
    for entry in entries.values():
        tensors = entry.values() if isinstance(entry, dict) else ()
        found += [t.clone() for t in tensors if isinstance(t, torch.Tensor)]
    groups = copy.deepcopy(state.get("param_groups"))
    return [t.view(torch.uint8) if t.dim() else t for t in found], repr(groups)


def is_same(first, second):
    return first[1] == second[1] and all(map(torch.equal, first[0], second[0]))


def error_of(optimizer, state):
    try:
        optimizer.load_state_dict(state)
    except (ValueError, RuntimeError, TypeError) as error:
        return error
    return None


def check_spoiled(rank, world, kind, spoils):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    params = list(model.parameters())
    optimizer = KINDS[kind](params, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved, rng, refused = copy.deepcopy(optimizer.state_dict()), random.Random(0), 0
    for case in range(spoils):
        state = copy.deepcopy(saved)
        spoil(rng, state)
        before = bits_of(optimizer, params)
        # The ranks take turns in having a damaged file.
        error = error_of(optimizer, state if case % world == rank else saved)
        if error is not None:
            refused += 1
            assert "load_state_dict" in str(error) or "must be" in str(error), repr(error)
            assert is_same(bits_of(optimizer, params), before), (case, error)
    assert refused > spoils // 4
    optimizer.load_state_dict(saved)
    print(f"{kind}: {refused} of {spoils} states refused", flush=True)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_states(kind, two_ranks):
    two_ranks(check_spoiled, kind=kind, spoils=SPOILS)


def check_one_refuses(rank, world):
    params = [nn.Parameter(torch.ones(3))]
    for kind in KINDS.values():
        optimizer = kind(params)
        saved = copy.deepcopy(optimizer.state_dict())
        with pytest.raises((ValueError, RuntimeError)) as caught:
            optimizer.load_state_dict(saved if rank == 0 else {})
        assert ("ranks [1] of the process group refused" in str(caught.value)) == (rank == 0)
        later = copy.deepcopy(saved)
        if kind is DistributedFusedLAMB:
            later["step"] += rank
        else:
            later["state"]["step"] += rank
        with pytest.raises(RuntimeError, match=r"states of ranks \[1\].* another step"):
            optimizer.load_state_dict(later)
        optimizer.load_state_dict(saved)


def check_missing_options(rank, world):
    optimizer = DistributedFusedAdam([nn.Parameter(torch.ones(3))])
    saved = optimizer.state_dict()
    for name in ("lr", "betas", "eps", "weight_decay"):
        state = copy.deepcopy(saved)
        state["param_groups"][0]['"' + name[1:]] = state["param_groups"][0].pop(name)
        with pytest.raises(ValueError, match=rf"param_groups\[0\] has no {name}, which"):
            optimizer.load_state_dict(state)
    assert repr(optimizer.state_dict()) == repr(saved)


def test_a_group_without_its_options_is_refused(two_ranks):
    """As where a bit of a name has turned: the optimizer's own were kept, without a word."""
    two_ranks(check_missing_options)


def check_cut_folder(rank, world, folder):
    """A file that is cut off in its last part: the parts before it have been read already."""
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(30))]
    optimizer = DistributedFusedAdam(params, lr=0.1)

    def step():
        sum((number + 1) * p.sum() for number, p in enumerate(params)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    dcp.save(optimizer.sharded_state_dict(), checkpoint_id=folder)
    step()
    before, groups = bits_of(optimizer, params)
    if rank == 0:
        for file in Path(folder).glob("*.distcp"):
            os.truncate(file, file.stat().st_size - 100)
    dist.barrier()
    for _ in range(2):
        state = optimizer.sharded_state_dict()
        with pytest.raises(CheckpointException):
            dcp.load(state, checkpoint_id=folder)
        assert is_same(bits_of(optimizer, params), (before, groups))


def test_a_folder_that_is_cut_off(two_ranks, tmp_path):
    """torch.distributed.checkpoint fails halfway, and must not have written into the state."""
    two_ranks(check_cut_folder, folder=str(tmp_path / "state"))


def test_one_rank_refuses(two_ranks):
    two_ranks(check_one_refuses)
