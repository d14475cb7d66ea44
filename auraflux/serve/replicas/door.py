"""The door: it reads a request, asks the replica that its conversation belongs to, and passes the answer on.

A replica that is gone is noticed by the call that is made of it. Where the client was sent nothing of an answer yet, another
replica is asked; where it was, the stream ends with an error in the shape that the client's API has for it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray.exceptions import RayActorError
from ray.serve._private import replica as internals
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from auraflux.errors import BackendError, BusyError
from auraflux.serve.app import answering
from auraflux.serve.body import read
from auraflux.serve.failures import LATER, Failure, failure_of
from auraflux.serve.guard import PROBES
from auraflux.serve.limits import Limits
from auraflux.serve.metrics import CONTENT_TYPE, joined
from auraflux.serve.replicas.beginning import beginning
from auraflux.serve.replicas.line import Line
from auraflux.serve.replicas.replica import FIELDS, Asked
from auraflux.serve.stream import attended

log = logging.getLogger("auraflux.serve")
TRIES = 4  # replicas that one request may lose
METRICS = "/metrics"
PROBE_S = 5.0


class Door:
    """Hands every request to a replica.

    replicas  calls them
    limits    of what is read of a request
    """

    def __init__(self, replicas: "DeploymentHandle[Any]", limits: Limits):
        listen_on_this_node_only()
        self._replicas, self._limits = replicas, limits

    async def __call__(self, request: Request) -> Response:
        scope = {name: request.scope.get(name) for name in FIELDS}
        try:
            body = await read(request, self._limits.body_nbytes)
            if request.url.path == METRICS:
                return await self._metrics((scope, body))
        except Failure as err:
            return answering(err, request.scope)
        return Relay(self._replicas.options(stream=True, session_id=beginning(body, request.headers)), (scope, body))

    async def _metrics(self, asked: Asked) -> Response:
        """Join the figures of all replicas."""
        try:
            answers = await self._replicas.broadcast("whole", asked).results_async()
        except (DeploymentUnavailableError, RayActorError) as err:
            raise _refusal(err) from err
        for _, status, body in answers:
            if status != 200:
                return Response(body, status, media_type="application/json")
        return Response(joined({name: body for name, _, body in answers}), headers={"content-type": CONTENT_TYPE})


class Relay(Response):
    """Sends the answer of a replica, or of another if that one is gone before a token was sent."""

    def __init__(self, replicas: "DeploymentHandle[Any]", asked: Asked):
        super().__init__()
        self._replicas, self._asked = replicas, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await attended(receive, self._relay(scope, Line(send, scope["path"])))

    async def _relay(self, scope: Scope, line: "Line") -> None:
        # whoever watches the server wants to know at once that no replica is there
        patience_s = PROBE_S if scope["path"] in PROBES else None
        for tries in range(1, TRIES + 1):
            try:
                async with asyncio.timeout(patience_s):
                    async for message in self._messages():
                        await line.take(message)
                return
            except RayActorError as err:
                log.warning("a replica is gone (%s); answered so far: %s", type(err).__name__, line.told)
                if not line.told and tries < TRIES:
                    line.forget()
                    continue
                why = "The replica that wrote this answer is gone. Ask again: another one answers."
                failure = Failure(503, why, code="replica_gone", headers=LATER)
            except (BackPressureError, DeploymentUnavailableError, TimeoutError) as err:
                failure = _refusal(err)
            await line.fail(failure, scope)
            return

    async def _messages(self) -> AsyncIterator[Message]:
        answer: Any = self._replicas.answer.remote(self._asked)
        try:
            async for part in answer:
                for message in part:
                    yield message
        finally:
            # ends the text where the client has left; nothing where it came to its end
            answer.cancel()


def _refusal(err: Exception) -> Failure:
    if isinstance(err, BackPressureError):
        return failure_of(BusyError("All replicas are busy, and as many requests wait as may. Try again later."))
    return Failure(503, "No replica can answer for now.", code="not_ready", headers=LATER)


def listen_on_this_node_only() -> None:
    """Let the port that Serve opens in every replica listen at the node's own address: Serve itself takes all there are.

    Whoever reaches that port can run programs here, so a version of Serve that opens it otherwise is refused.
    """
    if not hasattr(internals, "add_port_to_grpc_server"):
        raise BackendError("this version of ray opens ports in another way than 2.60, and they might be open to everybody.")
    address = f"{ray.util.get_node_ip_address()}:0"
    internals.add_port_to_grpc_server = lambda server, everywhere: add_port_to_grpc_server(server, address)
