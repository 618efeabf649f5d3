"""parallel_state: groups against a plain enumeration, setters, errors that change nothing."""

import dataclasses
import itertools
import logging
import warnings

import pytest
import torch
import torch.distributed as dist

from apex.transformer import AttnMaskType, log_util, parallel_state, rank_layout, utils
from apex.transformer.enums import ModelType
from apex_testkit.model_parallel import model_parallel

SIZES = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]


def enumerated(world, tensor, pipeline, split):
    """Groups of a world, from the coordinates of every rank."""
    data = world // (tensor * pipeline)
    number = lambda p, d, t: p * data * tensor + d * tensor + t
    P, D, T = range(pipeline), range(data), range(tensor)
    pipelines = [[number(p, d, t) for p in P] for d in D for t in T]
    stages = {
        "embedding": {0, pipeline - 1} | ({split} if split else set()),
        "position_embedding": {0} | ({split} if split else set()),
        "encoder_relative_position_embedding": {0} if split is None else set(range(split)),
        "decoder_relative_position_embedding": {0} if split is None else set(P) - set(range(split)),
    }
    return {
        "tensor_model_parallel": [[number(p, d, t) for t in T] for p in P for d in D],
        "data_parallel": [[number(p, d, t) for d in D] for p in P for t in T],
        "pipeline_model_parallel": pipelines,
        "model_parallel": [[number(p, d, t) for p in P for t in T] for d in D],
        **{k: [[r[s] for s in sorted(v)] for r in pipelines if v] for k, v in stages.items()},
    }


@pytest.mark.parametrize("world", [1, 4, 6, 16, 24])
def test_layout(world):
    for tensor, pipeline in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 6)):
        for split in (None, 0, 1, 3):
            if world % (tensor * pipeline) or (split or 0) >= pipeline > 1:
                continue
            split = split if pipeline > 1 else None
            sizes = world, tensor, pipeline, split
            actual, expected = rank_layout.ranks_of_groups(*sizes), enumerated(*sizes)
            assert sorted(actual) == sorted(expected) == sorted(rank_layout.GROUPS)
            for name, groups in actual.items():
                assert sorted(groups) == sorted(expected[name]), (name, sizes)


def check_groups(rank, world, sizes, split):
    expected = enumerated(world, *sizes, split)
    with model_parallel(*sizes, pipeline_model_parallel_split_rank_=split):
        for name, groups in expected.items():
            mine = [ranks for ranks in groups if rank in ranks]
            getter = getattr(parallel_state, f"get_{name}_group")
            if mine:
                assert dist.get_process_group_ranks(getter()) == mine[0]
                total = torch.tensor([float(rank)])
                dist.all_reduce(total, group=getter())
                assert total.item() == sum(mine[0])
            else:
                with pytest.raises(RuntimeError, match="this rank is in no group"):
                    getter()
            if "embedding" in name:
                assert getattr(parallel_state, f"is_rank_in_{name}_group")() == bool(mine)
        check_numbers(rank, {n: [r for r in g if rank in r] for n, g in expected.items()})
    assert parallel_state.is_unitialized()


def check_numbers(rank, mine):
    """Sizes, ranks and neighbours follow from this rank's groups."""
    (data,), (tensor,) = mine["data_parallel"], mine["tensor_model_parallel"]
    (pipeline,) = mine["pipeline_model_parallel"]
    stage = pipeline.index(rank)
    state = parallel_state
    assert state.get_rank_info() == (data.index(rank), tensor.index(rank), stage, None)
    assert state.get_tensor_model_parallel_world_size() == len(tensor)
    assert state.get_data_parallel_world_size() == len(data)
    assert state.get_pipeline_model_parallel_world_size() == len(pipeline)
    assert state.get_tensor_model_parallel_src_rank() == tensor[0]
    assert state.get_data_parallel_src_rank() == data[0]
    assert state.get_pipeline_model_parallel_first_rank() == pipeline[0]
    assert state.get_pipeline_model_parallel_last_rank() == pipeline[-1]
    assert state.get_pipeline_model_parallel_next_rank() == (pipeline * 2)[stage + 1]
    assert state.get_pipeline_model_parallel_prev_rank() == pipeline[stage - 1]
    assert state.is_pipeline_first_stage() == (stage == 0)
    assert state.is_pipeline_last_stage() == (stage == len(pipeline) - 1)


def check_all_groups(rank, world):
    for sizes in SIZES:
        if world % (sizes[0] * sizes[1]) == 0:
            check_groups(rank, world, sizes, None)
    if world == 4:
        check_groups(rank, world, (1, 4), 2)
        check_groups(rank, world, (1, 4), 0)
        check_groups(rank, world, (2, 2), 0)


def test_groups(two_ranks, four_ranks):
    two_ranks(check_all_groups)
    four_ranks(check_all_groups)


def check_split_and_virtual(rank, world):
    state = parallel_state
    options = {"virtual_pipeline_model_parallel_size_": 3, "pipeline_model_parallel_split_rank_": 2}
    with model_parallel(1, 4, **options):
        assert state.get_rank_info() == (0, 0, rank, 0)
        assert state.is_pipeline_stage_before_split() == (rank < 2)
        assert state.is_pipeline_stage_after_split() == (rank >= 2)
        assert state.is_pipeline_stage_at_split() == (rank == 1)
        assert state.is_pipeline_stage_before_split(1)
        assert not state.is_pipeline_stage_before_split(2)
        for chunk in range(3):
            state.set_virtual_pipeline_model_parallel_rank(chunk)
            assert state.is_pipeline_first_stage() == (rank == 0 and chunk == 0)
            assert state.is_pipeline_last_stage() == (rank == 3 and chunk == 2)
            assert state.is_pipeline_first_stage(ignore_virtual=True) == (rank == 0)
            assert state.is_pipeline_last_stage(ignore_virtual=True) == (rank == 3)
            tied = {0: chunk == 0, 1: False, 2: True, 3: chunk == 2}[rank]
            assert state.is_rank_in_embedding_group() == tied
            assert state.is_rank_in_embedding_group(ignore_virtual=True) == (rank != 1)
        state.set_pipeline_model_parallel_split_rank(None)
        assert state.is_pipeline_stage_before_split()
        assert state.is_pipeline_stage_after_split()
    assert state.get_virtual_pipeline_model_parallel_world_size() is None


def check_decoder_only(rank, world):
    """The whole pipeline is behind the split, in every layout."""
    state = parallel_state
    for tensor in (1, 2, 4):
        pipeline = world // tensor
        with model_parallel(tensor, pipeline, pipeline_model_parallel_split_rank_=0):
            assert state.get_pipeline_model_parallel_split_rank() == 0
            assert state.is_pipeline_stage_after_split()
            assert state.is_pipeline_stage_before_split() == (pipeline == 1)
            assert state.is_pipeline_stage_at_split() == (pipeline == 1)
            assert not state.is_pipeline_stage_before_split(0) or pipeline == 1
            assert state.get_tensor_model_parallel_src_rank() == rank // tensor * tensor
            decoder = state.get_decoder_relative_position_embedding_group()
            assert dist.get_process_group_ranks(decoder) == list(
                range(rank % tensor, world, tensor)
            )
            assert state.is_rank_in_decoder_relative_position_embedding_group()
            if pipeline > 1:
                assert not state.is_rank_in_encoder_relative_position_embedding_group()
                with pytest.raises(RuntimeError, match="encoder_relative_position_embedding"):
                    state.get_encoder_relative_position_embedding_group()


def check_backends(rank, world):
    """A backend of its own for the pipeline; two worlds after each other; a destroyed world."""
    for _ in range(2):
        with model_parallel(2, 2, default_backend="gloo", p2p_backend="gloo"):
            group = parallel_state.get_pipeline_model_parallel_group()
            assert dist.get_backend(group) == "gloo"
        with pytest.raises(ValueError, match="not registered"):
            dist.get_rank(group)


def check_missing_backend(rank, world):
    """Refused before any group is made: afterwards ranks would wait for each other for ever."""
    for options in ({"default_backend": "nothing"}, {"p2p_backend": "cpu:gloo,cuda:nothing"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: this torch has no backend"):
            parallel_state.initialize_model_parallel(2, 2, **options)
        assert not parallel_state.model_parallel_is_initialized()
    known = set(dist.distributed_c10d._world.pg_map)
    with model_parallel(2, 2, default_backend="cpu:gloo"):
        assert len(dist.distributed_c10d._world.pg_map) > len(known)
    assert set(dist.distributed_c10d._world.pg_map) == known


def test_split_virtual_and_backends(four_ranks):
    four_ranks(check_split_and_virtual)
    four_ranks(check_decoder_only)
    four_ranks(check_backends)
    four_ranks(check_missing_backend)


def check_errors(rank, world):
    """A call that fails makes no group and changes nothing."""
    bad = [
        ((0, 1), ValueError, "tensor_model_parallel_size_: expected at least 1, got 0"),
        ((1, 2, 2), ValueError, "more than 2 stages"),
        ((1, 2, None, 2), ValueError, "split_rank_: expected 0 to 1, .* got 2"),
        ((1, 2, None, -1), ValueError, "split_rank_: expected 0 to 1, .* got -1"),
        ((3, 1), RuntimeError, "4 ranks are not divisible by 3 tensor-parallel ranks"),
    ]
    for arguments, error, text in bad[: 4 + (world == 4)]:
        with pytest.raises(error, match=text):
            parallel_state.initialize_model_parallel(*arguments)
        assert parallel_state._state == parallel_state.State()
    with pytest.raises(ImportError, match="UCC"):
        parallel_state.initialize_model_parallel(default_backend="ucc")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model_parallel(2 * world):
            assert parallel_state.get_tensor_model_parallel_world_size() == world
            with pytest.raises(RuntimeError, match="call destroy_model_parallel first"):
                parallel_state.initialize_model_parallel()
            assert parallel_state.get_tensor_model_parallel_world_size() == world
    assert f"{2 * world} is reduced to {world}" in str(caught[0].message)


def test_errors(two_ranks, four_ranks):
    two_ranks(check_errors)
    four_ranks(check_errors)


def test_before_initialisation():
    with pytest.raises(RuntimeError, match="init_process_group"):
        parallel_state.initialize_model_parallel()
    assert parallel_state.is_uninitialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert parallel_state.get_rank_info() == (0, 0, 0, 0)
    for name in rank_layout.GROUPS:
        with pytest.raises(RuntimeError, match="initialize_model_parallel first"):
            getattr(parallel_state, f"get_{name}_group")()
    for name in ("tensor_model_parallel_src", "pipeline_model_parallel_next"):
        with pytest.raises(RuntimeError, match="initialize_model_parallel first"):
            getattr(parallel_state, f"get_{name}_rank")()
    parallel_state.destroy_model_parallel()


def test_setters_take_the_place_of_groups(alone):
    names = [
        f"{kind}_model_parallel_{what}"
        for kind in ("tensor", "pipeline", "virtual_pipeline")
        for what in ("world_size", "rank")
    ]
    for value, name in enumerate(names, start=5):
        getattr(parallel_state, f"set_{name}")(value)
        assert getattr(parallel_state, f"get_{name}")() == value
    assert parallel_state.get_rank_info() == (0, 6, 8, 10)
    parallel_state.destroy_model_parallel()
    assert dataclasses.asdict(parallel_state._state) == dataclasses.asdict(parallel_state.State())


def test_destroyed_after_the_world():
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        assert parallel_state.is_uninitialized()


def check_flat_parts(rank, world):
    with model_parallel(2):
        x = torch.arange(24.0).view(2, 3, 4) + 100 * (rank // 2)
        part = utils.split_tensor_into_1d_equal_chunks(x)
        first = 12 * (rank % 2) + 100 * (rank // 2)
        assert torch.equal(part, torch.arange(first, first + 12.0))
        assert torch.equal(utils.gather_split_1d_tensor(part), x.flatten())
        part = utils.split_tensor_into_1d_equal_chunks(x.transpose(0, 2))
        assert torch.equal(utils.gather_split_1d_tensor(part), x.transpose(0, 2).flatten())
        with pytest.raises(ValueError, match="3 is not divisible by 2"):
            utils.split_tensor_into_1d_equal_chunks(x[0, :, 0])


def test_flat_parts(four_ranks):
    four_ranks(check_flat_parts)


def test_small_things():
    assert utils.divide(12, 4) == 3
    with pytest.raises(ValueError, match="10 is not divisible by 4"):
        utils.divide(10, 4)
    assert log_util.get_transformer_logger("some/file.py").name == "some/file"
    level = logging.getLogger("apex").level
    try:
        log_util.set_logging_level(logging.ERROR)
        assert log_util.get_transformer_logger("apex.transformer").getEffectiveLevel() == 40
    finally:
        logging.getLogger("apex").setLevel(level)
    assert [kind.value for kind in (*ModelType, *AttnMaskType)] == [1, 2, 1, 2]
