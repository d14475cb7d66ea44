"""Shared by the commands of `auraflux bench`: signals, and a warning for a busy machine."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
BUSY_FROM = 0.5  # load per core; above it, other processes take part of the measured time


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Exit on signals through `finally` blocks, which remove scratch folders and stop servers."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def busy(document: dict[str, Any]) -> str | None:
    """Return a warning if the machine was busy before the run; None if it was not."""
    load = document["load_before"]
    if load <= BUSY_FROM * document["machine"]["cores"]:
        return None
    return f"[bold red]busy[/bold red] the load was {load} before this run"
