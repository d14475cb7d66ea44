"""Who takes the scheduler's turns: one thread at a time, for all that wait."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from auraflux.errors import InputError


class Turns:
    """Hands the right to use an engine from thread to thread.

    changed  guards what others add to; notified when something was added, and when turns end
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._driver: int | None = None

    def wait(self, until: Callable[[], bool], turn: Callable[[], object]) -> None:
        """Take turns, or wait while another thread takes them, until something is so."""
        while not until():
            if self._take_over(until):
                try:
                    turn()
                finally:
                    self._hand_over()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Be the only thread that uses the engine, inside the block."""
        self._take_over(lambda: False)
        try:
            yield
        finally:
            self._hand_over()

    def _take_over(self, until: Callable[[], bool]) -> bool:
        """Become the thread that takes turns; False if that is no longer of use."""
        me = threading.get_ident()
        if self._driver == me:
            raise InputError("the model is at work on this thread already: a step cannot be taken within another.")
        with self.changed:
            self.changed.wait_for(lambda: self._driver is None or until())
            if until():
                return False
            self._driver = me
            return True

    def _hand_over(self) -> None:
        with self.changed:
            self._driver = None
            self.changed.notify_all()
