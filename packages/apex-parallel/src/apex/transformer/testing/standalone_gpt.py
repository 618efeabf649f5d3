"""A GPT of Megatron's interface: causal attention, tied embeddings."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ..enums import AttnMaskType
from .global_vars import get_args
from .standalone_transformer_lm import (
    MegatronModule,
    get_language_model,
    init_method_normal,
    post_language_model_processing,
)

__all__ = ["GPTModel", "gpt_model_provider"]


def gpt_model_provider(
    pre_process: bool = True, post_process: bool = True, cpu_offload: bool = False
) -> GPTModel:
    """This pipeline stage of a :class:`GPTModel`, for ``build_model``."""
    return GPTModel(pre_process=pre_process, post_process=post_process, cpu_offload=cpu_offload)


class GPTModel(MegatronModule):
    """A stage of a GPT, whose sizes are those of ``get_args()``.

    Args:
        num_tokentypes: kinds of tokens.
        parallel_output: each tensor-parallel rank keeps the logits of its part of the vocabulary.
        pre_process: this stage has the embeddings.
        post_process: this stage has the last norm and the logits.
        cpu_offload: keep what the backward needs in the CPU's memory.
    """

    def __init__(
        self,
        num_tokentypes: int = 0,
        parallel_output: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        cpu_offload: bool = False,
    ) -> None:
        super().__init__()
        self.parallel_output = parallel_output
        self.pre_process, self.post_process = pre_process, post_process
        self.cpu_offload = cpu_offload
        self.fp16_lm_cross_entropy = get_args().fp16_lm_cross_entropy
        self.language_model, self._language_model_key = get_language_model(
            num_tokentypes,
            False,
            AttnMaskType.causal,
            pre_process=pre_process,
            post_process=post_process,
        )
        self.initialize_word_embeddings(init_method_normal)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Take what the previous stage computed; None on the first stage."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Features for the next stage; on the last one losses or logits.

        Args:
            input_ids, position_ids, labels, tokentype_ids: ``[batch, sequence]``.
            attention_mask: ``[batch or 1, 1, sequence, sequence]``, True where a token (third
                dimension) must not see another; None hides what comes later.
            inference_params: must be None.

        Returns:
            ``[sequence, batch, hidden]``; on the last stage ``[batch, sequence]`` losses of the
            labels, or ``[batch, sequence, vocabulary]`` logits without labels.
        """
        keeping = torch.autograd.graph.save_on_cpu() if self.cpu_offload else None
        with keeping or contextlib.nullcontext():
            output = self.language_model(
                input_ids,
                position_ids,
                attention_mask,
                tokentype_ids=tokentype_ids,
                inference_params=inference_params,
            )
            if not self.post_process:
                return output
            return post_language_model_processing(
                output,
                labels,
                self.word_embeddings_weight(),
                self.parallel_output,
                self.fp16_lm_cross_entropy,
            )
