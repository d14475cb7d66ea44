"""The HTTP process's end of the link: a pipe to the model process.

One message arrives per engine step, with the outputs of all sequences, so that many streams cost one wake-up.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any

from auraflux.engine.request import Output, Request
from auraflux.errors import AurafluxError, BackendError, BusyError
from auraflux.serve.transport.link import Gauges, ModelFacts
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.parallel.expert_placement import PlacementResult

# message types to the model process
SUBMIT, CANCEL, PLACE_EXPERTS = "submit", "cancel", "place_experts"
# message types from it; OUTPUTS carries the outputs of a step and the scheduler's gauges
READY, OUTPUTS, UNAVAILABLE, STOP, EXPERTS_PLACED = "ready", "outputs", "unavailable", "stop", "experts_placed"

LOADING = "The model is being loaded; try again soon."
ENDED = "The model process has ended."

OutputBatch = list[tuple[int, tuple[Any, ...]]]


class PipeOutputStream:
    """Outputs of one request. Outputs that arrive between two reads are joined."""

    def __init__(self, link: "PipeLink", number: int):
        self._link, self._number = link, number
        self._outputs: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        while not self._ended or self._outputs:
            if not self._outputs:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            outputs, self._outputs = self._outputs, deque()
            yield outputs[0] if len(outputs) == 1 else _join(outputs)

    def push(self, output: Output) -> None:
        self._outputs.append(output)
        self._ended = self._ended or output.finish_reason is not None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        if not self._ended:
            self._link.send((CANCEL, self._number))


def _join(outputs: deque[Output]) -> Output:
    last = outputs[-1]
    return Output(
        "".join(output.text for output in outputs),
        tuple(token for output in outputs for token in output.tokens),
        tuple(logprob for output in outputs for logprob in output.logprobs),
        last.finish_reason,
        last.stop_string,
        last.error,
        last.stats,
        outputs[0].prompt_logprobs,
        last.embedding,
    )


class PipeLink:
    """The model, as the HTTP process sees it.

    waiting   most requests in the queue
    on_stop   called when the model process sends STOP or ends
    on_ready  called when the model became available or unavailable
    """

    def __init__(
        self,
        connection: Connection,
        waiting: int,
        on_stop: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
    ):
        self.facts: ModelFacts | None = None
        self.tokenizer: Tokenizer | None = None
        self.gauges, self.unavailable_reason = Gauges(), LOADING
        self.waiting, self.on_stop, self._on_ready = waiting, on_stop, on_ready
        self._connection, self._count = connection, 0
        self._streams: dict[int, PipeOutputStream] = {}
        self._placements: list[asyncio.Future[PlacementResult]] = []

    def listen(self) -> None:
        """Start receiving messages on the running output loop."""
        number = self._connection.fileno()
        asyncio.get_running_loop().add_reader(number, self._receive)
        # uvloop makes it non-blocking, and then a message that arrives in several reads would fail
        os.set_blocking(number, True)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())

    def submit(self, request: Request) -> PipeOutputStream:
        if self.facts is None or len(self._streams) >= self.facts.max_sequences + self.waiting:
            raise BusyError(f"The queue is full: {len(self._streams)} requests are running or waiting. Try again later.")
        self._count += 1
        stream = self._streams[self._count] = PipeOutputStream(self, self._count)
        self.send((SUBMIT, self._count, request))
        return stream

    async def place_experts(self) -> PlacementResult:
        """Redistribute experts over ranks by use, between two engine steps."""
        result = asyncio.get_running_loop().create_future()
        self._placements.append(result)
        self.send((PLACE_EXPERTS,))
        return await result

    def send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._lost()

    def _receive(self) -> None:
        try:
            while self._connection.poll(0):
                self._handle(self._connection.recv())
        except (EOFError, OSError):
            self._lost()

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case (str(kind), list(outputs), gauges) if kind == OUTPUTS:
                self.gauges = gauges or self.gauges
                for number, values in outputs:
                    self._push(number, Output(*values))
            case (str(kind), ModelFacts() as facts, tokenizer) if kind == READY:
                self.facts, self.tokenizer = facts, tokenizer
                self._on_ready()
            case (str(kind), str(reason)) if kind == UNAVAILABLE:
                self.facts, self.unavailable_reason = None, reason
                self._on_ready()
            case (str(kind),) if kind == STOP:
                self.on_stop()
            case (str(kind), placed) if kind == EXPERTS_PLACED:
                self._experts_placed(placed)

    def _push(self, number: int, output: Output) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            if output.finish_reason is not None:
                del self._streams[number]
            stream.push(output)

    def _experts_placed(self, placed: PlacementResult | AurafluxError) -> None:
        """Resolve the oldest placement request; they complete in order."""
        result = self._placements.pop(0)
        if result.done():
            return
        if isinstance(placed, PlacementResult):
            result.set_result(placed)
        else:
            result.set_exception(placed)

    def _lost(self) -> None:
        """End all requests after the model process has ended."""
        self.close()
        while self._placements:
            self._experts_placed(BackendError(ENDED))
        for number in list(self._streams):
            self._push(number, Output(finish_reason="error", error=ENDED))
        self.on_stop()
