"""ResNet's bottleneck with frozen batch norm, whole or divided over ranks along the height."""

from .bottleneck import Bottleneck, SpatialBottleneck
from .halo_exchangers import (
    HaloExchangerAllGather,
    HaloExchangerNoComm,
    HaloExchangerPeer,
    HaloExchangerSendRecv,
)

__all__ = [
    "Bottleneck",
    "HaloExchangerAllGather",
    "HaloExchangerNoComm",
    "HaloExchangerPeer",
    "HaloExchangerSendRecv",
    "SpatialBottleneck",
]
