"""The three schedules against one process that runs the whole model, bit for bit."""

import contextlib
import itertools
from collections import Counter
from typing import ClassVar

import pytest
import torch
from torch import nn

from apex.transformer import parallel_state
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import get_forward_backward_func, utils
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_pipelining_without_interleaving import (
    get_tensor_shapes,
)
from apex_testkit.model_parallel import model_parallel

SEQUENCE, MICRO, HIDDEN = 6, 2, 5
SHAPE = SEQUENCE, MICRO, HIDDEN


class Part(nn.Module):
    """Part ``index`` of a model; the first one takes its input from the batch."""

    def __init__(self, index, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(index)
        self.is_first = index == 0
        self.layer = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.input = None

    def set_input_tensor(self, tensors):
        (self.input,) = tensors

    def forward(self, samples):
        x = samples.transpose(0, 1) if self.is_first else self.input
        return self.layer(x).tanh() + x  # tanh keeps its output for backward


@contextlib.contextmanager
def batches_of(microbatches, micro_batch_size=MICRO):
    """The global calculator, for one test."""
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    size = microbatches * micro_batch_size
    data = parallel_state.get_data_parallel_world_size()
    utils.setup_microbatch_calculator(1, None, size * data, micro_batch_size, data)
    try:
        yield
    finally:
        utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


def samples_of(microbatches, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = microbatches * MICRO
    return torch.randn(rows, SEQUENCE, HIDDEN, generator=generator, dtype=dtype)


def loss_of(output):
    loss = output.double().square().sum()
    return loss, {"loss": loss.detach()}


def forward_step(batch, model):
    (samples,) = batch
    return model(samples), loss_of


def alone(parts, samples, wire=torch.float32, autocast=None, scale=1.0, forward_only=False):
    """The whole model in this process; parts hand on tensors of dtype ``wire``."""
    losses = []
    number = len(samples) // MICRO
    for batch in samples.split(MICRO):
        x = None
        for part in parts:
            part.set_input_tensor([None if x is None else x.to(wire)])
            context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
            with context:
                x = part(batch)
        loss, reduced = loss_of(x)
        losses.append(reduced["loss"])
        if not forward_only:
            (loss / number * scale).backward()
    return losses


def check_same(rank, pp, chunks, mine, parts, losses, expected):
    """Losses on the last stage and gradients everywhere are those of the whole model."""
    if rank == pp - 1:
        assert [entry["loss"].item() for entry in losses] == [x.item() for x in expected]
    else:
        assert losses == []
    for chunk in range(chunks):
        whole = parts[chunk * pp + rank]
        for name, param in mine[chunk].named_parameters():
            other = whole.get_parameter(name)
            assert (param.grad is None) == (other.grad is None)
            assert param.grad is None or torch.equal(param.grad, other.grad), name


def run(models, samples, **options):
    chunks = len(models) if len(models) > 1 else None
    function = get_forward_backward_func(
        chunks, parallel_state.get_pipeline_model_parallel_world_size()
    )
    options = {"forward_only": False, "tensor_shape": SHAPE} | options
    return function(forward_step, [samples], models, **options)


@contextlib.contextmanager
def pipeline(pp, chunks):
    """Model parallelism; parallel_state wants no two interleaved stages, the schedule can do it."""
    with model_parallel(1, pp):
        if chunks > 1:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
            parallel_state.set_virtual_pipeline_model_parallel_rank(0)
        yield


def check_schedule(rank, world, chunks, microbatches, repeats):
    with pipeline(world, chunks), batches_of(microbatches):
        for options in repeats:
            parts = [Part(i) for i in range(world * chunks)]
            mine = [Part(c * world + rank) for c in range(chunks)]
            samples = samples_of(microbatches)
            forward_only = options.get("forward_only", False)
            expected = alone(parts, samples, forward_only=forward_only)
            losses = run(mine, samples, **options)
            check_same(rank, world, chunks, mine, parts, losses, expected)


SWITCHES = [
    {"async_comm": a, "deallocate_pipeline_outputs": d, "forward_only": f}
    for a, d, f in itertools.product([False, True], repeat=3)
]


@pytest.mark.parametrize(("chunks", "microbatches"), [(1, 1), (1, 2), (1, 5), (2, 2), (3, 4)])
def test_two_stages(two_ranks, chunks, microbatches):
    two_ranks(check_schedule, chunks=chunks, microbatches=microbatches, repeats=SWITCHES)


@pytest.mark.parametrize(("chunks", "microbatches"), [(1, 3), (1, 7), (2, 4), (2, 8), (3, 12)])
def test_four_stages(four_ranks, chunks, microbatches):
    four_ranks(check_schedule, chunks=chunks, microbatches=microbatches, repeats=SWITCHES)


class Scaler:
    def scale(self, loss):
        return loss * 1024


DTYPES = [torch.float64, torch.bfloat16, torch.float16]


def check_dtype(rank, world, chunks, dtype):
    """Half precision turns autocast on; casts between parts are those of the whole model."""
    is_half = dtype is not torch.float64
    weights = torch.float32 if is_half else dtype
    with pipeline(world, chunks), batches_of(4):
        for disabled, asynchronous in itertools.product([False, True], repeat=2):
            parts = [Part(i, weights) for i in range(world * chunks)]
            mine = [Part(c * world + rank, weights) for c in range(chunks)]
            for part in (*parts, *mine) if disabled else ():
                part.to(dtype)
            samples = samples_of(4, dtype if disabled else weights)
            autocast = dtype if is_half and not disabled else None
            expected = alone(parts, samples, dtype, autocast, scale=1024)
            losses = run(
                mine,
                samples,
                dtype=dtype,
                grad_scaler=Scaler(),
                disable_autocast=disabled,
                async_comm=asynchronous,
                deallocate_pipeline_outputs=True,
            )
            check_same(rank, world, chunks, mine, parts, losses, expected)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(two_ranks, chunks, dtype):
    two_ranks(check_dtype, chunks=chunks, dtype=dtype)


def check_sequence_parallel(rank, world):
    """Tensor-parallel ranks hold a part of the sequence each; the schedule divides the shape."""
    with model_parallel(2, 2), batches_of(3):
        share = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        parts, mine = [Part(0), Part(1)], [Part(stage)]
        samples = samples_of(3).chunk(2, dim=1)[share]
        expected = alone(parts, samples)
        losses = run(mine, samples, sequence_parallel_enabled=True)
        check_same(stage, 2, 1, mine, parts, losses, expected)
        shapes = get_tensor_shapes(
            0,
            ModelType.encoder_or_decoder,
            tensor_shape=SHAPE,
            sequence_parallel_enabled=True,
        )
        assert shapes == [(SEQUENCE // 2, MICRO, HIDDEN)]
        with pytest.raises(
            ValueError, match=r"tensor_shape: .* sequence: 7 is not divisible by 2 tensor"
        ):
            run(mine, samples, tensor_shape=(7, 2, 5), sequence_parallel_enabled=True)


def test_sequence_parallel(four_ranks):
    four_ranks(check_sequence_parallel)


DECODER = 4  # length of the decoder's sequence


class Half(nn.Module):
    """Part ``index`` of a model with an encoder and, from ``split`` on, a decoder."""

    model_type = ModelType.encoder_and_decoder

    def __init__(self, index, split):
        super().__init__()
        torch.manual_seed(index)
        self.index, self.split = index, split
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.crossing = nn.Linear(HIDDEN, HIDDEN) if index >= split else None
        self.inputs = None

    def set_input_tensor(self, tensors):
        self.inputs = tensors

    def forward(self, samples):
        x = samples.transpose(0, 1)
        if self.index > 0:
            x = self.inputs[0]
        if self.index == self.split:  # the decoder begins with its own samples
            x = samples.transpose(0, 1)[:DECODER] * 2
        x = self.layer(x).tanh()
        if self.crossing is not None and self.index % 2:  # some layers only pass the encoder's on
            x = x + self.crossing(self.inputs[-1]).mean(0, keepdim=True)
        return x


def check_encoder_decoder(rank, world, split, deallocates):
    with (
        model_parallel(1, world, pipeline_model_parallel_split_rank_=split),
        batches_of(5),
    ):
        samples = samples_of(5)
        whole = [Half(i, split) for i in range(world)]
        expected = []
        for batch in samples.split(MICRO):
            handed = [None]
            for part in whole:
                part.set_input_tensor(handed)
                output = part(batch)
                handed = [output, handed[-1]] if part.index >= split > 0 else [output]
            loss, reduced = loss_of(output)
            (loss / 5).backward()
            expected.append(reduced["loss"])
        mine = [Half(rank, split)]
        options = {"decoder_sequence_length": DECODER, "deallocate_pipeline_outputs": deallocates}
        losses = run(mine, samples, **options)
        if rank == world - 1:
            assert [entry["loss"].item() for entry in losses] == [x.item() for x in expected]
        for (name, param), other in zip(
            mine[0].named_parameters(), whole[rank].parameters(), strict=True
        ):
            if other.grad is None:
                assert param.grad is None
            else:
                assert torch.equal(param.grad, other.grad), name


@pytest.mark.parametrize("split", [0, 1, 2, 3])
def test_encoder_and_decoder(four_ranks, split):
    four_ranks(check_encoder_decoder, split=split, deallocates=split != 2)


def check_data_parallel(rank, world, chunks):
    """Torch's DDP on both stages: gradients are averages over replicas, reduced once."""
    with pipeline(2, chunks), batches_of(4):
        stage, replica = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
        grads = []
        for seed in range(2):
            parts = [Part(i) for i in range(2 * chunks)]
            alone(parts, samples_of(4, seed=seed))
            mine = [parts[c * 2 + stage] for c in range(chunks)]
            grads.append([p.grad for part in mine for p in part.parameters()])
        group = parallel_state.get_data_parallel_group()
        models = [
            nn.parallel.DistributedDataParallel(Part(c * 2 + stage), process_group=group)
            for c in range(chunks)
        ]
        for _ in range(2):  # a second step, after buckets have been rebuilt
            for model in models:
                model.zero_grad()
            run(models, samples_of(4, seed=replica))
            actual = [p.grad for model in models for p in model.parameters()]
            for a, first, second in zip(actual, *grads, strict=True):
                assert torch.equal(a, (first + second) / 2)


@pytest.mark.parametrize("chunks", [1, 2])
def test_data_parallel(four_ranks, chunks):
    four_ranks(check_data_parallel, chunks=chunks)


class Kept:
    """A tensor that autograd keeps for the backward of one forward, whose number is ``forward``."""

    forward = 0
    alive: ClassVar = Counter()  # forward -> tensors
    most = 0  # forwards with any, at the same time

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # a graph that keeps its own output would be a cycle
        self.of = Kept.forward
        Kept.alive[self.of] += 1
        Kept.most = max(Kept.most, len(Kept.alive))

    def __del__(self):
        Kept.alive[self.of] -= 1
        if not Kept.alive[self.of]:
            del Kept.alive[self.of]


def check_memory(rank, world, chunks):
    """Activations of as many micro-batches live as the schedule says; outputs sent are freed."""
    outputs = []

    def step(batch, model):
        Kept.forward = len(outputs)
        output, _ = forward_step(batch, model)
        outputs.append(output)
        return output, lambda output: (output.sum(), None)

    hooks = torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor)
    with pipeline(world, chunks), batches_of(8), hooks:
        Kept.most = 0
        mine = [Part(c * world + rank) for c in range(chunks)]
        function = get_forward_backward_func(chunks if chunks > 1 else None, world)
        options = {"tensor_shape": SHAPE, "deallocate_pipeline_outputs": True}
        function(step, [samples_of(8)], mine, forward_only=False, **options)
        expected = world - rank if chunks == 1 else 2 * (world - rank - 1) + world + 1
        assert (Kept.most, len(Kept.alive)) == (expected, 0)
        freed = sum(output.numel() == 1 for output in outputs)
        assert freed == 8 * chunks - (8 if rank == world - 1 else 0)


@pytest.mark.parametrize("chunks", [1, 2])
def test_memory(four_ranks, chunks):
    four_ranks(check_memory, chunks=chunks)
