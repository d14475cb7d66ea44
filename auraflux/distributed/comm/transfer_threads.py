"""Threads that wait for gloo transfers, so that a transfer that never ends blocks neither its caller nor the process's exit."""

from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any

from torch import Tensor

CHECK_S = 0.2  # between two checks of the heartbeat
FOREVER = timedelta(days=30)  # the heartbeat ends waits, not gloo
MAX_PENDING = 8  # sends


class ReceiveWaiter:
    """Thread that waits for receives."""

    def __init__(self) -> None:
        self._posted: SimpleQueue[Any] = SimpleQueue()
        self._done: SimpleQueue[tuple[Any, RuntimeError | None]] = SimpleQueue()
        Thread(target=self._run, name="auraflux-waiter", daemon=True).start()

    def wait(self, work: Any, check: Callable[[], None]) -> None:
        """Wait for a transfer; `check` is called periodically and may raise."""
        self._posted.put(work)
        while True:
            try:
                done, failure = self._done.get(timeout=CHECK_S)
            except Empty:
                check()
                continue
            # an interrupted wait leaves its transfer in the queue
            if done is work:
                if failure is not None:
                    raise failure
                return

    def stop(self) -> None:
        self._posted.put(None)

    def _run(self) -> None:
        while (work := self._posted.get()) is not None:
            try:
                work.wait(FOREVER)
                self._done.put((work, None))
            except RuntimeError as err:
                self._done.put((work, err))


class SendQueue:
    """Thread that holds sent tensors until gloo has sent them.

    Sends are passed to the thread in batches, when the caller waits anyway or when many are pending: waking it takes time.

    check  called periodically while waiting for a slot; may raise
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._queue: SimpleQueue[list[tuple[Any, Tensor]] | None] = SimpleQueue()
        self._new: list[tuple[Any, Tensor]] = []
        self._slots, self._check = Semaphore(MAX_PENDING), check
        self._failure: RuntimeError | None = None
        Thread(target=self._run, name="auraflux-sends", daemon=True).start()

    def reserve(self) -> None:
        """Wait for a free slot; raise RuntimeError if a send has failed."""
        if len(self._new) >= MAX_PENDING // 2:
            self.flush()
        while not self._slots.acquire(timeout=CHECK_S):
            self._check()
        if self._failure is not None:
            raise self._failure

    def add(self, work: Any, tensor: Tensor) -> None:
        """Add a started send."""
        self._new.append((work, tensor))

    def flush(self) -> None:
        """Pass new sends to the thread."""
        if self._new:
            new, self._new = self._new, []
            self._queue.put(new)

    def finish(self) -> None:
        """Wait until all are sent."""
        self.flush()
        for _ in range(MAX_PENDING):
            self.reserve()

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            for work, _ in batch:
                try:
                    work.wait(FOREVER)
                except RuntimeError as err:
                    self._failure = err
                self._slots.release()
