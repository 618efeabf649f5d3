"""A BERT of Megatron's interface: masked words, and whether one sentence follows another."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..enums import AttnMaskType
from ..layers import FusedLayerNorm
from ..tensor_parallel import set_tensor_model_parallel_attributes
from .global_vars import get_args
from .standalone_transformer_lm import (
    Init,
    MegatronModule,
    get_language_model,
    get_linear_layer,
    init_method_normal,
    parallel_lm_logits,
    scaled_init_method_normal,
)
from .standalone_transformer_lm import post_language_model_processing as _logits_or_losses

__all__ = [
    "BertLMHead",
    "BertModel",
    "bert_extended_attention_mask",
    "bert_model_provider",
    "bert_position_ids",
    "post_language_model_processing",
]


def bert_extended_attention_mask(attention_mask: Tensor) -> Tensor:
    """``[batch, sequence]``, 1 for words and 0 for padding, to bool ``[batch, 1, sequence,
    sequence]``, True where a query or a key is padding."""
    is_word = attention_mask > 0.5
    return ~(is_word[:, None, :, None] & is_word[:, None, None, :])


def bert_position_ids(token_ids: Tensor) -> Tensor:
    """Positions 0, 1, ... of ``[batch, sequence]`` tokens, of that shape."""
    return torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)


class BertLMHead(MegatronModule):
    """Features to logits: linear layer, GELU, norm, and the transposed word embeddings.

    Args:
        mpu_vocab_size: this tensor-parallel rank's part of the vocabulary, which has a bias.
        hidden_size: features.
        init_method: of the linear layer.
        layernorm_epsilon: of the norm.
        parallel_output: each tensor-parallel rank keeps the logits of its part.
    """

    def __init__(
        self,
        mpu_vocab_size: int,
        hidden_size: int,
        init_method: Init,
        layernorm_epsilon: float,
        parallel_output: bool,
    ) -> None:
        super().__init__()
        args = get_args()
        self.parallel_output = parallel_output
        self.bias = nn.Parameter(torch.zeros(mpu_vocab_size))
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)
        self.dense = get_linear_layer(hidden_size, hidden_size, init_method)
        for param in self.dense.parameters():
            param.sequence_parallel_enabled = args.sequence_parallel
        self.layernorm = FusedLayerNorm(
            hidden_size, layernorm_epsilon, sequence_parallel_enabled=args.sequence_parallel
        )
        self.approximate = "tanh" if args.openai_gelu else "none"

    def features(self, hidden_states: Tensor) -> Tensor:
        """What is multiplied by the word embeddings."""
        return self.layernorm(F.gelu(self.dense(hidden_states), approximate=self.approximate))

    def forward(self, hidden_states: Tensor, word_embeddings_weight: Tensor) -> Tensor:
        """``[sequence, batch, hidden]`` to ``[sequence, batch, vocabulary]``."""
        given = self.features(hidden_states), word_embeddings_weight
        return parallel_lm_logits(*given, self.parallel_output, self.bias)


def post_language_model_processing(
    lm_output: Tensor,
    pooled_output: Tensor | None,
    lm_head: BertLMHead,
    binary_head: nn.Module | None,
    lm_labels: Tensor | None,
    logit_weights: Tensor,
    fp16_lm_cross_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Losses of ``lm_labels`` ``[batch, sequence]``, or logits; and two logits per sample, or None.

    Two logits of ``binary_head``: ``[batch, 2]``, whether the second sentence follows the first.
    """
    binary = None if binary_head is None else binary_head(pooled_output)
    output = _logits_or_losses(
        lm_head.features(lm_output),
        lm_labels,
        logit_weights,
        lm_head.parallel_output,
        fp16_lm_cross_entropy,
        lm_head.bias,
    )
    return output, binary


class BertModel(MegatronModule):
    """A stage of a BERT, whose sizes are those of ``get_args()``.

    Args:
        num_tokentypes: kinds of tokens: which sentence one belongs to.
        add_binary_head: tell whether one sentence follows the other.
        parallel_output: each tensor-parallel rank keeps the logits of its part of the vocabulary.
        pre_process: this stage has the embeddings.
        post_process: this stage has the heads.
        cpu_offload: keep what the backward needs in the CPU's memory.
    """

    def __init__(
        self,
        num_tokentypes: int = 2,
        add_binary_head: bool = True,
        parallel_output: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        cpu_offload: bool = False,
    ) -> None:
        super().__init__()
        args = get_args()
        self.add_binary_head, self.parallel_output = add_binary_head, parallel_output
        self.pre_process, self.post_process = pre_process, post_process
        self.cpu_offload = cpu_offload
        self.fp16_lm_cross_entropy = args.fp16_lm_cross_entropy
        init_method = init_method_normal(args.init_method_std)
        self.language_model, self._language_model_key = get_language_model(
            num_tokentypes,
            add_binary_head,
            AttnMaskType.padding,
            init_method,
            scaled_init_method_normal(args.init_method_std, args.num_layers),
            pre_process=pre_process,
            post_process=post_process,
        )
        self.initialize_word_embeddings(init_method_normal)
        self.lm_head = self.binary_head = None
        if post_process:
            sizes = self.word_embeddings_weight().shape
            options = init_method, args.layernorm_epsilon, parallel_output
            self.lm_head = BertLMHead(*sizes, *options)
            if add_binary_head:
                self.binary_head = get_linear_layer(args.hidden_size, 2, init_method)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Take what the previous stage computed; None on the first stage."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        bert_model_input: Tensor,
        attention_mask: Tensor,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Any:
        """Features for the next stage; on the last one what
        :func:`post_language_model_processing` returns.

        Args:
            bert_model_input: tokens ``[batch, sequence]``; stages after the first look at none.
            attention_mask: ``[batch, sequence]``, 1 for words and 0 for padding.
            tokentype_ids, lm_labels: ``[batch, sequence]``.
        """
        keeping = torch.autograd.graph.save_on_cpu() if self.cpu_offload else None
        with keeping or contextlib.nullcontext():
            output = self.language_model(
                bert_model_input,
                bert_position_ids(bert_model_input) if self.pre_process else None,
                bert_extended_attention_mask(attention_mask),
                tokentype_ids=tokentype_ids,
            )
            if not self.post_process:
                return output
            features, pooled = output if self.add_binary_head else (output, None)
            return post_language_model_processing(
                features,
                pooled,
                self.lm_head,
                self.binary_head,
                lm_labels,
                self.word_embeddings_weight(),
                self.fp16_lm_cross_entropy,
            )

    def state_dict_for_save_checkpoint(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The state as a dict of dicts, by ``language_model``, ``lm_head``, ``binary_head`` and
        ``word_embeddings``, as far as they are on this stage; added to ``destination`` if given."""
        found = {} if destination is None else destination
        for name, part in self.named_children():
            found[prefix + name] = part.state_dict(keep_vars=keep_vars)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a ``state_dict()``, or what :meth:`state_dict_for_save_checkpoint` returned."""
        flat: dict[str, Any] = {}
        for name, value in state_dict.items():
            if isinstance(value, Mapping):
                flat |= {f"{name}.{inner}": tensor for inner, tensor in value.items()}
            else:
                flat[name] = value
        return super().load_state_dict(flat, strict)


def bert_model_provider(
    pre_process: bool = True, post_process: bool = True, cpu_offload: bool = False
) -> BertModel:
    """This pipeline stage of a :class:`BertModel`, for ``build_model``."""
    has_binary_head = get_args().bert_binary_head
    return BertModel(
        num_tokentypes=2 if has_binary_head else 0,
        add_binary_head=has_binary_head,
        pre_process=pre_process,
        post_process=post_process,
        cpu_offload=cpu_offload,
    )
