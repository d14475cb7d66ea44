"""What goes to a client while the replica that answers may still be exchanged for another."""

from starlette.types import Message, Scope, Send

from auraflux.serve import chat, messages
from auraflux.serve.app import answering
from auraflux.serve.failures import Failure
from auraflux.serve.messages_events import error_event
from auraflux.serve.responses_events import error_event as responses_error
from auraflux.serve.stream import ALIVE

RESPONSES = "/v1/responses"
# streams that begin with an event that tells nothing of the answer yet
OPENED = ("/v1/chat/completions", messages.PATH, RESPONSES)


class Line:
    """What a client is sent: nothing that another replica could not say as well, until something of the answer is there.

    told  whether the client has something of an answer
    """

    def __init__(self, send: Send, path: str):
        self._send, self._path = send, path
        self._held: list[Message] = []
        self._started = self.told = False

    async def take(self, message: Message) -> None:
        """Send what a replica says, or hold it back."""
        if self.told:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._held.append(message)
        elif message["body"] == ALIVE:
            await self._start()
            await self._send(message)
        elif self._opening():
            self._held.append(message)
        elif self._started and self._held[0]["status"] != 200:
            # another replica than the one whose stream had begun
            self.told = True
            refused = self._held[0]["status"]
            await self._in_band(Failure(refused, f"The replica is gone, and another one answered with status {refused}."))
        else:
            await self._start()
            self.told = True
            for each in (*self._held[1:], message):
                await self._send(each)

    def forget(self) -> None:
        """Drop what was held back: another replica begins anew."""
        self._held = []

    async def fail(self, failure: Failure, scope: Scope) -> None:
        """Tell of a failure: by its status if nothing was sent, else within the stream."""
        if not self._started:
            await answering(failure, scope)(scope, _nothing, self._send)
            return
        await self._in_band(failure)

    async def _in_band(self, failure: Failure) -> None:
        await self._send({"type": "http.response.body", "body": in_band(failure, self._path), "more_body": False})

    async def _start(self) -> None:
        if not self._started:
            await self._send(self._held[0])
            self._started = True

    def _opening(self) -> bool:
        """Whether the event that comes is the first of a stream, and tells nothing of the answer."""
        kinds = dict(self._held[0]["headers"]).get(b"content-type", b"")
        return len(self._held) == 1 and self._path in OPENED and kinds.startswith(b"text/event-stream")


def in_band(failure: Failure, path: str) -> bytes:
    """Spell an error that comes after the first byte as the clients of that path expect it."""
    if path == messages.PATH:
        return error_event(failure)
    return responses_error(failure) if path == RESPONSES else chat.failed(failure)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
