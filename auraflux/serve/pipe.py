"""The link as the HTTP process has it: a pipe to the process that runs the model.

One message comes back for each step, with the news of all texts, so that many streams cost one wake-up.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any

from auraflux.errors import AurafluxError, BackendError, BusyError
from auraflux.run.request import Event, Request
from auraflux.run.tokenizer import Tokenizer
from auraflux.serve.link import Gauges, ModelFacts
from auraflux.weights.placement import Dealt

# first words of messages; to the model: a request, the end of one, or that experts be dealt out
SUBMIT, CANCEL, DEAL = "submit", "cancel", "deal"
# from it: what it is, news of texts with the scheduler's gauges, that it cannot answer for now, that the server shall stop, and
# what dealing experts out brought, or why it was not done
READY, NEWS, DOWN, STOP, DEALT = "ready", "news", "down", "stop", "dealt"

LOADING = "The model is being loaded; try again soon."

News = list[tuple[int, tuple[Any, ...]]]


class PipeWriting:
    """A text that the other process writes. News that came while nobody looked is given as one."""

    def __init__(self, link: "PipeLink", number: int):
        self._link, self._number = link, number
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self._ended or self._events:
            if not self._events:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            events, self._events = self._events, deque()
            yield events[0] if len(events) == 1 else _joined(events)

    def push(self, event: Event) -> None:
        self._events.append(event)
        self._ended = self._ended or event.finish is not None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        if not self._ended:
            self._link.send((CANCEL, self._number))


def _joined(events: deque[Event]) -> Event:
    last = events[-1]
    return Event(
        "".join(event.text for event in events),
        tuple(token for event in events for token in event.tokens),
        tuple(scored for event in events for scored in event.scored),
        last.finish,
        last.stop,
        last.error,
        last.figures,
    )


class PipeLink:
    """What the HTTP process has of the model.

    waiting  most requests that wait for one of the model's places
    on_stop  called when the other process says so, or is gone
    """

    def __init__(self, connection: Connection, waiting: int, on_stop: Callable[[], None] = lambda: None):
        self.facts: ModelFacts | None = None
        self.tokenizer: Tokenizer | None = None
        self.gauges, self.why_not = Gauges(), LOADING
        self.waiting, self.on_stop = waiting, on_stop
        self._connection, self._count = connection, 0
        self._writings: dict[int, PipeWriting] = {}
        self._deals: list[asyncio.Future[Dealt]] = []

    def listen(self) -> None:
        """Take messages in from now on, on the running loop."""
        number = self._connection.fileno()
        asyncio.get_running_loop().add_reader(number, self._arrived)
        # uvloop makes it one that does not block, and then a message that comes in pieces could not be read
        os.set_blocking(number, True)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())

    def submit(self, request: Request) -> PipeWriting:
        if self.facts is None or len(self._writings) >= self.facts.parallel + self.waiting:
            raise BusyError(f"{len(self._writings)} requests are being answered or waiting, as many as may. Try again later.")
        self._count += 1
        writing = self._writings[self._count] = PipeWriting(self, self._count)
        self.send((SUBMIT, self._count, request))
        return writing

    async def deal_experts(self) -> Dealt:
        """Have experts dealt out to ranks by use, between two steps."""
        asked = asyncio.get_running_loop().create_future()
        self._deals.append(asked)
        self.send((DEAL,))
        return await asked

    def send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._lost()

    def _arrived(self) -> None:
        try:
            while self._connection.poll(0):
                self._take(self._connection.recv())
        except (EOFError, OSError):
            self._lost()

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case (str(word), list(news), gauges) if word == NEWS:
                self.gauges = gauges or self.gauges
                for number, values in news:
                    self._tell(number, Event(*values))
            case (str(word), ModelFacts() as facts, tokenizer) if word == READY:
                self.facts, self.tokenizer = facts, tokenizer
            case (str(word), str(why)) if word == DOWN:
                self.facts, self.why_not = None, why
            case (str(word),) if word == STOP:
                self.on_stop()
            case (str(word), found) if word == DEALT:
                self._dealt(found)

    def _tell(self, number: int, event: Event) -> None:
        writing = self._writings.get(number)
        if writing is not None:
            if event.finish is not None:
                del self._writings[number]
            writing.push(event)

    def _dealt(self, found: Dealt | AurafluxError) -> None:
        """Tell who asked first; they are answered in their order."""
        asked = self._deals.pop(0)
        if asked.done():
            return
        if isinstance(found, Dealt):
            asked.set_result(found)
        else:
            asked.set_exception(found)

    def _lost(self) -> None:
        """End all texts: whoever wrote them is gone."""
        self.close()
        while self._deals:
            self._dealt(BackendError("The model has stopped."))
        for number in list(self._writings):
            self._tell(number, Event(finish="error", error="The model has stopped."))
        self.on_stop()
