"""Sizes that the tensor-parallel ranks do not divide: place, argument and remedy are named."""

import re

import pytest
import torch

from apex.transformer import utils
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_pipelining_without_interleaving import (
    get_tensor_shapes,
)
from apex.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    mappings,
    random,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from apex.transformer.tensor_parallel import (
    utils as division,
)
from apex_testkit.model_parallel import model_parallel

CPU = {"use_cpu_initialization": True}


def refused(text, call, *given, **options):
    """The error begins with ``text`` and says what to do; nobody waits for another rank."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}") as error:
        call(*given, **options)
    assert re.search(r"\. (Make|Pad) .*(multiple|tensor_model_parallel_size_)", str(error.value))


def by(size, world):
    return (
        f"{size} is not divisible by {world} tensor-parallel ranks. Make it a multiple of {world},"
    )


def check_layers(rank, world):
    with model_parallel(world):
        odd = world + 1
        text = f" such as {2 * world}, or give another tensor_model_parallel_size_ to init"
        refused(
            f"ColumnParallelLinear: output_size: {by(odd, world)}{text}",
            *(ColumnParallelLinear, 4, odd),
            **CPU,
        )
        refused(
            f"RowParallelLinear: input_size: {by(odd, world)}", RowParallelLinear, odd, 4, **CPU
        )
        refused(
            f"VocabParallelEmbedding: num_embeddings: {by(odd, world)}",
            *(VocabParallelEmbedding, odd, 4),
            **CPU,
        )
        blocks = "stride: a rank's part of the weight: 3 is not divisible by 2 blocks. Make output"
        refused(blocks, ColumnParallelLinear, 4, 3 * world, stride=2, **CPU)
        refused(blocks, RowParallelLinear, 3 * world, 4, stride=2, **CPU)
        row = RowParallelLinear(4, 4, input_is_parallel=True, sequence_parallel_enabled=True, **CPU)
        x = torch.zeros(odd, 2, 4 // world)
        refused(f"RowParallelLinear: first dimension of input_: {by(odd, world)}", row, x)
        row = RowParallelLinear(4, 4, **CPU)
        name = "scatter_to_tensor_model_parallel_region: last dimension of input_"
        refused(f"{name}: {by(odd, world)}", row, torch.zeros(2, odd))


def check_functions(rank, world):
    with model_parallel(world):
        odd = world + 1
        x = torch.zeros(odd, odd)
        for name, which in (
            ("scatter_to_tensor_model_parallel_region", "last"),
            ("scatter_to_sequence_parallel_region", "first"),
            ("reduce_scatter_to_sequence_parallel_region", "first"),
        ):
            text = f"{name}: {which} dimension of input_: {by(odd, world)}"
            refused(text, getattr(mappings, name), x)
        name = "split_tensor_into_1d_equal_chunks: number of elements of tensor"
        refused(f"{name}: {by(odd**2, world)}", utils.split_tensor_into_1d_equal_chunks, x)
        refused(
            f"checkpoint: distribute_saved_activations: elements of the first argument: "
            f"{by(odd**2, world)}",
            *(checkpoint, torch.tanh, True, x.requires_grad_()),
        )
        refused(
            f"tensor_shape: with sequence_parallel_enabled, a sequence: {by(odd, world)}",
            *(get_tensor_shapes, 0, ModelType.encoder_or_decoder),
            tensor_shape=(odd, 2, 4),
            sequence_parallel_enabled=True,
        )
        assert scatter_to_sequence_parallel_region(torch.zeros(2 * world)).shape == (2,)


def check_vocabulary(rank, world):
    """Parts of different sizes: each rank would look for the targets among the wrong ids."""
    with model_parallel(world):
        part = 3 if rank < world - 1 else 2
        logits = torch.zeros(4, part, requires_grad=True)
        refused(
            "vocab_parallel_cross_entropy: vocab_parallel_logits: the last dimension differs "
            "between tensor-parallel ranks",
            *(vocab_parallel_cross_entropy, logits, torch.zeros(4, dtype=torch.int64)),
        )
        with pytest.raises(ValueError, match=f"here it is {part}, and 2 to 3 elsewhere"):
            vocab_parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.int64))


def test_on_ranks(two_ranks, four_ranks):
    for ranks in (two_ranks, four_ranks):
        ranks(check_layers)
        ranks(check_functions)
        ranks(check_vocabulary)


@pytest.mark.usefixtures("alone")
def test_other_divisors():
    """The number that does not divide is an argument itself."""
    x = torch.zeros(2, 5)
    refused(
        "split_tensor_along_last_dim: last dimension of tensor: 5 is not divisible by 2 partitions",
        *(division.split_tensor_along_last_dim, x, 2),
    )
    refused(
        "vocab_range_from_global_vocab_size: global_vocab_size: 42 is not divisible by 4 ranks",
        *(division.VocabUtility.vocab_range_from_global_vocab_size, 42, 3, 4),
    )
    buffer = random.init_checkpointed_activations_memory_buffer
    name = "init_checkpointed_activations_memory_buffer"
    refused(f"{name}: micro_batch_size * max_p", buffer, 1, 3, 5, 4, 2, 1, fp16=False)
    refused(f"{name}: num_layers: 5 is not divisible by 2 layers", buffer, 1, 4, 4, 5, 2, 2, False)
    assert random._checkpointed_activations is None
    assert utils.divide(6, 3, what="anything") == 2
    with pytest.raises(ValueError, match=r"^7 is not divisible by 3$"):
        utils.divide(7, 3)
