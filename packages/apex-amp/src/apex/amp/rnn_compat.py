"""What scripts import to meddle with torch's recurrent functions; amp itself casts them elsewhere.

Under O1 and O4 recurrent layers and cells run in 16 bits by rules of torch's dispatcher
(:mod:`._cast_rules`), which see cuDNN's flat weights, too.
"""

from __future__ import annotations

from typing import Any

import torch

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


class VariableFunctionsShim:
    """torch's recurrent functions as attributes that may be assigned.

    To use it, put an instance in the place of ``torch.nn.modules.rnn._VF``.
    """

    def __init__(self) -> None:
        for name in RNN_NAMES:
            for suffix in ("", "_cell"):
                setattr(self, name + suffix, getattr(torch, name + suffix))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._VF, name)  # all that is not recurrent


def has_old_rnns() -> bool:
    """Whether torch has the recurrent backend of before 1.0: no."""
    return False
