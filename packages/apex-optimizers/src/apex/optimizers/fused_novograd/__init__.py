"""NovoGrad that updates all parameters of one device and dtype in a few launches."""

from .optimizer import FusedNovoGrad

__all__ = ["FusedNovoGrad"]
