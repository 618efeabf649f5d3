"""The bytes per parameter that the page of DistributedFusedAdam tells, measured."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contrib" / "distributed_fused_adam.md"
ROW = re.compile(r"^\| (none|`.*`) \| (\d+) / N \| (\d+) / N \|$", re.M)
NUMEL = 1 << 18


def rows():
    """Options, bytes of state and bytes of gradients."""
    for options, state, grads in ROW.findall(PAGE.read_text()):
        given = "" if options == "none" else options.strip("`")
        yield eval(f"dict({given})", {"torch": torch}), int(state), int(grads)


def bytes_of(buckets):
    """Of the memory behind all tensors of these objects, each once."""
    tensors = (v for b in buckets for v in vars(b).values() if isinstance(v, torch.Tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def check(rank, world):
    for options, state, grads in rows():
        is_16_bit = options.get("store_param_remainders") or "dtype" in options
        dtype = options.get("param_sync_dtype") or options.get("dtype") if is_16_bit else None
        param = nn.Parameter(torch.randn(NUMEL, dtype=dtype or torch.float32))
        optimizer = DistributedFusedAdam([param], bucket_cap_mb=0.25, **options)
        param.sum().backward()
        optimizer.grad_sync()
        measured = bytes_of(optimizer.grads_buckets.values()) * world / NUMEL
        assert measured == pytest.approx(grads, rel=0.01), options
        optimizer.step()
        measured = bytes_of(optimizer.state["buckets"]) * world / NUMEL
        assert measured == pytest.approx(state, rel=0.01), options


def test_bytes_are_those_of_the_page(two_ranks, four_ranks):
    assert len(list(rows())) == 6
    two_ranks(check)
    four_ranks(check)
