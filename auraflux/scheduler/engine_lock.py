"""The engine lock: one thread at a time runs engine steps, on behalf of all that wait."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from auraflux.errors import InputError


class EngineLock:
    """Passes the right to run the engine from thread to thread.

    changed  condition that guards the queue; notified when a sequence is added and when a thread releases the engine
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._owner: int | None = None

    def wait(self, until: Callable[[], bool], step: Callable[[], object]) -> None:
        """Run steps, or wait while another thread runs them, until a condition holds."""
        while not until():
            if self._acquire(until):
                try:
                    step()
                finally:
                    self._release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the engine inside the block."""
        self._acquire(lambda: False)
        try:
            yield
        finally:
            self._release()

    def _acquire(self, until: Callable[[], bool]) -> bool:
        """Acquire the engine; return False if the condition came to hold first."""
        me = threading.get_ident()
        if self._owner == me:
            raise InputError("the model is at work on this thread already: a step cannot be taken within another.")
        with self.changed:
            self.changed.wait_for(lambda: self._owner is None or until())
            if until():
                return False
            self._owner = me
            return True

    def _release(self) -> None:
        with self.changed:
            self._owner = None
            self.changed.notify_all()
