"""What both modules of attention have: a layer norm's parameters, old keys, and arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import dropout
from .checks import check_probability

__all__ = ["Attention", "jit_dropout_add"]

# Names that Apex gave the layer norm's parameters in one of its variants, and those in use.
_OLD_KEYS = {
    "lyr_nrm.weight": "lyr_nrm_gamma_weights",
    "lyr_nrm.bias": "lyr_nrm_beta_weights",
    "lyr_norm_gamma_weights": "lyr_nrm_gamma_weights",
    "lyr_norm_beta_weights": "lyr_nrm_beta_weights",
}
_MATRICES = {"q_weight", "k_weight", "v_weight", "in_proj_weight", "out_proj_weight"}
_MATRICES |= {"in_proj_weight_q", "in_proj_weight_kv"}


class Attention(nn.Module):
    """Sizes, probability and the layer norm of an attention module."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        include_norm_add: bool,
        impl: str,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(
                f"{name}: embed_dim must be a positive multiple of num_heads, got {embed_dim} and "
                f"{num_heads}."
            )
        if impl not in ("fast", "default"):
            raise ValueError(f"{name}: impl must be 'fast' or 'default', got {impl!r}.")
        check_probability(name, dropout)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads
        self.bias, self.include_norm_add, self.impl = bias, include_norm_add, impl
        self.scaling = self.head_dim**-0.5

    def _add_parameters(self, projections: dict[str, int]) -> None:
        """Add a weight ``[rows * e, e]`` and a bias of each projection, given its rows in ``e``."""
        e = self.embed_dim
        shapes = {name: (rows * e, e) for name, rows in projections.items()}
        shapes |= {
            name.replace("weight", "bias"): (rows * e,) for name, rows in projections.items()
        }
        shapes |= {"lyr_nrm_gamma_weights": (e,), "lyr_nrm_beta_weights": (e,)}
        for name, shape in shapes.items():
            is_there = self.include_norm_add if "nrm" in name else self.bias or len(shape) == 2
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if is_there else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights anew, uniformly (Glorot & Bengio 2010); biases become 0, gamma 1, beta 0."""
        for name, parameter in self._parameters.items():
            if parameter is not None and name in _MATRICES:  # not what a subclass has added
                rows = parameter.shape[0] // parameter.shape[1]  # of that many matrices [e, e]
                nn.init.xavier_uniform_(parameter, gain=((rows + 1) / 2) ** 0.5)  # as if of one
            elif parameter is not None and parameter.dim() == 1:
                nn.init.constant_(parameter, 1.0 if "gamma" in name else 0.0)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for old, new in _OLD_KEYS.items():
            if self.include_norm_add and prefix + old in state_dict:
                state_dict.setdefault(prefix + new, state_dict.pop(prefix + old))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _mask(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor | None, bool]:
        """The mask, and whether it is a time mask."""
        if key_padding_mask is not None and attn_mask is not None:
            raise ValueError(
                f"{type(self).__name__}: pass key_padding_mask or attn_mask, not both; to hide by "
                "both, use torch.nn.functional.scaled_dot_product_attention."
            )
        return (key_padding_mask, False) if attn_mask is None else (attn_mask, True)


def jit_dropout_add(x: Tensor, residual: Tensor, prob: float, is_training: bool) -> Tensor:
    """``residual + dropout(x)``, of one shape ``[..., n]``; ``prob`` in ``[0, 1]``.

    What is dropped depends on one number drawn from the default generator, and on the index.
    """
    check_probability("jit_dropout_add", prob)
    return residual + dropout(x, prob if is_training else 0.0)
