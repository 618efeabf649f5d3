"""Loss of transducers: :class:`TransducerLoss`."""

from .transducer import TransducerLoss

__all__ = ["TransducerLoss"]
