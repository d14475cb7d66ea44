"""Worker processes that send requests, started and controlled from here."""

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import SpawnProcess
from typing import Any

from auraflux.bench.load import worker
from auraflux.bench.load.record import Record
from auraflux.bench.load.workload import Chain, Target, Work
from auraflux.errors import BackendError
from auraflux.machine import usable_cores

CLIENTS_PER_WORKER = 32  # streams of 80 tokens/s take about a sixth of a core, on two cores of a Xeon
SERVER_CORES = 2  # left to the server
START_DELAY_S = 0.1  # for the common start time to reach every worker
JOIN_TIMEOUT_S = 5.0


class WorkerPool:
    """Worker processes, as many as a number of concurrent clients needs."""

    def __init__(self, target: Target, clients: int):
        count = max(1, min(-(-clients // CLIENTS_PER_WORKER), usable_cores() - SERVER_CORES))
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes: list[SpawnProcess] = []
        for _ in range(count):
            here, there = spawn.Pipe()
            process = spawn.Process(target=worker.main, args=(there, target), daemon=True)
            with _ignoring_interrupts():
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: Any) -> None:
        for pipe in self._pipes:
            pipe.close()
        # in the middle of a round they would not see that the pipe is closed
        if exception[0] is not None:
            for process in self._processes:
                process.terminate()
        for process in self._processes:
            process.join(JOIN_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def run(self, work: Work, chains: list[Chain]) -> list[list[Record]]:
        """Send all chains, which start together; return the records of each."""
        count = len(self._pipes)
        parts = {pipe: chains[i::count] for i, pipe in enumerate(self._pipes) if chains[i::count]}
        try:
            for pipe, part in parts.items():
                pipe.send((work, part))
            for pipe in parts:
                pipe.recv()
            start = time.monotonic() + START_DELAY_S
            for pipe in parts:
                pipe.send(start)
            return [records for pipe in parts for records in pipe.recv()]
        except (EOFError, OSError):
            raise BackendError("a process that sends requests ended before its work was done.") from None


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which a terminal sends to all: this one receives it and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
