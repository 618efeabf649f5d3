"""For a trainer's own collectives, what those of this package say when a rank is lost."""

from .._lost_ranks import explained

__all__ = ["explained"]
