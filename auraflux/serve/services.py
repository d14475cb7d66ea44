"""`Services`: the models of a server."""

from typing import Protocol

from starlette.requests import Request

from auraflux.serve.limits import Limits
from auraflux.serve.listing import KeepAlive, Listing
from auraflux.serve.service import Service


class MetricsText(Protocol):
    """Metrics in Prometheus' format."""

    def text(self) -> bytes: ...


class Services(Protocol):
    """The models of a server: one that is always loaded, or several that are loaded on demand.

    created  start time, in seconds since 1970
    """

    created: int
    limits: Limits

    @property
    def metrics(self) -> MetricsText: ...

    def check_ready(self) -> None:
        """Raise Failure 503 while requests cannot be served."""

    def knows(self, name: str) -> bool:
        """Return whether a model has this name."""

    async def select(self, request: Request, name: str | None, keep_alive: KeepAlive = None) -> Service:
        """Return the service of the model that a request names, once it is loaded; it stays loaded until the response ends.

        keep_alive  how long it stays loaded afterwards, in Ollama's form
        """

    async def unload(self, name: str) -> bool:
        """Unload a model once its requests have ended; return False for one that stays loaded."""

    async def listings(self) -> list[Listing]:
        """Return the models that requests can name."""

    async def listing(self, name: str) -> Listing:
        """Return the model of a name; raise Failure 404 for an unknown one."""

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait for the running ones, and stop those that exceed the grace period."""
