"""The gRPC port that Ray Serve opens in every replica, bound to the node's own address.

Serve binds it to all addresses, and has no option for that. A client that reaches the port can run code here. So the replica's
gRPC server class binds to the node's address instead, and a replica in which no port was bound this way fails its health check.
"""

import functools
from collections.abc import Callable
from typing import Any

import grpc
import ray

from auraflux.errors import BackendError

ALL_ADDRESSES = ("[::]:", "0.0.0.0:")
BINDERS = ("add_insecure_port", "add_secure_port")
_bound: list[str] = []  # addresses in this process


def bind_to_this_node() -> None:
    """Bind gRPC servers of this process that would listen on all addresses to the node's own address."""
    node = ray.util.get_node_ip_address()
    for server in grpc.aio.Server.__subclasses__():
        for name in BINDERS:
            bind = getattr(server, name)
            if not hasattr(bind, "__wrapped__"):
                setattr(server, name, _binding(bind, f"[{node}]:" if ":" in node else f"{node}:"))


def check_bound() -> None:
    """Refuse a version of Serve that opens its port in another way, since it might be public."""
    if not _bound:
        raise BackendError("this version of ray opens ports in another way than 2.60, and they might be public.")


def _binding(bind: Callable[..., int], node: str) -> Callable[..., int]:
    @functools.wraps(bind)
    def at_node(server: Any, address: str, *credentials: Any) -> int:
        for everywhere in ALL_ADDRESSES:
            if address.startswith(everywhere):
                address = node + address.removeprefix(everywhere)
                _bound.append(address)
        return bind(server, address, *credentials)

    return at_node
