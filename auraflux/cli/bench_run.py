"""What the commands of `auraflux bench` share: how a run ends, and when its times cannot be trusted."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
BUSY_FROM = 0.5  # processes per core; from there on, others take part of the time that is measured


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let what ends the process run its `finally`s, which remove scratch folders and stop servers."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def busy(document: dict[str, Any]) -> str | None:
    """Say that the machine was busy when a run began; None if it was not."""
    load = document["load_before"]
    if load <= BUSY_FROM * document["machine"]["cores"]:
        return None
    return f"[bold red]busy[/bold red] the load was {load} before this run"
