"""Defines the op with planted bugs, as packages define theirs."""

import torch

from shared_csrc.native.library import OpLibrary

library = OpLibrary("apex_planted", __file__)


@library.define("planted_copy(Tensor x, int bug) -> Tensor")
def planted_copy(x, bug):
    """Return a copy of ``x`` (float32); ``bug`` says what goes wrong, 0 is nothing."""
    return torch.empty_like(x)
