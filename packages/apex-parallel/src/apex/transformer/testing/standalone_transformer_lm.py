"""A transformer language model of Megatron's shape, from the layers of ``apex.transformer``.

Sizes and options are those of :func:`~apex.transformer.testing.global_vars.get_args`, and
``args.padded_vocab_size``, which a script sets.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import parallel_state
from ..enums import AttnMaskType, LayerType
from ..pipeline_parallel.utils import param_is_not_shared
from ..tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from ..tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from ..tensor_parallel.mappings import gather_from_sequence_parallel_region
from .global_vars import get_args
from .transformer_layers import (
    CoreAttention,
    Init,
    MegatronModule,
    NoopTransformerLayer,
    ParallelAttention,
    ParallelMLP,
    ParallelTransformer,
    ParallelTransformerLayer,
    attention_mask_func,
    bias_dropout_add,
    get_bias_dropout_add,
    get_num_layers,
    other_on_each_rank,
    refuse_cache,
    vocab_embedding,
)

__all__ = [
    "CoreAttention",
    "Embedding",
    "MegatronModule",
    "NoopTransformerLayer",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelTransformer",
    "ParallelTransformerLayer",
    "Pooler",
    "TransformerLanguageModel",
    "attention_mask_func",
    "bias_dropout_add",
    "get_bias_dropout_add",
    "get_language_model",
    "get_linear_layer",
    "get_num_layers",
    "init_method_normal",
    "module_size",
    "parallel_lm_logits",
    "param_is_not_shared",
    "post_language_model_processing",
    "scaled_init_method_normal",
]


def module_size(m: nn.Module, only_trainable: bool = False) -> int:
    """Number of elements of the parameters, each parameter counted once."""
    return sum(p.numel() for p in m.parameters() if p.requires_grad or not only_trainable)


def init_method_normal(sigma: float) -> Init:
    """Initialises from a normal distribution of standard deviation ``sigma``."""
    return functools.partial(nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Init:
    """The same with ``sigma / sqrt(2 num_layers)``, for layers that add to a residual."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def get_linear_layer(rows: int, columns: int, init_method: Init) -> nn.Linear:
    """A linear layer from ``rows`` to ``columns`` features, the same on all ranks; zero bias."""
    layer = nn.Linear(rows, columns)
    init_method(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def parallel_lm_logits(
    input_: Tensor,
    word_embeddings_weight: Tensor,
    parallel_output: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """``input_ @ word_embeddings_weight.T + bias``: ``[sequence, batch, vocabulary]``.

    With ``parallel_output`` each tensor-parallel rank keeps the logits of its part of the
    vocabulary.
    """
    args = get_args()
    is_divided = parallel_state.get_tensor_model_parallel_world_size() > 1
    gathers = args.sequence_parallel and is_divided
    is_async = is_divided and not (gathers or args.no_async_tensor_model_parallel_allreduce)
    if not (gathers or is_async):
        input_ = copy_to_tensor_model_parallel_region(input_)
    options = args.gradient_accumulation_fusion, is_async, gathers
    logits = linear_with_grad_accumulation_and_async_allreduce(
        input_, word_embeddings_weight, bias, *options
    )
    return logits if parallel_output else gather_from_tensor_model_parallel_region(logits)


def post_language_model_processing(
    lm_output: Tensor,
    labels: Tensor | None,
    logit_weights: Tensor,
    parallel_output: bool,
    fp16_lm_cross_entropy: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Logits ``[batch, sequence, vocabulary]``, or losses of ``labels`` ``[batch, sequence]``.

    Losses are computed in float32, or in float16 with ``fp16_lm_cross_entropy``. With labels the
    logits stay divided over the tensor-parallel ranks, whatever ``parallel_output`` says.
    """
    is_parallel = parallel_output or labels is not None
    logits = parallel_lm_logits(lm_output, logit_weights, is_parallel, bias)
    if labels is None:
        return logits.transpose(0, 1).contiguous()
    if not fp16_lm_cross_entropy:
        logits = logits.float()
    losses = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
    return losses.transpose(0, 1).contiguous()


class Pooler(MegatronModule):
    """The features of one token, through a linear layer and a tanh: ``[batch, hidden]``."""

    def __init__(self, hidden_size: int, init_method: Init) -> None:
        super().__init__()
        self.dense = get_linear_layer(hidden_size, hidden_size, init_method)
        self.sequence_parallel = get_args().sequence_parallel

    def forward(self, hidden_states: Tensor, sequence_index: int = 0) -> Tensor:
        if self.sequence_parallel:  # all ranks go on to do the same
            hidden_states = gather_from_sequence_parallel_region(hidden_states, False)
        return torch.tanh(self.dense(hidden_states[sequence_index]))


class Embedding(MegatronModule):
    """Embeddings of words, of positions and, if there are any, of kinds of tokens, added up.

    Args:
        hidden_size: features.
        vocab_size: of the whole vocabulary, divided over the tensor-parallel ranks.
        max_sequence_length: number of positions.
        embedding_dropout_prob: of the sum.
        init_method: of all weights.
        num_tokentypes: kinds of tokens.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        max_sequence_length: int,
        embedding_dropout_prob: float,
        init_method: Init,
        num_tokentypes: int = 0,
    ) -> None:
        super().__init__()
        args = get_args()
        self.init_method, self.hidden_size = init_method, hidden_size
        self.sequence_parallel = args.sequence_parallel
        self.residual_dtype = torch.float32 if args.fp32_residual_connection else None
        self.word_embeddings = vocab_embedding(init_method, vocab_size)
        self.position_embeddings = nn.Embedding(max_sequence_length, hidden_size)
        init_method(self.position_embeddings.weight)
        self.num_tokentypes, self.tokentype_embeddings = 0, None
        if num_tokentypes:
            self.add_tokentype_embeddings(num_tokentypes)
        self.embedding_dropout = nn.Dropout(embedding_dropout_prob)

    def zero_parameters(self) -> None:
        """Fill all weights with zeros."""
        for param in self.parameters():
            nn.init.zeros_(param)

    def add_tokentype_embeddings(self, num_tokentypes: int) -> None:
        """Begin to distinguish kinds of tokens; ``RuntimeError`` if it does so already."""
        if self.tokentype_embeddings is not None:
            raise RuntimeError("add_tokentype_embeddings: there are some already")
        self.num_tokentypes = num_tokentypes
        self.tokentype_embeddings = nn.Embedding(num_tokentypes, self.hidden_size)
        self.init_method(self.tokentype_embeddings.weight)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        """``[batch, sequence]`` ids to ``[sequence, batch, hidden]``, or a part of the sequence.

        Raises ``ValueError`` if there are ids of kinds of tokens and no embeddings, or vice versa.
        """
        if (tokentype_ids is None) != (self.tokentype_embeddings is None):
            expected = "none" if self.tokentype_embeddings is None else "some"
            raise ValueError(f"tokentype_ids: expected {expected}; see num_tokentypes")
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        if tokentype_ids is not None:
            x = x + self.tokentype_embeddings(tokentype_ids)
        x = x.transpose(0, 1).contiguous().to(self.residual_dtype or x.dtype)
        if self.sequence_parallel:
            x = scatter_to_sequence_parallel_region(x)
        with other_on_each_rank(self.sequence_parallel and self.training):
            return self.embedding_dropout(x)


class TransformerLanguageModel(MegatronModule):
    """Embedding, encoder, decoder and pooler, as far as this pipeline stage has them."""

    def __init__(
        self,
        init_method: Init,
        output_layer_init_method: Init,
        encoder_attn_mask_type: AttnMaskType,
        num_tokentypes: int = 0,
        add_encoder: bool = True,
        add_decoder: bool = False,
        decoder_attn_mask_type: AttnMaskType = AttnMaskType.causal,
        add_pooler: bool = False,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> None:
        super().__init__()
        args = get_args()
        self.pre_process, self.encoder_hidden_state = pre_process, None
        self.embedding = self.encoder = self.decoder = self.pooler = None
        if pre_process:
            sizes = args.hidden_size, args.padded_vocab_size, args.max_position_embeddings
            self.embedding = Embedding(*sizes, args.hidden_dropout, init_method, num_tokentypes)
        make = functools.partial(
            ParallelTransformer,
            init_method,
            output_layer_init_method,
            pre_process=pre_process,
            post_process=post_process,
        )
        if add_encoder:
            self.encoder = make(LayerType.encoder, encoder_attn_mask_type)
        if add_decoder:
            self.decoder = make(LayerType.decoder, decoder_attn_mask_type)
        if post_process and add_pooler:
            self.pooler = Pooler(args.hidden_size, init_method)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Take what the previous stage handed on; a decoder's stage also hands on the encoder's
        output, and the decoder's first stage takes that alone."""
        tensors = list(input_tensor) if isinstance(input_tensor, (list, tuple)) else [input_tensor]
        if self.encoder is not None:
            self.encoder.set_input_tensor(tensors[0])
        else:
            *own, self.encoder_hidden_state = tensors
            self.decoder.set_input_tensor(own[0] if own else None)

    def forward(
        self,
        enc_input_ids: Tensor | None,
        enc_position_ids: Tensor | None,
        enc_attn_mask: Tensor | None,
        dec_input_ids: Tensor | None = None,
        dec_position_ids: Tensor | None = None,
        dec_attn_mask: Tensor | None = None,
        enc_dec_attn_mask: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        inference_params: Any = None,
        pooling_sequence_index: int = 0,
        enc_hidden_states: Tensor | None = None,
        output_enc_hidden: bool = False,
    ) -> Any:
        """The last layer's output, in a tuple with what else there is of it.

        ``encoded``, or ``(encoded, pooled)`` with a pooler; with a decoder ``(decoded, encoded)``
        or ``(decoded, encoded, pooled)``, unless ``output_enc_hidden``. ``enc_hidden_states`` take
        the place of the encoder's output.
        """
        refuse_cache(inference_params)
        encoded = self.encoder_hidden_state if enc_hidden_states is None else enc_hidden_states
        if enc_hidden_states is None and self.encoder is not None:
            x = None
            if self.embedding is not None:
                x = self.embedding(enc_input_ids, enc_position_ids, tokentype_ids)
            encoded = self.encoder(x, enc_attn_mask)
        more = () if self.pooler is None else (self.pooler(encoded, pooling_sequence_index),)
        if self.decoder is None or output_enc_hidden:
            return (encoded, *more) if more else encoded
        x = None if self.embedding is None else self.embedding(dec_input_ids, dec_position_ids)
        decoded = self.decoder(x, dec_attn_mask, encoded, enc_dec_attn_mask)
        return decoded, encoded, *more


def get_language_model(
    num_tokentypes: int,
    add_pooler: bool,
    encoder_attn_mask_type: AttnMaskType,
    init_method: Init | None = None,
    scaled_init_method: Init | None = None,
    add_encoder: bool = True,
    add_decoder: bool = False,
    decoder_attn_mask_type: AttnMaskType = AttnMaskType.causal,
    pre_process: bool = True,
    post_process: bool = True,
) -> tuple[TransformerLanguageModel, str]:
    """The model, and its key in checkpoints; both inits follow ``args.init_method_std``."""
    args = get_args()
    model = TransformerLanguageModel(
        init_method or init_method_normal(args.init_method_std),
        scaled_init_method or scaled_init_method_normal(args.init_method_std, args.num_layers),
        encoder_attn_mask_type,
        num_tokentypes,
        add_encoder,
        add_decoder,
        decoder_attn_mask_type,
        add_pooler,
        pre_process,
        post_process,
    )
    return model, "language_model"
