"""A GPT whose layers are divided over tensor-parallel ranks and pipeline stages.

Every weight is initialised from a seed of its own, whole on each rank, which keeps its part. So a
model is the same, whichever way it is divided.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apex.transformer import AttnMaskType, parallel_state
from apex.transformer.functional import FusedScaleMaskSoftmax, fused_apply_rotary_pos_emb
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, in numbers of layers, features, heads and tokens."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    sequence_parallel: bool = False
    bfloat16: bool = False  # matrix products and scores, by autocast

    @property
    def per_head(self) -> int:
        return self.hidden // self.heads


class Initializer:
    """Normal weights, from a seed that says which layer they belong to."""

    def __init__(self, seed: int, deviation: float = 0.02) -> None:
        self.generator, self.deviation = torch.Generator().manual_seed(seed), deviation

    def __call__(self, weight: Tensor) -> Tensor:
        return weight.normal_(0, self.deviation, generator=self.generator)


def column(shape: Shape, outputs: int, init: Initializer, *, bias: bool = True) -> nn.Module:
    """Of the hidden features; every tensor-parallel rank has a part of the outputs."""
    return ColumnParallelLinear(
        shape.hidden,
        outputs,
        bias,
        gather_output=False,
        init_method=init,
        use_cpu_initialization=True,
        sequence_parallel_enabled=shape.sequence_parallel,
    )


def row(shape: Shape, inputs: int, init: Initializer) -> nn.Module:
    """To the hidden features; every tensor-parallel rank has a part of the inputs."""
    return RowParallelLinear(
        inputs,
        shape.hidden,
        input_is_parallel=True,
        init_method=init,
        use_cpu_initialization=True,
        sequence_parallel_enabled=shape.sequence_parallel,
    )


def norm(shape: Shape) -> nn.Module:
    return FusedLayerNorm(shape.hidden, sequence_parallel_enabled=shape.sequence_parallel)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; every rank has some of the heads."""

    def __init__(self, shape: Shape, init: Initializer) -> None:
        super().__init__()
        self.per_head = shape.per_head
        self.query_key_value = column(shape, 3 * shape.hidden, init)
        self.output = row(shape, shape.hidden, init)
        self.softmax = FusedScaleMaskSoftmax(
            input_in_fp16=False,
            input_in_bf16=shape.bfloat16,
            attn_mask_type=AttnMaskType.causal,
            scaled_masked_softmax_fusion=True,
            mask_func=lambda scores, mask: scores.masked_fill(mask, float("-inf")),
            softmax_in_fp32=True,
            scale=shape.per_head**-0.5,
        )
        frequencies = 10_000.0 ** -(torch.arange(0, self.per_head, 2) / self.per_head)
        angles = torch.arange(shape.sequence)[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=1)[:, None, None]
        mask = torch.ones(1, 1, shape.sequence, shape.sequence, dtype=torch.bool).triu(1)
        self.register_buffer("angles", angles, persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[sequence, batch, hidden]`` to the same (a part of the sequence, if it is divided)."""
        mixed, _ = self.query_key_value(x)
        sequence, batch = mixed.shape[:2]
        query, key, value = mixed.view(sequence, batch, -1, 3 * self.per_head).chunk(3, dim=-1)
        query = fused_apply_rotary_pos_emb(query, self.angles)
        key = fused_apply_rotary_pos_emb(key, self.angles)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        weights = self.softmax(query @ key.transpose(2, 3), self.mask)
        context = (weights @ value).permute(2, 0, 1, 3).reshape(sequence, batch, -1)
        return self.output(context)[0]


class Layer(nn.Module):
    """Attention, then a perceptron; each normalizes its input and is added to it."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        init = Initializer(seed)
        self.attention_norm, self.attention = norm(shape), Attention(shape, init)
        self.perceptron_norm = norm(shape)
        self.up = column(shape, 4 * shape.hidden, init)
        self.down = row(shape, 4 * shape.hidden, init)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden, _ = self.up(self.perceptron_norm(x))
        return x + self.down(nn.functional.gelu(hidden))[0]


class Stage(nn.Module):
    """The part of the GPT on this pipeline stage: some layers, and the ends if they are here."""

    def __init__(
        self, shape: Shape, seed: int, pre_process: bool = True, post_process: bool = True
    ) -> None:
        super().__init__()
        self.sequence_parallel = shape.sequence_parallel
        self.input_tensor: Tensor | None = None
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        here = shape.layers // stages
        first = parallel_state.get_pipeline_model_parallel_rank() * here
        seeds = range(1000 * (seed + 1), 1000 * (seed + 2))  # the ends', then the layers'
        self.embedding = self.norm = self.head = None
        if pre_process:
            self.embedding = VocabParallelEmbedding(
                VOCABULARY,
                shape.hidden,
                Initializer(seeds[0]),
                use_cpu_initialization=True,
            )
        self.layers = nn.ModuleList(
            Layer(shape, seeds[2 + number]) for number in range(first, first + here)
        )
        if post_process:
            self.norm = norm(shape)
            self.head = column(shape, VOCABULARY, Initializer(seeds[1]), bias=False)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take what the previous stage computed; None on the first stage."""
        (self.input_tensor,) = input_tensor

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, sequence]`` to hidden features, or logits on the last stage.

        Both are ``[sequence, batch, *]``; logits are those of this rank's part of the vocabulary.
        """
        if self.embedding is not None:
            x = self.embedding(tokens).transpose(0, 1).contiguous()
            if self.sequence_parallel:
                x = scatter_to_sequence_parallel_region(x)
        else:
            x = self.input_tensor
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))[0]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte of logits [sequence, batch, part of vocabulary], targets [batch, sequence]."""
    return vocab_parallel_cross_entropy(logits.float(), targets.transpose(0, 1)).mean()
