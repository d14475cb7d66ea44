"""Servers with a tiny model: in this process, where tests can inspect them, or as the `auraflux serve` command."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

import auraflux
from auraflux.loading.language_model import LanguageModel
from auraflux.scheduler.scheduler import Scheduler
from auraflux.serve.transport import http_process, model_process
from auraflux.serve.transport.http_process import HttpSettings
from auraflux.serve.transport.model_process import ModelProcess, facts_of
from tests.engine.tiny import tiny

NAME = "tiny"
LISTENING = re.compile(r"listening on (http://\S+)")
TIMEOUT_S = 120.0  # generous, for a loaded machine


@dataclass(frozen=True)
class Served:
    """A server in this process."""

    url: str
    model: LanguageModel
    process: ModelProcess

    @property
    def scheduler(self) -> Scheduler:
        return self.model.scheduler


@contextmanager
def http_server(connection: Connection, settings: HttpSettings, buffer_nbytes: int | None = None) -> Iterator[str]:
    """Run the HTTP server in a thread, connected to a model process; that process must stop it.

    buffer_nbytes  of the socket's send buffer
    """
    listening = socket.create_server(("127.0.0.1", 0))
    if buffer_nbytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
    thread = threading.Thread(target=lambda: asyncio.run(http_process.serve(connection, listening, settings)))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        thread.join()
        listening.close()
        connection.close()


@contextmanager
def running(
    path: Path | None = None, *, settings: HttpSettings | None = None, buffer_nbytes: int | None = None, **options: Any
) -> Iterator[Served]:
    """Serve a model loaded with `options`; at the end, cancel what runs and close everything."""
    model = auraflux.load(path or tiny(), "cpu", **{"exact": True, "context": 512, "max_sequences": 4, **options})
    ours, theirs = multiprocessing.Pipe()
    with ExitStack() as stack:
        stack.callback(ours.close)
        stack.enter_context(short_idle_time())
        # a large tokenizer fills the pipe until the HTTP server reads it
        made = stack.enter_context(ThreadPoolExecutor(1)).submit(ModelProcess, model, ours, facts_of(model, NAME))
        stack.callback(lambda: steps.join())
        url = stack.enter_context(http_server(theirs, settings or HttpSettings(grace_s=0.5), buffer_nbytes))
        process = made.result()
        steps = threading.Thread(target=process.run)
        steps.start()
        stack.callback(process.stop)
        wait_until(lambda: is_ready(url))
        yield Served(url, model, process)


@contextmanager
def short_idle_time() -> Iterator[None]:
    """Shorten the idle wait, so that the model process notices a closed connection sooner."""
    before, model_process.IDLE_S = model_process.IDLE_S, 0.05
    try:
        yield
    finally:
        model_process.IDLE_S = before


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Any, timeout_s: float = TIMEOUT_S) -> None:
    """Wait for a condition; raise AssertionError at the timeout."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"condition not met after {timeout_s} s"
        time.sleep(0.01)


@dataclass
class Process:
    """The `auraflux serve` command, with its stderr so far."""

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
        """Live processes of its group, without itself."""
        return [number for number in _group(self.popen.pid) if number != self.popen.pid]

    @property
    def http(self) -> int:
        """Process id of the HTTP process."""
        wait_until(lambda: any("spawn_main" in _command(number) for number in self.children))
        return next(number for number in self.children if "spawn_main" in _command(number))

    def ready(self) -> "Process":
        wait_until(lambda: is_ready(self.url) or self.popen.poll() is not None)
        assert self.popen.poll() is None, self.log
        return self

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Signal the whole process group, as a terminal and systemd do."""
        os.killpg(self.popen.pid, number)

    def end(self) -> int:
        """Wait for it and its children to end, and return its exit code."""
        code = self.popen.wait(TIMEOUT_S)
        wait_until(lambda: not _group(self.popen.pid))
        return code


@contextmanager
def process(*options: str, model: str | None = None) -> Iterator[Process]:
    """Run the command on the tiny model, on a free port unless `options` name one; kill it at the end if it still runs."""
    port = () if "--port" in options else ("--port", "0")
    command = [sys.executable, "-m", "auraflux", "serve", model or str(tiny()), "--device", "cpu", *port, *options]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root, start_new_session=True) as popen:
        started = Process(popen)
        reading = threading.Thread(target=lambda: started.lines.extend(popen.stderr or ()))
        reading.start()
        try:
            yield started
        finally:
            if _group(popen.pid):
                started.signal_all(signal.SIGKILL)
            popen.wait()
            reading.join()


def _group(leader: int) -> list[int]:
    """Return the live processes of a group."""
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
