"""A thread that says that this rank is alive, and notices when another no longer does.

A rank that was killed is noticed at once, by its connections. One that hangs keeps them: it only stops to count. The counts
lie where the ranks met, in rank 0's memory, so followers notice as well when rank 0 hangs or is gone.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

Key = Callable[[str], str]
BEATS = 8  # in the time after which a rank counts as lost


class Meeting(Protocol):
    """Where ranks meet."""

    def store(self, timeout_s: float) -> Any: ...


class Heart:
    """Beats, and listens to the others: rank 0 to all, the others to rank 0.

    lost  why the group is of no use any more; None while all are there
    then  called when it is
    """

    def __init__(
        self, place: Meeting, key: Key, rank: int, size: int, timeout_s: float, then: Callable[[], None] = lambda: None
    ):
        self.rank, self.timeout_s, self._key, self._then = rank, timeout_s, key, then
        self.lost: str | None = None
        self._store, self._lock = place.store(timeout_s), threading.Lock()
        self._others = range(1, size) if rank == 0 else range(1)
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"auraflux-heart-{rank}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def tell(self, why: str) -> None:
        """Leave word why this rank ends."""
        with suppress(Exception), self._lock:
            self._store.set(self._key("why"), why)

    def word(self) -> str | None:
        """What a rank that ended left."""
        with suppress(Exception), self._lock:
            if self._store.check([self._key("why")]):
                return self._store.get(self._key("why")).decode()
        return None

    def _run(self) -> None:
        counts, seen = dict.fromkeys(self._others, -1), dict.fromkeys(self._others, time.monotonic())
        slept = time.monotonic()
        while not self._stopped.wait(self.timeout_s / BEATS):
            # a machine that was suspended knows nothing of the others' silence
            stood_still = time.monotonic() - slept > self.timeout_s / 2
            try:
                with self._lock:
                    self._store.add(self._key(f"beat/{self.rank}"), 1)
                    found = {other: self._store.add(self._key(f"beat/{other}"), 0) for other in self._others}
            except Exception:
                self._lose("rank 0 is gone: nobody answers where the ranks met.")
                return
            now = slept = time.monotonic()
            for other, count in found.items():
                if stood_still or count != counts[other]:
                    counts[other], seen[other] = count, now
                elif now - seen[other] > self.timeout_s:
                    self._lose(f"rank {other} has not answered for {self.timeout_s:.0f} s.")
                    return

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self._then()
