"""The layers of :mod:`.standalone_transformer_lm`, which are also found there.

Activations are ``[sequence, batch, hidden]``. With ``args.sequence_parallel`` each tensor-parallel
rank has a part of the sequence between the layers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ..._lost_ranks import explained
from .. import parallel_state
from ..enums import AttnMaskType, AttnType, LayerType, ModelType
from ..functional import FusedScaleMaskSoftmax
from ..layers import FusedLayerNorm
from ..tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    get_cuda_rng_tracker,
)
from ..utils import divide, tensor_rank_share
from .global_vars import get_args

Init = Callable[[Tensor], Any]


class MegatronModule(nn.Module):
    """A module whose last pipeline stage may have a copy of the first stage's word embeddings.

    The two copies have different gradients: add them over
    ``parallel_state.get_embedding_group()`` after each backward.
    """

    def __init__(self, share_word_embeddings: bool = True) -> None:
        super().__init__()
        self.share_word_embeddings = share_word_embeddings

    def word_embeddings_weight(self) -> Tensor:
        """The word embeddings of this stage: the model's own, or the copy."""
        if self.pre_process:
            return self.language_model.embedding.word_embeddings.weight
        if not self.share_word_embeddings:
            raise RuntimeError("word_embeddings_weight: this stage has none, and shares none")
        return self.word_embeddings.weight

    def initialize_word_embeddings(self, init_method_normal: Callable[[float], Init]) -> None:
        """Make the last stage's copy; first and last stage of the pipeline call it together.

        The values come from the first stage, so ``init_method_normal`` is not called.
        """
        if not self.share_word_embeddings:
            raise RuntimeError("initialize_word_embeddings: the model shares no embeddings")
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        if parallel_state.is_pipeline_last_stage() and not self.pre_process:
            self.word_embeddings = vocab_embedding(nn.init.zeros_)
            self.word_embeddings.weight.shared = True
        if self.pre_process:
            embedding = self.language_model.embedding
            if not parallel_state.is_pipeline_first_stage():  # a decoder's first stage
                embedding.zero_parameters()
            positions = embedding.position_embeddings.weight
            group = parallel_state.get_position_embedding_group()
            with explained("initialize_word_embeddings", group):
                dist.all_reduce(positions.data, group=group)
        if parallel_state.is_rank_in_embedding_group():
            weight = self.word_embeddings_weight()
            group = parallel_state.get_embedding_group()
            with explained("initialize_word_embeddings", group):
                dist.all_reduce(weight.data, group=group)


def vocab_embedding(init_method: Init, size: int | None = None) -> VocabParallelEmbedding:
    args = get_args()
    return VocabParallelEmbedding(
        args.padded_vocab_size if size is None else size,
        args.hidden_size,
        init_method,
        params_dtype=args.params_dtype,
        use_cpu_initialization=args.use_cpu_initialization,
    )


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """The scores, with -10000 where the mask is True."""
    return attention_scores.masked_fill(attention_mask, -10000.0)


def _norm() -> FusedLayerNorm:
    args = get_args()
    sizes = args.hidden_size, args.layernorm_epsilon
    return FusedLayerNorm(*sizes, sequence_parallel_enabled=args.sequence_parallel)


def _column(inputs: int, outputs: int, init_method: Init, *, bias_added: bool = True) -> nn.Module:
    args = get_args()
    return ColumnParallelLinear(
        inputs,
        outputs,
        gather_output=False,
        init_method=init_method,
        skip_bias_add=not bias_added,
        no_async_tensor_model_parallel_allreduce=args.no_async_tensor_model_parallel_allreduce,
        **_linear_options(args),
    )


def _row(inputs: int, outputs: int, init_method: Init) -> nn.Module:
    options = _linear_options(get_args())
    return RowParallelLinear(
        inputs,
        outputs,
        input_is_parallel=True,
        init_method=init_method,
        skip_bias_add=True,
        **options,
    )


def _linear_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "params_dtype": args.params_dtype,
        "use_cpu_initialization": args.use_cpu_initialization,
        "gradient_accumulation_fusion": args.gradient_accumulation_fusion,
        "sequence_parallel_enabled": args.sequence_parallel,
    }


def other_on_each_rank(wanted: bool) -> contextlib.AbstractContextManager:
    """Where random numbers differ between tensor-parallel ranks, whose tensors are parts."""
    return get_cuda_rng_tracker().fork() if wanted else contextlib.nullcontext()


class ParallelMLP(MegatronModule):
    """Two linear layers with a GELU between; returns the output, and the bias to be added."""

    def __init__(self, init_method: Init, output_layer_init_method: Init) -> None:
        super().__init__()
        args = get_args()
        self.approximate = "tanh" if args.openai_gelu else "none"
        sizes = args.hidden_size, args.ffn_hidden_size
        self.dense_h_to_4h = _column(*sizes, init_method, bias_added=False)
        self.dense_4h_to_h = _row(*sizes[::-1], output_layer_init_method)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden, bias = self.dense_h_to_4h(hidden_states)
        return self.dense_4h_to_h(F.gelu(hidden + bias, approximate=self.approximate))


class CoreAttention(MegatronModule):
    """Attention of this rank's heads: scores, mask, softmax, dropout, weighted sum of values."""

    def __init__(
        self, layer_number: int, attn_mask_type: AttnMaskType = AttnMaskType.padding
    ) -> None:
        super().__init__()
        args = get_args()
        self.attn_mask_type = attn_mask_type
        self.sequence_parallel = args.sequence_parallel
        # float16 scores of late layers overflow without it; the softmax multiplies it back.
        coefficient = max(1, layer_number) if args.apply_query_key_layer_scaling else None
        self.scale = 1.0 / (math.sqrt(args.kv_channels) * (coefficient or 1))
        self.scale_mask_softmax = FusedScaleMaskSoftmax(
            args.fp16,
            args.bf16,
            attn_mask_type,
            args.masked_softmax_fusion,
            attention_mask_func,
            args.attention_softmax_in_fp32 or coefficient is not None,
            coefficient,
        )
        self.attention_dropout = nn.Dropout(args.attention_dropout)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """``[sequence, batch, heads, channels]`` each, to ``[sequence, batch, heads * channels]``.

        A causal layer makes its mask if it gets none.
        """
        query, key, value = (
            t.transpose(0, 1).transpose(1, 2) for t in (query_layer, key_layer, value_layer)
        )
        scores = (query * self.scale) @ key.transpose(2, 3)
        if attention_mask is None and self.attn_mask_type is AttnMaskType.causal:
            shape = 1, 1, *scores.shape[2:]
            attention_mask = torch.ones(shape, dtype=torch.bool, device=scores.device).triu(1)
        weights = self.scale_mask_softmax(scores, attention_mask)
        is_drawn = self.training and self.attention_dropout.p > 0
        with other_on_each_rank(is_drawn and not self.sequence_parallel):
            weights = self.attention_dropout(weights)
        return (weights @ value).permute(2, 0, 1, 3).flatten(2)


class ParallelAttention(MegatronModule):
    """Self- or cross-attention, with the heads divided over the tensor-parallel ranks.

    Returns the output, and the bias to be added.
    """

    def __init__(
        self,
        init_method: Init,
        output_layer_init_method: Init,
        layer_number: int,
        attention_type: AttnType = AttnType.self_attn,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
    ) -> None:
        super().__init__()
        args = get_args()
        self.attention_type = attention_type
        self.per_head, self.recomputes = args.kv_channels, args.recompute_granularity == "selective"
        tensor_rank_share("ParallelAttention: num_attention_heads", args.num_attention_heads)
        hidden, projection = args.hidden_size, args.kv_channels * args.num_attention_heads
        if attention_type is AttnType.self_attn:
            self.query_key_value = _column(hidden, 3 * projection, init_method)
        else:
            self.query = _column(hidden, projection, init_method)
            self.key_value = _column(hidden, 2 * projection, init_method)
        self.core_attention = CoreAttention(layer_number, attn_mask_type)
        self.dense = _row(projection, hidden, output_layer_init_method)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_output: Tensor | None = None,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor]:
        refuse_cache(inference_params)
        if self.attention_type is AttnType.self_attn:
            query, key, value = self._heads(self.query_key_value, hidden_states, 3)
        else:
            (query,) = self._heads(self.query, hidden_states, 1)
            key, value = self._heads(self.key_value, encoder_output, 2)
        given = query, key, value, attention_mask
        if self.recomputes and self.training:
            context = checkpoint(self.core_attention, False, *given)
        else:
            context = self.core_attention(*given)
        return self.dense(context)

    def _heads(self, layer: nn.Module, x: Tensor | None, number: int) -> tuple[Tensor, ...]:
        mixed, _ = layer(x)
        return mixed.unflatten(2, (-1, number * self.per_head)).chunk(number, dim=-1)


def refuse_cache(inference_params: Any) -> None:
    if inference_params is not None:
        raise NotImplementedError("inference_params: these models keep no keys and values")


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool
) -> Tensor:
    """``residual + dropout(x + bias)``."""
    return residual + F.dropout(x if bias is None else x + bias, prob, training)


def get_bias_dropout_add(training: bool) -> Callable[..., Tensor]:
    """:func:`bias_dropout_add` without its last argument."""
    return functools.partial(bias_dropout_add, training=training)


class ParallelTransformerLayer(MegatronModule):
    """Attention and a perceptron, each behind a norm and added to its input.

    A decoder's layer attends to the encoder's output in between. ``drop_path_rate`` is the
    probability that a sample passes a part of the layer by.
    """

    def __init__(
        self,
        init_method: Init,
        output_layer_init_method: Init,
        layer_number: int,
        layer_type: LayerType = LayerType.encoder,
        self_attn_mask_type: AttnMaskType = AttnMaskType.padding,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        args = get_args()
        self.layer_number, self.layer_type = layer_number, layer_type
        self.residual_after_norm = args.apply_residual_connection_post_layernorm
        self.hidden_dropout, self.drop_path_rate = args.hidden_dropout, drop_path_rate
        inits = init_method, output_layer_init_method
        self.input_layernorm = _norm()
        self.self_attention = ParallelAttention(
            *inits, layer_number, AttnType.self_attn, self_attn_mask_type
        )
        self.post_attention_layernorm = _norm()
        if layer_type is LayerType.decoder:
            self.inter_attention = ParallelAttention(*inits, layer_number, AttnType.cross_attn)
            self.post_inter_attention_layernorm = _norm()
        self.mlp = ParallelMLP(*inits)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        refuse_cache(inference_params)
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attention(normed, attention_mask)
        x = self._add(attended, normed if self.residual_after_norm else hidden_states)
        normed = self.post_attention_layernorm(x)
        if self.layer_type is LayerType.decoder:
            attended = self.inter_attention(normed, enc_dec_attn_mask, encoder_output)
            x = self._add(attended, normed if self.residual_after_norm else x)
            normed = self.post_inter_attention_layernorm(x)
        return self._add(self.mlp(normed), normed if self.residual_after_norm else x)

    def _add(self, output_and_bias: tuple[Tensor, Tensor], residual: Tensor) -> Tensor:
        rate = self.drop_path_rate if self.training else 0.0
        if not rate:
            bias_dropout_add = get_bias_dropout_add(self.training)
            return bias_dropout_add(*output_and_bias, residual, self.hidden_dropout)
        output, bias = output_and_bias
        stays = torch.rand(1, output.shape[1], 1, device=output.device) >= rate
        output = F.dropout(output + bias, self.hidden_dropout, self.training)
        return residual + output * stays / (1.0 - rate)


class NoopTransformerLayer(MegatronModule):
    """In place of the layers of a stage that has none."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """A copy of ``hidden_states``."""
        return hidden_states.clone()


def get_num_layers(args: argparse.Namespace, is_encoder_and_decoder_model: bool) -> int:
    """Number of layers on this pipeline stage, all of its chunks together.

    Raises ``ValueError`` if the layers cannot be divided over the stages.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages == 1:
        return args.num_layers
    holds_embedding_only = args.standalone_embedding_stage and (
        parallel_state.get_pipeline_model_parallel_rank() == 0
    )
    if is_encoder_and_decoder_model:
        split = parallel_state.get_pipeline_model_parallel_split_rank()
        if split is None:
            raise RuntimeError("a model with encoder and decoder needs a split rank")
        if not parallel_state.is_pipeline_stage_before_split():
            return divide(args.num_layers, stages - split, what="num_layers", by="decoder stages")
        stages = split
    if holds_embedding_only:
        return 0
    stages -= args.standalone_embedding_stage
    return divide(args.num_layers, stages, what="num_layers", by="pipeline stages with layers")


def _layer_numbers(is_encoder_and_decoder: bool) -> range:
    """Which of the model's (or the encoder's, or the decoder's) layers this chunk has."""
    args = get_args()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    number = get_num_layers(args, is_encoder_and_decoder)
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if chunks is not None:
        chunk = parallel_state.get_virtual_pipeline_model_parallel_rank()
        number = divide(number, chunks, what="num_layers: a stage's layers", by="chunks")
        first = chunk * (args.num_layers // chunks) + rank * number
        return range(first, first + number)
    split = parallel_state.get_pipeline_model_parallel_split_rank()
    if is_encoder_and_decoder and not parallel_state.is_pipeline_stage_before_split():
        rank -= split
    elif args.standalone_embedding_stage:
        rank = max(rank - 1, 0)
    return range(rank * number, (rank + 1) * number)


class ParallelTransformer(MegatronModule):
    """The layers of this pipeline stage, and the last norm if this is the last stage."""

    def __init__(
        self,
        init_method: Init,
        output_layer_init_method: Init,
        layer_type: LayerType = LayerType.encoder,
        self_attn_mask_type: AttnMaskType = AttnMaskType.padding,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        args = get_args()
        self.pre_process, self.input_tensor = pre_process, None
        self.sequence_parallel = args.sequence_parallel
        self.recompute_method = args.recompute_method or "uniform"
        self.recompute_num_layers = args.recompute_num_layers
        self.distributes = args.distribute_saved_activations
        self.recomputes = args.recompute_granularity == "full"
        both = getattr(args, "model_type", None) is ModelType.encoder_and_decoder
        numbers = _layer_numbers(both)
        rates = torch.linspace(0, drop_path_rate, args.num_layers).tolist()
        inits = init_method, output_layer_init_method
        self.layers = nn.ModuleList(
            ParallelTransformerLayer(*inits, n + 1, layer_type, self_attn_mask_type, rates[n])
            for n in numbers
        )
        self.num_layers = len(numbers)
        if not self.layers:
            self.layers.append(NoopTransformerLayer(1))
        self.final_layernorm = _norm() if post_process and post_layer_norm else None

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Take what the previous stage computed."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """``[sequence, batch, hidden]`` (or a part of the sequence) to the same.

        Only the first stage looks at ``hidden_states``.
        """
        refuse_cache(inference_params)
        x = hidden_states if self.pre_process else self.input_tensor
        others = attention_mask, encoder_output, enc_dec_attn_mask
        with other_on_each_rank(self.sequence_parallel and self.training):
            x = self._through_layers(x, others)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def _through_layers(self, x: Tensor, others: tuple[Tensor | None, ...]) -> Tensor:
        """With full recomputation, in groups of layers ("uniform"), or the first ones ("block")."""
        whole, size = len(self.layers), self.recompute_num_layers
        if not (self.recomputes and self.training):
            return self._through(0, whole)(x, *others)
        is_uniform = self.recompute_method == "uniform"
        for first in range(0, whole, size if is_uniform else 1):
            group = self._through(first, min(first + size, whole) if is_uniform else first + 1)
            if is_uniform or first < size:
                x = checkpoint(group, self.distributes, x, *others)
            else:
                x = group(x, *others)
        return x

    def _through(self, first: int, last: int) -> Callable[..., Tensor]:
        def run(x: Tensor, *others: Tensor | None) -> Tensor:
            for layer in self.layers[first:last]:
                x = layer(x, *others)
            return x

        return run
