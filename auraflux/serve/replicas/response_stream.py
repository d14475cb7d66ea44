"""Response to a client while a retry on another replica may still be possible."""

from starlette.types import Message, Scope, Send

from auraflux.serve.anthropic import messages
from auraflux.serve.anthropic.messages_events import error_event
from auraflux.serve.app import error_response_for
from auraflux.serve.failures import Failure
from auraflux.serve.openai import chat
from auraflux.serve.openai.responses_events import error_event as responses_error
from auraflux.serve.transport.sse import ALIVE

RESPONSES = "/v1/responses"
# paths whose streams begin with an event that carries no output
OPENING_EVENT = ("/v1/chat/completions", messages.PATH, RESPONSES)


class ResponseStream:
    """Sends a replica's response, but holds back its headers and opening event until there is output, for a retry.

    committed  whether the client has received output
    """

    def __init__(self, send: Send, path: str):
        self._send, self._path = send, path
        self._held: list[Message] = []
        self._started = self.committed = False

    async def send(self, message: Message) -> None:
        """Send a replica's message, or hold it back."""
        if self.committed:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._held.append(message)
        elif message["body"] == ALIVE:
            await self._start()
            await self._send(message)
        elif self._is_opening_event():
            self._held.append(message)
        elif self._started and self._held[0]["status"] != 200:
            # the stream of a lost replica has started, and the retry failed
            self.committed = True
            status = self._held[0]["status"]
            await self._send_error(Failure(status, f"The replica was lost, and the retry failed with status {status}."))
        else:
            await self._start()
            self.committed = True
            for each in (*self._held[1:], message):
                await self._send(each)

    def reset(self) -> None:
        """Drop held messages before a retry on another replica."""
        self._held = []

    async def fail(self, failure: Failure, scope: Scope) -> None:
        """Send a failure: as an error response if nothing was sent, else within the stream."""
        if not self._started:
            await error_response_for(failure, scope)(scope, _disconnected, self._send)
            return
        await self._send_error(failure)

    async def _send_error(self, failure: Failure) -> None:
        await self._send({"type": "http.response.body", "body": error_event_for(failure, self._path), "more_body": False})

    async def _start(self) -> None:
        if not self._started:
            await self._send(self._held[0])
            self._started = True

    def _is_opening_event(self) -> bool:
        """Return whether the next message is a stream's opening event, which carries no output."""
        content_type = dict(self._held[0]["headers"]).get(b"content-type", b"")
        return len(self._held) == 1 and self._path in OPENING_EVENT and content_type.startswith(b"text/event-stream")


def error_event_for(failure: Failure, path: str) -> bytes:
    """Return the event for an error after the first byte, in the format of the path's API."""
    if path == messages.PATH:
        return error_event(failure)
    return responses_error(failure) if path == RESPONSES else chat.error_chunk(failure)


async def _disconnected() -> Message:
    return {"type": "http.disconnect"}
