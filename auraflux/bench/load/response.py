"""An HTTP response as it arrives: stream events are counted with their arrival times, and only the last ones are parsed."""

import json
from collections.abc import Mapping
from typing import Any

EVENT = b"\ndata:"
STREAM_TAIL_NBYTES = 1 << 14  # of a stream, for its last events
MAX_BODY_NBYTES = 1 << 24


class ProtocolError(ValueError):
    """The server did not answer in HTTP, or with a body that is too large."""


class Response:
    """Status, headers and body of a response.

    times, events  of each arrival that held the start of one event or more
    last           time of the last arrival
    complete       the body came to its end
    streamed       the body is a stream of events
    body           all of it; of a stream only the end
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.times: list[float] = []
        self.events: list[int] = []
        self.last = 0.0
        self.body = b""
        self.complete = False
        self.streamed = False
        self._before = b"\n"

    def begin(self, now: float, status: int, headers: Mapping[str, str]) -> None:
        """Take the status and the headers, whose names are case-insensitive or lowercase."""
        self.last, self.status, self.headers = now, status, headers
        self.streamed = status == 200 and headers.get("content-type", "").startswith("text/event-stream")

    def feed(self, now: float, data: bytes) -> None:
        """Take a part of the body that arrived."""
        self.last = now
        if self.streamed:
            self._count(now, data)
            return
        self.body += data
        if len(self.body) > MAX_BODY_NBYTES:
            raise ProtocolError(f"a body of more than {MAX_BODY_NBYTES} bytes")

    def json(self) -> Any:
        """Parse the body; None where it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def last_events(self, count: int) -> list[bytes]:
        """Return the data of the last events of a stream."""
        lines = self.body.replace(b"\r\n", b"\n").split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")][-count:]

    def _count(self, now: float, data: bytes) -> None:
        seen = self._before + data
        found = seen.count(EVENT)
        # an arrival may end within the start of an event
        self._before = seen[1 - len(EVENT) :]
        self.body = (self.body + data)[-STREAM_TAIL_NBYTES:]
        if found:
            self.times.append(now)
            self.events.append(found)
