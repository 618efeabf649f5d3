"""Attention heads that tensor-parallel ranks do not divide: the layers need apex-normalization."""

from types import SimpleNamespace

import pytest
import torch

from apex.transformer.testing import transformer_layers
from apex_testkit.model_parallel import model_parallel


def check_attention(rank, world):
    """Three heads on two ranks, although the features of all heads are divisible."""
    with model_parallel(world), pytest.MonkeyPatch.context() as patch:
        args = SimpleNamespace(
            num_attention_heads=3, kv_channels=4, hidden_size=12, recompute_granularity=None
        )
        patch.setattr(transformer_layers, "get_args", lambda: args)
        init = torch.nn.init.zeros_
        text = "ParallelAttention: num_attention_heads: 3 is not divisible by 2 tensor-parallel "
        text += "ranks. Make it a multiple of 2, such as 4"
        with pytest.raises(ValueError, match=f"^{text}"):
            transformer_layers.ParallelAttention(init, init, 1)


def test_heads(two_ranks):
    two_ranks(check_attention)
