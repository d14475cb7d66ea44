"""Heartbeat: a thread that signals that this rank is alive and detects lost ranks.

The closed connections of a killed rank are noticed at once. A rank that hangs stays connected, but its counter stops. The
counters are in the rendezvous store, in rank 0's memory, so followers also detect the loss of rank 0.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

Key = Callable[[str], str]
BEATS = 8  # per timeout


class Rendezvous(Protocol):
    """Access to the store at which ranks meet."""

    def store(self, timeout_s: float) -> Any: ...


class Heartbeat:
    """Heartbeat of one rank. Rank 0 monitors all ranks, the others monitor rank 0.

    lost     reason why the group is unusable; None while all ranks are alive
    on_lost  called when a rank is lost
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        key: Key,
        rank: int,
        size: int,
        timeout_s: float,
        on_lost: Callable[[], None] = lambda: None,
    ):
        self.rank, self.timeout_s, self._key, self._on_lost = rank, timeout_s, key, on_lost
        self.lost: str | None = None
        self._store, self._lock = rendezvous.store(timeout_s), threading.Lock()
        self._others = range(1, size) if rank == 0 else range(1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"auraflux-heartbeat-{rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop signalling and monitoring."""
        self._stopped.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread after `stop`."""
        self._thread.join(timeout_s)

    def publish_failure(self, reason: str) -> None:
        """Store the reason why this rank ends."""
        with suppress(Exception), self._lock:
            self._store.set(self._key("failure"), reason)

    def published_failure(self) -> str | None:
        """Return the reason that a failed rank has stored."""
        with suppress(Exception), self._lock:
            if self._store.check([self._key("failure")]):
                return self._store.get(self._key("failure")).decode()
        return None

    def _run(self) -> None:
        counts, seen = dict.fromkeys(self._others, -1), dict.fromkeys(self._others, time.monotonic())
        last = time.monotonic()
        while not self._stopped.wait(self.timeout_s / BEATS):
            # after a suspend of this machine, old counters prove nothing
            suspended = time.monotonic() - last > self.timeout_s / 2
            try:
                with self._lock:
                    self._store.add(self._key(f"beat/{self.rank}"), 1)
                    found = {other: self._store.add(self._key(f"beat/{other}"), 0) for other in self._others}
            except Exception:
                self._lose("rank 0 is lost: the rendezvous store does not answer.")
                return
            now = last = time.monotonic()
            for other, count in found.items():
                if suspended or count != counts[other]:
                    counts[other], seen[other] = count, now
                elif now - seen[other] > self.timeout_s:
                    self._lose(f"rank {other} has not answered for {self.timeout_s:.0f} s.")
                    return

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._on_lost()
