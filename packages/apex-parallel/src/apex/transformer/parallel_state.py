"""Which process groups this rank belongs to, and where it stands in each of them.

``initialize_model_parallel`` makes the groups, the other functions read what it made, and
``destroy_model_parallel`` forgets it. Groups work with every backend of ``torch.distributed``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .rank_layout import GROUPS, ranks_of_groups

# Apex has no __all__ here either: every name without an underscore is public.


class ExperimentalWarning(Warning):
    """Warns of what is there to be tried, such as the backend UCC."""


@dataclass(frozen=True)
class State:
    """All that this module knows; a change makes a new one."""

    groups: dict[str, ProcessGroup] = field(default_factory=dict)  # this rank's, by GROUPS
    ranks: dict[str, list[int]] = field(default_factory=dict)  # global ranks of its row's groups
    virtual_size: int | None = None
    virtual_rank: int | None = None
    split_rank: int | None = None
    # Values that the setters put in place of those of the groups.
    tensor_size: int | None = None
    tensor_rank: int | None = None
    pipeline_size: int | None = None
    pipeline_rank: int | None = None


_state = State()  # replaced as a whole, so threads read one or the other


def _change(**values: object) -> None:
    global _state
    _state = dataclasses.replace(_state, **values)  # type: ignore[arg-type]


def initialize_model_parallel(
    tensor_model_parallel_size_: int = 1,
    pipeline_model_parallel_size_: int = 1,
    virtual_pipeline_model_parallel_size_: int | None = None,
    pipeline_model_parallel_split_rank_: int | None = None,
    *,
    default_backend: str | None = None,
    p2p_backend: str | None = None,
) -> None:
    """Divide all ranks into tensor-, pipeline- and data-parallel groups; all ranks call it.

    Rank ``p * (data * tensor) + d * tensor + t`` becomes stage ``p`` of a pipeline, replica ``d``
    and tensor-parallel rank ``t``, where ``data`` is what the two sizes leave of the world.

    Args:
        tensor_model_parallel_size_: ranks that share a layer.
        pipeline_model_parallel_size_: stages of a pipeline. A size above the number of ranks is
            reduced to it, with a warning.
        virtual_pipeline_model_parallel_size_: chunks of the model on every rank, for the
            interleaved schedule; it needs more than two stages.
        pipeline_model_parallel_split_rank_: the first stage of the decoder, for models with an
            encoder and a decoder. With 0 the whole pipeline belongs to the decoder.
        default_backend: backend of all groups but the pipeline's; by default the world's.
        p2p_backend: backend of the pipeline's groups; by default the world's.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, model parallelism is already, or the
            number of ranks is not divisible by the product of the sizes.
        ValueError: a size or the split rank is out of range, or torch lacks a backend.
        ImportError: UCC was asked for and torch has none.
    """
    if not dist.is_initialized():
        raise RuntimeError("initialize_model_parallel: first call dist.init_process_group")
    if _state.groups:
        raise RuntimeError(
            "initialize_model_parallel: model parallelism is initialised; "
            "call destroy_model_parallel first"
        )
    world = dist.get_world_size()
    tensor = _size("tensor_model_parallel_size_", tensor_model_parallel_size_, world)
    pipeline = _size("pipeline_model_parallel_size_", pipeline_model_parallel_size_, world)
    virtual, split = virtual_pipeline_model_parallel_size_, pipeline_model_parallel_split_rank_
    if world % (tensor * pipeline):
        raise RuntimeError(
            f"initialize_model_parallel: {world} ranks are not divisible by {tensor} "
            f"tensor-parallel ranks x {pipeline} pipeline stages"
        )
    if virtual is not None and pipeline_model_parallel_size_ <= 2:
        raise ValueError(
            "virtual_pipeline_model_parallel_size_: needs a pipeline of more than 2 stages, "
            f"got {pipeline_model_parallel_size_}"
        )
    if split is not None and pipeline > 1 and not 0 <= split < pipeline:
        raise ValueError(
            f"pipeline_model_parallel_split_rank_: expected 0 to {pipeline - 1}, a stage of the "
            f"pipeline, got {split}"
        )
    for name, backend in (("default_backend", default_backend), ("p2p_backend", p2p_backend)):
        _check_backend(name, backend)
    layout = ranks_of_groups(world, tensor, pipeline, split)
    backends = dict.fromkeys(GROUPS, default_backend) | {"pipeline_model_parallel": p2p_backend}
    groups, ranks = _make_groups(layout, backends)
    _change(
        groups=groups,
        ranks=ranks,
        virtual_size=virtual,
        virtual_rank=None if virtual is None else 0,
        split_rank=split,
    )


def _size(name: str, size: int, world: int) -> int:
    if size < 1:
        raise ValueError(f"{name}: expected at least 1, got {size}")
    if size > world:
        warnings.warn(f"{name}: {size} is reduced to {world}, the number of ranks", stacklevel=3)
    return min(size, world)


def _check_backend(name: str, backend: str | None) -> None:
    """Raise now: ranks that fail while they make groups cannot make any together afterwards."""
    if backend == "ucc":
        check_torch_ucc_availability()
        warnings.warn("The backend ucc is experimental", ExperimentalWarning, stacklevel=3)
    elif backend is not None:
        for part in backend.split(","):  # such as "cpu:gloo,cuda:nccl"
            if not dist.is_backend_available(part.rpartition(":")[2]):
                raise ValueError(f"{name}: this torch has no backend {part!r}, got {backend!r}")


def check_torch_ucc_availability() -> None:
    """Raise ``ImportError`` if neither torch nor the package ``torch_ucc`` has the backend UCC."""
    if dist.is_ucc_available():
        return
    try:
        import torch_ucc  # noqa: F401
    except ImportError as error:
        raise ImportError("this torch is built without UCC, and torch_ucc is missing") from error


def _make_groups(
    layout: dict[str, list[list[int]]], backends: dict[str, str | None]
) -> tuple[dict[str, ProcessGroup], dict[str, list[int]]]:
    """This rank's group of each kind, and the ranks of the groups that its pipeline has."""
    rank, timeout = dist.get_rank(), _timeout_of_world()
    groups: dict[str, ProcessGroup] = {}
    ranks = {}
    row = next(i for i, r in enumerate(layout["pipeline_model_parallel"]) if rank in r)
    for name, members in layout.items():
        if members is layout["pipeline_model_parallel"] and name != "pipeline_model_parallel":
            # A pipeline of one stage: all its groups are that rank alone.
            own = groups["pipeline_model_parallel"]
        elif not members:  # of an encoder that has no stage
            own = None
        else:
            own, _ = dist.new_subgroups_by_enumeration(
                members, timeout=timeout, backend=backends[name], group_desc=name
            )
        if own is not None:
            groups[name] = own
        mine = [r for r in members if rank in r]
        ranks[name] = mine[0] if mine else members[row] if members else []
    return groups, ranks


def _timeout_of_world() -> timedelta | None:
    """The default group's timeout, which new groups do not get by themselves."""
    backend = dist.group.WORLD._get_backend(dist.group.WORLD._device_types[0])
    options = getattr(backend, "options", None)
    return getattr(options, "_timeout", None)


def destroy_model_parallel() -> None:
    """Destroy the groups of this rank and forget everything, the setters' values too."""
    global _state
    groups, _state = _state.groups, State()
    for group in {id(group): group for group in groups.values()}.values():
        # Whoever destroyed the world before has destroyed these groups with it.
        with contextlib.suppress(ValueError, AssertionError):
            if dist.is_initialized():
                dist.destroy_process_group(group)


def model_parallel_is_initialized() -> bool:
    """Whether the tensor-, pipeline- and data-parallel groups are there."""
    return bool(_state.groups)


def is_uninitialized() -> bool:
    """Whether the data-parallel group is missing."""
    return not _state.groups


is_unitialized = is_uninitialized  # Apex's spelling


def get_rank_info() -> tuple[int, int, int, int | None]:
    """Ranks of this process: data, tensor, pipeline, virtual; zeros before initialisation."""
    if not model_parallel_is_initialized():
        return 0, 0, 0, 0
    return (
        get_data_parallel_rank(),
        get_tensor_model_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_virtual_pipeline_model_parallel_rank(),
    )


def _group(name: str) -> ProcessGroup:
    if name in _state.groups:
        return _state.groups[name]
    if _state.groups:
        raise RuntimeError(f"this rank is in no group {name}, whose ranks are {_ranks(name)}")
    raise RuntimeError(f"there is no group {name}: call initialize_model_parallel first")


def _ranks(name: str) -> list[int]:
    if not _state.ranks:
        raise RuntimeError(f"there is no group {name}: call initialize_model_parallel first")
    return _state.ranks[name]


def get_model_parallel_group() -> ProcessGroup:
    """The ranks that hold one replica of the model together."""
    return _group("model_parallel")


def get_tensor_model_parallel_group() -> ProcessGroup:
    """The ranks that share this rank's layers."""
    return _group("tensor_model_parallel")


def get_pipeline_model_parallel_group() -> ProcessGroup:
    """The ranks of this rank's pipeline, by stage."""
    return _group("pipeline_model_parallel")


def get_data_parallel_group() -> ProcessGroup:
    """The ranks that hold the same part of the model."""
    return _group("data_parallel")


def get_embedding_group() -> ProcessGroup:
    """First and last rank of the pipeline, and the decoder's first: they tie their embeddings."""
    return _group("embedding")


def get_position_embedding_group() -> ProcessGroup:
    """First rank of the pipeline, and the decoder's first."""
    return _group("position_embedding")


def get_encoder_relative_position_embedding_group() -> ProcessGroup:
    """The pipeline's ranks before the split; its first rank where there is no split.

    ``RuntimeError`` if the whole pipeline is behind the split.
    """
    return _group("encoder_relative_position_embedding")


def get_decoder_relative_position_embedding_group() -> ProcessGroup:
    """The pipeline's ranks from the split on; its first rank where there is no split."""
    return _group("decoder_relative_position_embedding")


def _is_member(name: str) -> bool:
    return dist.get_rank() in _ranks(name)


def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    """Whether this rank is in the embedding group.

    With a virtual pipeline the group's first (last) rank counts only while its first (last) chunk
    is at work, unless ``ignore_virtual``.
    """
    ranks, rank = _ranks("embedding"), dist.get_rank()
    if not ignore_virtual and rank == ranks[0]:
        return is_pipeline_first_stage()
    if not ignore_virtual and rank == ranks[-1]:
        return is_pipeline_last_stage()
    return rank in ranks


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank is in the position embedding group."""
    return _is_member("position_embedding")


def is_rank_in_encoder_relative_position_embedding_group() -> bool:
    """Whether this rank is in the encoder's relative position embedding group."""
    return _is_member("encoder_relative_position_embedding")


def is_rank_in_decoder_relative_position_embedding_group() -> bool:
    """Whether this rank is in the decoder's relative position embedding group."""
    return _is_member("decoder_relative_position_embedding")


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether stage ``rank`` (by default this one) belongs to the encoder; True without a split."""
    if get_pipeline_model_parallel_world_size() == 1 or _state.split_rank is None:
        return True
    return (get_pipeline_model_parallel_rank() if rank is None else rank) < _state.split_rank


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether stage ``rank`` (by default this one) belongs to the decoder; True without a split."""
    if get_pipeline_model_parallel_world_size() == 1 or _state.split_rank is None:
        return True
    return (get_pipeline_model_parallel_rank() if rank is None else rank) >= _state.split_rank


def is_pipeline_stage_at_split() -> bool:
    """Whether this stage is the encoder's last and the next one the decoder's first."""
    rank = get_pipeline_model_parallel_rank()
    return is_pipeline_stage_before_split(rank) and is_pipeline_stage_after_split(rank + 1)


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Let this stand for the tensor-parallel group's size; None takes that back."""
    _change(tensor_size=world_size)


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Let this stand for the pipeline's number of stages; None takes that back."""
    _change(pipeline_size=world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Let this stand for the rank in the tensor-parallel group; None takes that back."""
    _change(tensor_rank=rank)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Let this stand for the stage in the pipeline; None takes that back."""
    _change(pipeline_rank=rank)


def get_tensor_model_parallel_world_size() -> int:
    """Number of ranks that share this rank's layers."""
    if _state.tensor_size is not None:
        return _state.tensor_size
    return dist.get_world_size(get_tensor_model_parallel_group())


def get_pipeline_model_parallel_world_size() -> int:
    """Number of stages of the pipeline."""
    if _state.pipeline_size is not None:
        return _state.pipeline_size
    return dist.get_world_size(get_pipeline_model_parallel_group())


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    if _state.tensor_rank is not None:
        return _state.tensor_rank
    return dist.get_rank(get_tensor_model_parallel_group())


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage in the pipeline."""
    if _state.pipeline_rank is not None:
        return _state.pipeline_rank
    return dist.get_rank(get_pipeline_model_parallel_group())


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The decoder's first stage, or None."""
    return _state.split_rank


def set_pipeline_model_parallel_split_rank(
    pipeline_model_parallel_split_rank: int | None,
) -> None:
    """Change the decoder's first stage; groups stay as they are."""
    _change(split_rank=pipeline_model_parallel_split_rank)


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Whether this is the first stage and, unless ``ignore_virtual``, its first chunk."""
    if not ignore_virtual and _state.virtual_size is not None and _state.virtual_rank != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Whether this is the last stage and, unless ``ignore_virtual``, its last chunk."""
    virtual = _state.virtual_size
    if not ignore_virtual and virtual is not None and _state.virtual_rank != virtual - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk of the model that is at work, or None without a virtual pipeline."""
    return _state.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Say which chunk of the model is at work."""
    _change(virtual_rank=rank)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Number of chunks of the model on this rank, or None without a virtual pipeline."""
    return _state.virtual_size


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Change the number of chunks of the model on this rank."""
    _change(virtual_size=size)


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the tensor-parallel group."""
    return _ranks("tensor_model_parallel")[0]


def get_data_parallel_src_rank() -> int:
    """Global rank of the first rank of the data-parallel group."""
    return _ranks("data_parallel")[0]


def _stage(stage: int) -> int:
    ranks = _ranks("pipeline_model_parallel")
    return ranks[stage % get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the pipeline's first stage."""
    return _stage(0)


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the pipeline's last stage."""
    return _stage(-1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; after the last one comes the first."""
    return _stage(get_pipeline_model_parallel_rank() + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage; before the first one comes the last."""
    return _stage(get_pipeline_model_parallel_rank() - 1)


def get_data_parallel_world_size() -> int:
    """Number of replicas of the model."""
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """This rank's place in the data-parallel group."""
    return dist.get_rank(get_data_parallel_group())
