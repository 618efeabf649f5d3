"""Which ranks form which group: tensor-parallel ranks are neighbours, pipeline stages lie apart."""

from __future__ import annotations

__all__ = ["GROUPS", "ranks_of_groups"]

# Every kind of group. The order is the one in which they are made, on all ranks the same.
GROUPS = (
    "data_parallel",
    "model_parallel",
    "tensor_model_parallel",
    "pipeline_model_parallel",
    "embedding",
    "position_embedding",
    "encoder_relative_position_embedding",
    "decoder_relative_position_embedding",
)
"""Names of the kinds of groups."""


def ranks_of_groups(
    world: int, tensor: int, pipeline: int, split: int | None = None
) -> dict[str, list[list[int]]]:
    """The global ranks of all groups of each kind, by the names in ``GROUPS``.

    Rank ``p * (data * tensor) + d * tensor + t`` is stage ``p`` of its pipeline, replica ``d`` and
    tensor-parallel rank ``t``. An example, 8 ranks with ``tensor=2`` and ``pipeline=2``::

        tensor_model_parallel    [0, 1] [2, 3] [4, 5] [6, 7]
        pipeline_model_parallel  [0, 4] [1, 5] [2, 6] [3, 7]
        data_parallel            [0, 2] [1, 3] [4, 6] [5, 7]
        model_parallel           [0, 1, 4, 5] [2, 3, 6, 7]

    Args:
        world: number of ranks, a multiple of ``tensor * pipeline``.
        split: the first stage of the decoder, or None. With 0 there is no encoder, and no group of
            its stages.
    """
    stage = world // pipeline  # ranks of one stage
    data = [
        list(range(first + t, first + stage, tensor))
        for first in range(0, world, stage)
        for t in range(tensor)
    ]
    pipelines = [list(range(first, world, stage)) for first in range(stage)]
    groups = {
        "data_parallel": data,
        "model_parallel": [list(ranks) for ranks in zip(*data, strict=True)],
        "tensor_model_parallel": [list(range(i, i + tensor)) for i in range(0, world, tensor)],
        "pipeline_model_parallel": pipelines,
    }
    if pipeline == 1:
        return groups | dict.fromkeys(GROUPS[4:], pipelines)
    ends = {0, 0 if split is None else split}
    stages = {
        "embedding": sorted({*ends, pipeline - 1}),
        "position_embedding": sorted(ends),
        "encoder_relative_position_embedding": range(1 if split is None else split),
        "decoder_relative_position_embedding": [0] if split is None else range(split, pipeline),
    }
    return groups | {
        name: [[ranks[stage] for stage in chosen] for ranks in pipelines if chosen]
        for name, chosen in stages.items()
    }
