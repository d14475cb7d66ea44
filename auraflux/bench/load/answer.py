"""An HTTP answer as it arrives, read as cheaply as can be: events of a stream are counted, and only the last are parsed."""

import json
from typing import Any

EVENT = b"\ndata:"
KEPT_NBYTES = 1 << 14  # of the end of a stream, for its last events
MOST_NBYTES = 1 << 24  # of any other body
HEAD_NBYTES = 1 << 16


class NotHttp(ValueError):
    """What came is no answer of an HTTP server."""


class Chunks:
    """Undo chunked transfer encoding, whatever pieces it comes in."""

    def __init__(self) -> None:
        self.whole = False
        self._held = b""
        self._left = 0  # bytes of the chunk that are to come, with the two that close it
        self._trailing = False

    def feed(self, data: bytes) -> bytes:
        """The part of the body that these bytes hold."""
        data = self._held + data
        at, pieces = 0, []
        while not self.whole:
            if self._left:
                taken = data[at : at + self._left]
                if not taken:
                    break
                pieces.append(taken[: max(self._left - 2, 0)])
                at += len(taken)
                self._left -= len(taken)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            self._line(data[at:end])
            at = end + 2
        self._held = data[at:]
        if len(self._held) > HEAD_NBYTES:
            raise NotHttp("a chunk without a size")
        return b"".join(pieces)

    def _line(self, line: bytes) -> None:
        if self._trailing:
            self.whole = not line
            return
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise NotHttp(f"a chunk of size {line[:20]!r}") from None
        if size < 0:
            raise NotHttp(f"a chunk of size {size}")
        self._trailing = size == 0
        self._left = size + 2 if size else 0


class Answer:
    """Status, headers and body, and when events came.

    times, events  of each arrival that held the start of one event or more
    last           when anything arrived
    whole          nothing is to come
    body           all of it; of a stream of events only the end
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.times: list[float] = []
        self.events: list[int] = []
        self.last = 0.0
        self.body = b""
        self.whole = False
        self.streamed = False
        self._head = b""
        self._before = b"\n"
        self._chunks: Chunks | None = None
        self._left: int | None = None

    @property
    def begun(self) -> bool:
        return bool(self.status or self._head)

    @property
    def kept_open(self) -> bool:
        """Whether the connection can carry another request."""
        return self.whole and self.headers.get("connection", "").lower() != "close" and not self._until_closed

    @property
    def _until_closed(self) -> bool:
        return self._chunks is None and self._left is None

    def feed(self, now: float, data: bytes) -> None:
        """Take what arrived at a time."""
        self.last = now
        if not self.status:
            rest = self._read_head(data)
            if rest is None:
                return
            data = rest
        if self._chunks is not None:
            data = self._chunks.feed(data)
            self.whole = self._chunks.whole
        elif self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.whole = self._left == 0
        if self.streamed:
            self._count(now, data)
        else:
            self.body += data
            if len(self.body) > MOST_NBYTES:
                raise NotHttp(f"a body of more than {MOST_NBYTES} bytes")

    def close(self) -> None:
        """Take note that the connection ended."""
        self.whole = self.whole or (self.status != 0 and self._until_closed)

    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def last_events(self, count: int) -> list[bytes]:
        """What the last events of a stream said."""
        lines = self.body.replace(b"\r\n", b"\n").split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")][-count:]

    def _count(self, now: float, data: bytes) -> None:
        seen = self._before + data
        found = seen.count(EVENT)
        # the start of an event may be cut by the end of a piece
        self._before = seen[1 - len(EVENT) :]
        self.body = (self.body + data)[-KEPT_NBYTES:]
        if found:
            self.times.append(now)
            self.events.append(found)

    def _read_head(self, data: bytes) -> bytes | None:
        """Read status and headers once they are there; give what comes after them."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            if len(head) > HEAD_NBYTES or not (self._head.startswith(b"HTTP/1.") or b"HTTP/1.".startswith(self._head[:7])):
                raise NotHttp(f"an answer that begins with {self._head[:20]!r}")
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not (words[1].isascii() and words[1].isdigit()):
            raise NotHttp(f"an answer that begins with {first[:40]!r}")
        if 100 <= int(words[1]) < 200:
            self._head = b""
            return self._read_head(rest)
        self.status = int(words[1])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._choose_body()
        return rest

    def _choose_body(self) -> None:
        self.streamed = self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._chunks = Chunks()
            return
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            length = "0"
        if length is not None:
            if not (length.isascii() and length.isdigit()):
                raise NotHttp(f"a content-length of {length[:20]!r}")
            self._left = int(length)
