"""What pipelines are made of: build_model, the schedule of one stage, utilities."""

import contextlib
import itertools
import re
import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.transformer import microbatches, parallel_state
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import _timers, build_model, utils
from apex.transformer.pipeline_parallel.schedules import common, get_forward_backward_func
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_no_pipelining import (
    forward_backward_no_pipelining,
)
from apex_testkit.model_parallel import model_parallel
from apex_testkit.ranks import COLLECTIVE_TIMEOUT_S

SHAPE = 2, 1, 3


@pytest.fixture
def batches():
    """Four micro-batches of two samples."""
    utils.setup_microbatch_calculator(0, None, 8, 2, 1)
    yield
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


# build_model


class Provided(nn.Module):
    def __init__(self, hidden, **ends):
        super().__init__()
        self.ends = ends
        self.layer = nn.Linear(hidden, hidden)


def check_build(rank, world):
    keywords = {"virtual_pipeline_model_parallel_size": 2, "model_type": ModelType(1)}
    with model_parallel(1, 4, virtual_pipeline_model_parallel_size_=2):
        kwargs = {"hidden": 3}
        models = build_model(Provided, False, *keywords.values(), **kwargs)
        assert kwargs == {"hidden": 3}
        assert [model.ends for model in models] == [
            {"pre_process": rank == 0, "post_process": False},
            {"pre_process": False, "post_process": rank == 3},
        ]
        with pytest.raises(RuntimeError, match="cannot be interleaved"):
            build_model(Provided, False, 2, ModelType.encoder_and_decoder, 3)
    with model_parallel(1, 4, pipeline_model_parallel_split_rank_=2):
        (model,) = build_model(Provided, False, None, ModelType.encoder_and_decoder, 3)
        assert model.model_type is ModelType.encoder_and_decoder
        assert model.ends == {
            "pre_process": rank in {0, 2},
            "post_process": rank in {1, 3},
            "add_encoder": rank < 2,
            "add_decoder": rank >= 2,
        }
        assert (model.layer.weight.tensor_model_parallel, model.layer.bias.partition_dim) == (
            False,
            -1,
        )
    with model_parallel(1, 4), pytest.raises(RuntimeError, match="split_rank_"):
        build_model(Provided, False, None, ModelType.encoder_and_decoder, 3)


def check_wrapped(rank, world):
    with model_parallel(1, 2):
        (model,) = build_model(Provided, hidden=3)
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        assert model.process_group is parallel_state.get_data_parallel_group()
        for group in (model.process_group, parallel_state.get_pipeline_model_parallel_group()):
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(seconds=COLLECTIVE_TIMEOUT_S)  # the world's
        assert utils.unwrap_model([model])[0].ends["pre_process"] == (rank < 2)
        whole = utils.calc_params_l2_norm(model, bf16=False)
        squares = sum(p.double().square().sum() for p in model.parameters())
        squares = torch.as_tensor(float(squares))
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        assert whole == pytest.approx(squares.sqrt().item())
        losses = [torch.tensor(float(rank)), torch.tensor([2.0])]
        average = utils.average_losses_across_data_parallel_group(losses)
        assert average.tolist() == [rank // 2 * 2 + 0.5, 2.0]


@pytest.mark.parametrize("check", [check_build, check_wrapped])
def test_build_model(four_ranks, check):
    four_ranks(check)


@pytest.mark.usefixtures("alone")
def test_groups_of_weight_decay():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    decay, none = common._get_params_for_weight_decay_optimization(
        model, no_weight_decay_modules=(nn.LayerNorm,)
    )
    assert [id(p) for p in decay["params"]] == [id(model[0].weight)]
    assert none["weight_decay"] == 0.0
    assert {id(p) for p in none["params"]} == {
        id(p) for p in (model[0].bias, model[1].weight, model[1].bias)
    }
    decay, _ = common._get_params_for_weight_decay_optimization([model])
    assert len(decay["params"]) == 2  # torch's norm is none of Apex's
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    for parts in (tied, list(tied)):  # within a part, and over two chunks of the model
        decay, none = common._get_params_for_weight_decay_optimization(parts)
        assert [p is tied[0].weight for p in decay["params"]] == [True]
        assert [p is tied[0].bias for p in none["params"]] == [True]
    assert common._calc_number_of_params([model]) == 10


# The schedule of one stage


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.entered = []

    def set_input_tensor(self, tensors):
        assert tensors == [None]

    def forward(self, x):
        self.entered.append(len(SYNC))
        return x * self.weight

    def no_sync(self):
        return held_back()


SYNC = []


@contextlib.contextmanager
def held_back():
    SYNC.append(1)
    yield
    SYNC.pop()


def step(batch, model):
    (x,) = batch
    return model(x), lambda output: (output.sum(), output.detach().sum().item())


@pytest.mark.usefixtures("alone", "batches")
@pytest.mark.parametrize("handler", [None, contextlib.nullcontext])
@pytest.mark.parametrize("forward_only", [False, True])
def test_one_stage(handler, forward_only):
    model, x = One(), torch.arange(16.0).reshape(8, 2)
    run = get_forward_backward_func(None, 1)
    assert run is forward_backward_no_pipelining
    options = {"forward_only": forward_only, "custom_sync_context_handler": handler}
    losses = run(step, [x], [model], tensor_shape=SHAPE, **options)
    assert losses == [(part * model.weight).sum().item() for part in x.split(2)]
    assert model.entered == ([1, 1, 1, 0] if handler is None else [0, 0, 0, 0])
    if forward_only:
        assert model.weight.grad is None
    else:
        assert torch.equal(model.weight.grad, x.sum(0) / 4)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.usefixtures("alone", "batches")
def test_inside_of_wrappers():
    model = Wrapper(Wrapper(One()))
    losses = forward_backward_no_pipelining(step, [torch.ones(8, 2)], model, forward_only=False)
    assert losses == [6.0] * 4
    assert model.module.module.weight.grad.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("alone", "batches")
def test_refused():
    model = One()
    with pytest.raises(RuntimeError, match="model: expected one module"):
        forward_backward_no_pipelining(step, None, [model, model], forward_only=True)
    with pytest.raises(RuntimeError, match="multiple of the 3 stages, got 4"):
        get_forward_backward_func(2, 3)
    interleaved = get_forward_backward_func(2, 4)
    with pytest.raises(RuntimeError, match="model: expected a list"):
        interleaved(step, None, model, forward_only=True, tensor_shape=SHAPE)
    with pytest.raises(RuntimeError, match="must be more than 1"):
        interleaved(step, None, [model, model], forward_only=True, tensor_shape=SHAPE)
    pipelined = get_forward_backward_func(None, 2)
    for shape, error in ((None, RuntimeError), ((2, 3), ValueError)):
        with pytest.raises(error, match="tensor_shape:"):
            pipelined(step, None, model, forward_only=True, tensor_shape=shape)
    with pytest.raises(ValueError, match="micro-batch 3 of 2 samples ends at row 8, but"):
        forward_backward_no_pipelining(step, [torch.ones(7, 2)], model, forward_only=True)
    with pytest.raises(RuntimeError, match="of one element only"):
        common.custom_backward(torch.ones(2, requires_grad=True) * 2, None)


def test_frozen_part_and_freed_outputs():
    """A part without parameters to train passes no gradient on; views and inputs are not freed."""
    x = torch.ones(2, requires_grad=True)
    frozen = torch.ones(2)
    both = ModelType.encoder_or_decoder
    assert common.backward_step([x], [frozen], [torch.ones(2)], both) == [None]
    output, view = x * 3, (x * 2)[:1]
    common.free_output_tensor([output, view, x, None], True)
    assert [output.numel(), view.numel(), x.numel()] == [1, 1, 2]
    assert view._base.numel() == 2
    (grad,) = common.backward_step([x], [output], [torch.tensor([1.0, 2.0])], both)
    assert grad.tolist() == [3.0, 6.0]
    common.free_output_tensor(kept := x * 1)
    assert kept.numel() == 2


# microbatches, and the process's own


def test_constant():
    calculator = microbatches.build_num_microbatches_calculator(0, None, 24, 2, 3)
    assert isinstance(calculator, microbatches.ConstantNumMicroBatches)
    for consumed in (0, 10**9):
        calculator.update(consumed, True)
        assert (calculator.get(), calculator.get_current_global_batch_size()) == (4, 24)
    assert (calculator.micro_batch_size, calculator.num_micro_batches) == (2, 4)


@pytest.mark.parametrize("start", [8, 16, 32])
@pytest.mark.parametrize("samples", [0, 1, 100, 999])
def test_growing(start, samples):
    calculator = microbatches.build_num_microbatches_calculator(1, [start, 8, samples], 32, 2, 2)
    steps = (32 - start) // 8
    for consumed in (0, 1, 33, 34, 99, 100, 500, 998, 999, 10**6):
        calculator.update(consumed, True)
        grown = min(consumed / samples, 1) if samples else 1
        size = start + int(grown * steps + 1e-9) * 8
        assert calculator.get_current_global_batch_size() == size
        assert calculator.get() == size // 4
    assert (size, calculator.batch_size_increment) == (32, 8)


def test_growing_by_what_ranks_cannot_take():
    calculator = microbatches.RampupBatchsizeNumMicroBatches(4, 6, 100, 16, 4, 1)
    with pytest.raises(ValueError, match=r"expected a multiple of 4, .*; got 10"):
        calculator.update(50, True)
    assert calculator.get_current_global_batch_size() == 4  # nothing has changed
    calculator.update(50, False)
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (2, 10)


BAD = [
    ((0, None, 10, 3, 1), "global_batch_size: expected a multiple of 3"),
    ((0, None, 0, 1, 1), "global_batch_size: expected a multiple"),
    ((0, None, 8, 0, 1), "micro_batch_size and data_parallel_size: expected at least 1"),
    ((0, [1, 2], 8, 1, 1), "rampup_batch_size: expected .start size, increment, samples."),
    ((0, [4, 3, 9], 8, 1, 1), "batch_size_increment: expected a divisor of 4"),
    ((0, [9, 1, 9], 8, 1, 1), "global_batch_size: expected at least 9, got 8"),
    ((0, [1, 0, 9], 8, 1, 1), "batch_size_increment: expected at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        microbatches.build_num_microbatches_calculator(*arguments)


def test_calculator_of_the_process():
    with pytest.raises(RuntimeError, match="call setup_microbatch_calculator"):
        utils.get_num_microbatches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        utils._reconfigure_microbatch_calculator(0, [2, 2, 4], 4, 2, 1)
    try:
        assert (utils.get_num_microbatches(), utils.get_micro_batch_size()) == (1, 2)
        utils.update_num_microbatches(4)
        assert (utils.get_num_microbatches(), utils.get_current_global_batch_size()) == (2, 4)
        with pytest.raises(RuntimeError, match="is set up already"):
            utils.setup_microbatch_calculator(0, None, 4, 2, 1)
        with pytest.warns(UserWarning, match="is replaced"):
            utils._reconfigure_microbatch_calculator(0, None, 6, 2, 1)
        assert utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR.num_micro_batches == 3
        batch = [torch.arange(6), torch.arange(12).reshape(6, 2)]
        parts = list(utils._split_batch_into_microbatch(batch))
        for k in range(3):
            kth = utils.get_kth_microbatch(batch, k)
            for actual, part, x in zip(kth, parts[k], batch, strict=True):
                assert torch.equal(actual, x[2 * k : 2 * k + 2])
                assert torch.equal(part, actual)
        assert torch.equal(utils.get_kth_microbatch(batch[0], 1), torch.tensor([2, 3]))
        assert utils.get_kth_microbatch(None, 5) is None
    finally:
        utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


# utilities


def masks_by_hand(data, eod, reset_positions, reset_attention, mask_loss):
    """Token by token."""
    batch, length = data.shape
    rows = batch if reset_attention else 1
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    positions = torch.zeros(batch, length, dtype=torch.long)
    loss = torch.ones(batch, length)
    for b in range(batch):
        for q in range(length):
            begin = max([i + 1 for i in range(q) if data[b, i] == eod], default=0)
            positions[b, q] = q - begin if reset_positions else q
            if mask_loss and data[b, q] == eod:
                loss[b, q] = 0
            for k in range(length):
                hidden = k > q or (reset_attention and k < begin)
                mask[b % rows, 0, q, k] = hidden
    return mask, loss, positions


@pytest.mark.parametrize("options", list(itertools.product([False, True], repeat=3)))
def test_masks(options):
    for length in (1, 9):
        data = torch.randint(0, 4, (5, length))
        actual = utils.get_ltor_masks_and_position_ids(data, 0, *options)
        for a, expected in zip(actual, masks_by_hand(data, 0, *options), strict=True):
            assert a.dtype == expected.dtype
            assert torch.equal(a, expected)


@pytest.mark.usefixtures("alone")
def test_what_is_printed(capsys):
    timers = _timers._Timers()
    timers("a").start()
    timers("a").stop()
    seconds = timers("a").elapsed(reset=False)
    assert seconds > 0
    timers.log(["a"], normalizer=seconds * 1e3)
    assert capsys.readouterr().out == "time (ms) | a: 1.00\n"
    assert timers("a").elapsed() == 0
    with pytest.raises(RuntimeError, match="without start"):
        timers("a").stop()
    with pytest.raises(ValueError, match="normalizer"):
        timers.log(["a"], normalizer=0)
    utils.print_rank_0("first")
    utils.print_rank_last("last")
    utils.report_memory("here")
    out = capsys.readouterr().out
    assert re.fullmatch(r"first\nlast\n\[rank 0\] here memory \(MiB\) \| max resident: \S+\n", out)
    groups = [{"params": [nn.Parameter(torch.tensor([3.0, -4.0]))]}]
    optimizer = SimpleNamespace(param_groups=groups)
    utils.print_params_min_max_norm(optimizer, 7)
    assert capsys.readouterr().out.splitlines()[1] == (
        "7, 0, 1, 0, -4.000000E+00, 3.000000E+00, 5.000000E+00"
    )


def test_small_things():
    shared = nn.Parameter(torch.ones(1))
    assert utils.param_is_not_shared(shared)
    shared.shared = True
    assert not utils.param_is_not_shared(shared)
    assert utils.listify_model(One())[0].entered == []
    assert utils.get_model_type(nn.Linear(1, 1)) is ModelType.encoder_or_decoder
    with pytest.raises(RuntimeError, match="timers is not set up"):
        utils.get_timers()
    utils._set_timers()
    try:
        assert utils.get_timers()("x") is utils.get_timers()("x")
    finally:
        utils._GLOBAL_TIMERS = None
    assert utils.get_autoresume() is None
