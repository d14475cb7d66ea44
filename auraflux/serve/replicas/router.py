"""The router: it forwards each request to the replica of its conversation, and the response to the client.

A lost replica fails the calls to it. Before the client has received output, the request is retried on another replica; after
that, the stream ends with an error in the format of the client's API.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from auraflux.errors import BusyError
from auraflux.serve.app import error_response_for
from auraflux.serve.auth import PROBES
from auraflux.serve.failures import LATER, Failure, failure_of
from auraflux.serve.limits import Limits
from auraflux.serve.metrics import CONTENT_TYPE, merge_replicas
from auraflux.serve.replicas.node_port import bind_to_this_node, check_bound
from auraflux.serve.replicas.prefix_affinity import affinity_key
from auraflux.serve.replicas.replica import FIELDS, ReplicaRequest
from auraflux.serve.replicas.response_stream import ResponseStream
from auraflux.serve.transport.body import read
from auraflux.serve.transport.sse import run_until_disconnect

log = logging.getLogger("auraflux.serve")
ATTEMPTS = 4  # per request
METRICS = "/metrics"
PROBE_S = 5.0


class ReplicaRouter:
    """Forwards every request to a replica.

    replicas  Ray Serve handle of the replicas
    limits    on request bodies
    """

    def __init__(self, replicas: "DeploymentHandle[Any]", limits: Limits):
        bind_to_this_node()
        self._replicas, self._limits = replicas, limits

    def check_health(self) -> None:
        check_bound()

    async def __call__(self, request: Request) -> Response:
        scope = {name: request.scope.get(name) for name in FIELDS}
        try:
            body = await read(request, self._limits.body_nbytes)
            if request.url.path == METRICS:
                return await self._metrics((scope, body))
        except Failure as err:
            return error_response_for(err, request.scope)
        return Relay(self._replicas.options(stream=True, session_id=affinity_key(body, request.headers)), (scope, body))

    async def _metrics(self, request: ReplicaRequest) -> Response:
        """Return the merged metrics of all replicas."""
        try:
            responses = await self._replicas.broadcast("full_response", request).results_async()
        except (DeploymentUnavailableError, RayActorError) as err:
            raise _refusal(err) from err
        for _, status, body in responses:
            if status != 200:
                return Response(body, status, media_type="application/json")
        return Response(merge_replicas({name: body for name, _, body in responses}), headers={"content-type": CONTENT_TYPE})


class Relay(Response):
    """Response of a replica, or of another one if that one is lost before any output was sent."""

    def __init__(self, replicas: "DeploymentHandle[Any]", request: ReplicaRequest):
        super().__init__()
        self._replicas, self._request = replicas, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._relay(scope, ResponseStream(send, scope["path"])))

    async def _relay(self, scope: Scope, stream: "ResponseStream") -> None:
        # health probes must fail at once if there is no replica
        timeout_s = PROBE_S if scope["path"] in PROBES else None
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with asyncio.timeout(timeout_s):
                    async for message in self._messages():
                        await stream.send(message)
                return
            except RayActorError as err:
                log.warning("a replica was lost (%s); output sent: %s", type(err).__name__, stream.committed)
                if not stream.committed and attempt < ATTEMPTS:
                    stream.reset()
                    continue
                lost = "The replica of this answer was lost. Try again: another replica will serve the request."
                failure = Failure(503, lost, code="replica_gone", headers=LATER)
            except (BackPressureError, DeploymentUnavailableError, TimeoutError) as err:
                failure = _refusal(err)
            await stream.fail(failure, scope)
            return

    async def _messages(self) -> AsyncIterator[Message]:
        response: Any = self._replicas.respond.remote(self._request)
        try:
            async for batch in response:
                for message in batch:
                    yield message
        finally:
            # ends the generation if the client has disconnected
            response.cancel()


def _refusal(err: Exception) -> Failure:
    if isinstance(err, BackPressureError):
        return failure_of(BusyError("All replicas are busy and the queue is full. Try again later."))
    return Failure(503, "No replica is available.", code="not_ready", headers=LATER)
