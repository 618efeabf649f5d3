"""Shares of the state as torch.distributed.checkpoint saves and loads them, for any layout.

Each state of a parameter is one flat tensor, in the order of the parameter's memory, of which every
rank has some pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from . import local_states
from .arguments import NAME, check_state, count_of
from .checkpoints import group_starts
from .collectives import load_together
from .held_values import KEYS, read, send_parameters, value_dtype, write
from .ownership import check_complete, check_owner
from .plans import agree

_WHERE = f"{NAME}.load_sharded_state_dict"


class FlatShards(torch.Tensor):
    """This rank's pieces of a flat tensor that all ranks hold together.

    torch.distributed.checkpoint asks tensors for these three methods. The tensor itself, meta
    memory of the whole size, is never read.
    """

    pieces: dict[int, Tensor]  # by where they begin

    @staticmethod
    def of(numel: int, dtype: torch.dtype, pieces: dict[int, Tensor]) -> FlatShards:
        """Make one of ``numel`` elements."""
        whole = torch.empty((), dtype=dtype).expand(numel)  # no memory
        shards = whole.as_subclass(FlatShards)
        shards.pieces = pieces
        return shards

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size([self.numel()])),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # A load asks for this, and then writes into the pieces. It may fail halfway, so they must
        # not be the optimizer's memory, which a save reads.
        self.pieces = {begin: torch.empty_like(piece) for begin, piece in self.pieces.items()}
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([begin]), torch.Size([piece.numel()]))
            for begin, piece in self.pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.offset[0]]


@torch.no_grad()
def make(optimizer: Any) -> dict[str, Any]:
    """A state dict for ``torch.distributed.checkpoint.save`` and ``load``; a collective call."""
    check_complete(optimizer, "sharded_state_dict")
    optimizer.param_sync()
    optimizer.init_params()
    agree(optimizer)
    starts, state = group_starts(optimizer), {}
    for param in optimizer.parameters():
        fragments = optimizer.state[param].get("fragments")
        if not fragments or not param.numel():  # no state yet, or nothing that a rank would write
            continue
        group_id, param_id = optimizer.position_of(param)
        local = [
            (f.shard_param_range[0], optimizer.state["buckets"][f.bucket_id], f)
            for f in fragments
            if f.in_local_shard
        ]
        state[str(starts[group_id] + param_id)] = {
            key: FlatShards.of(
                param.numel(),
                value_dtype(optimizer),
                {begin: read(optimizer, bucket, f, key) for begin, bucket, f in local},
            )
            for key in KEYS
        }
    step = torch.tensor(int(optimizer.state["step"]))
    groups = local_states.pack_groups(optimizer)
    return {"state": state, "step": step, "param_groups": groups}


@torch.no_grad()
def take(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Take what ``torch.distributed.checkpoint.load`` has put into :func:`make`'s dict.

    Raises:
        ValueError: something is missing, or of another model. Nothing has changed, on no rank.
    """
    check_owner(optimizer, "load_sharded_state_dict")

    def check() -> tuple[Any, Callable[[], None]]:
        check_state(state_dict, _WHERE)
        local_states.check_groups(optimizer, state_dict["param_groups"])
        pieces, step = list(_pieces_of(optimizer, state_dict["state"])), state_dict.get("step")
        step = count_of(step, _WHERE)

        def write_all() -> None:
            for piece in pieces:
                write(optimizer, *piece)
            local_states.take_groups(optimizer, state_dict["param_groups"])
            local_states.set_step(optimizer, step)

        return step, write_all

    load_together(check, optimizer.process_group, optimizer.device, _WHERE)
    send_parameters(optimizer)


def _pieces_of(optimizer: Any, state: Any) -> Iterator[tuple[Any, Any, str, Tensor]]:
    """What each fragment of this rank is to hold: its bucket, itself, a key and the values."""
    starts = group_starts(optimizer)
    for bucket in optimizer.state["buckets"]:
        for fragment in bucket.local_fragments():
            index = str(starts[fragment.param_group_id] + fragment.param_id)
            begin, end = fragment.shard_param_range
            for key in KEYS:
                shards = state.get(index, {}).get(key)
                piece = getattr(shards, "pieces", {}).get(begin)
                if piece is None or piece.shape != (end - begin,):
                    raise ValueError(
                        f"{_WHERE}: state {index!r} has no {key} of elements {begin} to {end}. "
                        "Call sharded_state_dict() after all groups have been added, and have "
                        "torch.distributed.checkpoint.load fill what it returns."
                    )
                yield bucket, fragment, key, piece
