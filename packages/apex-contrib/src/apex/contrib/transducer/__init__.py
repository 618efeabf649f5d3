"""Joint and loss of transducers (RNN-T)."""

from __future__ import annotations

from typing import Any

from .joint import TransducerJoint
from .loss import TransducerLoss

__all__ = ["TransducerJoint", "TransducerLoss", "decompositions"]


def decompositions() -> dict[Any, Any]:
    """All operators of transducers in ATen's, for ``ExportedProgram.run_decompositions``."""
    from . import joint, loss

    return {**joint.decompositions(), **loss.decompositions()}
