"""Loss scaling over all ranks of a model."""

from .grad_scaler import GradScaler

__all__ = ["GradScaler"]
