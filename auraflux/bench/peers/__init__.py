"""Other libraries that do the work of our ops, for the benchmark. None of them is needed to run it."""

from auraflux.bench.peers import linear, pointwise, sequence
from auraflux.bench.peers.peer import Peer

__all__ = ["PEERS", "Peer"]

PEERS: dict[str, list[Peer]] = {"linear": linear.PEERS, **pointwise.PEERS, **sequence.PEERS}
