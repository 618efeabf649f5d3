"""Memory that the ranks of one host have in common, and an exchange of edges between them."""

from .peer_halo_exchanger_1d import PeerHaloExchanger1d
from .peer_memory import PeerMemoryPool

__all__ = ["PeerHaloExchanger1d", "PeerMemoryPool"]
