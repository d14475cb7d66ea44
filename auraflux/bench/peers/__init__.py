"""Other libraries that implement our ops, for the benchmark; it runs without any of them."""

from auraflux.bench.peers import linear, pointwise, sequence
from auraflux.bench.peers.peer import Peer

__all__ = ["PEERS", "Peer"]

PEERS: dict[str, list[Peer]] = {"linear": linear.PEERS, **pointwise.PEERS, **sequence.PEERS}
