"""Other libraries that do the work of our ops on a GPU. None of them is needed; those that are missing are named."""

from auraflux.bench.gpu.peers import attention, delta, linear, moe
from auraflux.bench.peers.peer import Peer

__all__ = ["PEERS", "Peer"]

PEERS: dict[str, list[Peer]] = {"linear": linear.PEERS, **attention.PEERS, **moe.PEERS, **delta.PEERS}
