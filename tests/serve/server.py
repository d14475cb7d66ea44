"""Servers with a tiny model behind them: in this process, so that a test can look inside, or as the command that users run."""

import asyncio
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

import auraflux
from auraflux.run.language import LanguageModel
from auraflux.run.scheduler import Scheduler
from auraflux.serve import desk, front
from auraflux.serve.desk import Desk, facts_of
from auraflux.serve.front import FrontSettings
from tests.run.tiny import tiny

NAME = "tiny"
LISTENING = re.compile(r"listening on (http://\S+)")
PATIENCE_S = 120.0  # for what takes a second where nothing else runs


@dataclass(frozen=True)
class Served:
    """A server in this process."""

    url: str
    model: LanguageModel
    desk: Desk

    @property
    def scheduler(self) -> Scheduler:
        return self.model.scheduler


@contextmanager
def fronted(connection: Connection, settings: FrontSettings, buffer_nbytes: int | None = None) -> Iterator[str]:
    """Answer HTTP in a thread, for the model at the other end of a pipe; whoever has that end must tell it to stop.

    buffer_nbytes  that the system takes of what a client has not read yet
    """
    listening = socket.create_server(("127.0.0.1", 0))
    if buffer_nbytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
    answering = threading.Thread(target=lambda: asyncio.run(front.serve(connection, listening, settings)))
    answering.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        answering.join()
        listening.close()
        connection.close()


@contextmanager
def running(
    path: Path | None = None, *, settings: FrontSettings | None = None, buffer_nbytes: int | None = None, **options: Any
) -> Iterator[Served]:
    """Serve a model; `options` are those of `load`. All is closed at the end, texts that are not finished too."""
    model = auraflux.load(path or tiny(), "cpu", exact=True, **{"context": 512, "sequences": 4, **options})
    ours, theirs = multiprocessing.Pipe()
    with ExitStack() as stack:
        stack.callback(ours.close)
        stack.enter_context(hasty())
        counter = Desk(model, ours, facts_of(model, NAME))
        turns = threading.Thread(target=counter.run)
        turns.start()
        stack.callback(turns.join)
        url = stack.enter_context(fronted(theirs, settings or FrontSettings(grace_s=0.5), buffer_nbytes))
        stack.callback(counter.stop)
        wait_until(lambda: is_ready(url))
        yield Served(url, model, counter)


@contextmanager
def hasty() -> Iterator[None]:
    """Let a desk notice sooner that nobody is there."""
    before, desk.IDLE_S = desk.IDLE_S, 0.05
    try:
        yield
    finally:
        desk.IDLE_S = before


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(found: Any, patience_s: float = PATIENCE_S) -> None:
    """Wait for something that is sure to come; AssertionError if it does not."""
    end = time.monotonic() + patience_s
    while not found():
        assert time.monotonic() < end, f"not so after {patience_s} s"
        time.sleep(0.01)


@dataclass
class Process:
    """The command `auraflux serve`, with all it has written to stderr so far."""

    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        wait_until(lambda: LISTENING.search(self.log) or self.popen.poll() is not None)
        found = LISTENING.search(self.log)
        assert found, self.log
        return found[1]

    @property
    def children(self) -> list[int]:
        """The processes of its group that are alive, without itself."""
        return [number for number in _group(self.popen.pid) if number != self.popen.pid]

    @property
    def http(self) -> int:
        """The number of the process that answers HTTP."""
        wait_until(lambda: any("spawn_main" in _command(number) for number in self.children))
        return next(number for number in self.children if "spawn_main" in _command(number))

    def ready(self) -> "Process":
        wait_until(lambda: is_ready(self.url) or self.popen.poll() is not None)
        assert self.popen.poll() is None, self.log
        return self

    def tell(self, number: int) -> None:
        self.popen.send_signal(number)

    def tell_all(self, number: int) -> None:
        """Signal all its processes, as a terminal and systemd do."""
        os.killpg(self.popen.pid, number)

    def end(self) -> int:
        """Wait for it to end, with all it has started, and give its exit code."""
        code = self.popen.wait(PATIENCE_S)
        wait_until(lambda: not _group(self.popen.pid))
        return code


@contextmanager
def process(*options: str, model: str | None = None) -> Iterator[Process]:
    """Run the command on the tiny model, on any port unless `options` name one. It is killed at the end if it still runs."""
    port = () if "--port" in options else ("--port", "0")
    command = [sys.executable, "-m", "auraflux", "serve", model or str(tiny()), "--device", "cpu", *port, *options]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root, start_new_session=True) as popen:
        made = Process(popen)
        reading = threading.Thread(target=lambda: made.lines.extend(popen.stderr or ()))
        reading.start()
        try:
            yield made
        finally:
            if _group(popen.pid):
                made.tell_all(signal.SIGKILL)
            popen.wait()
            reading.join()


def _group(leader: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def _command(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_text()
    except OSError:
        return ""
