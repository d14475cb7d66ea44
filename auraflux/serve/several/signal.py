"""`Signal`: wakes every task that waits for a change."""

import asyncio


class Signal:
    """A change that tasks wait for; they look for themselves whether it is the one they want."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next change; return False at the timeout."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            done, _ = await asyncio.wait((waiter,), timeout=max(timeout_s, 0.0))
            return bool(done)
        finally:
            self._waiters.discard(waiter)
