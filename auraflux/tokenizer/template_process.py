"""Client of the subprocess that renders chat templates; started on first use, then reused.

A template that exceeds its time or memory limit ends the subprocess only, and the next template starts a new one. It also
ends with this process, whose end closes its stdin.
"""

import atexit
import contextlib
import json
import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
from typing import Any

from auraflux.errors import TemplateError

MAX_SECONDS = 10.0
MAX_NBYTES = 1 << 30
LENGTH = struct.Struct("<Q")
# in characters of JSON; an escaped character takes six
MAX_REPLY_LENGTH = 1 << 27
OUT_OF_MEMORY = 3  # exit status
# imports the package and its dependencies from the same paths
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from auraflux.tokenizer.template_worker import main
main(int(sys.argv[2]))
"""


class TemplateProcess:
    """Subprocess that renders one template at a time; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the first template and after one that exceeded a limit."""
        return None if self._process is None else self._process.pid

    def render(self, source: str, values: dict[str, Any]) -> str:
        """Render a template; raise TemplateError with the reason if it fails."""
        request = marshal.dumps((MAX_SECONDS, source, values))
        with self._lock:
            try:
                reply = self._exchange(request)
            except BaseException:
                # also on Ctrl-C: a reply left in the pipe would be returned for the next request
                self._end()
                raise
        if "text" not in reply:
            raise TemplateError(f"The chat template {reply.get('error')}")
        return str(reply["text"])

    def warm_up(self) -> None:
        """Start the process ahead of the first template."""
        # a failure to start is raised again by `render`
        with self._lock, contextlib.suppress(TemplateError):
            if self._process is None:
                self._process = _start()

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Drop the subprocess of the parent after a fork."""
        if self._process is not None:
            _close_pipes(self._process)
            self._process.returncode = 0
        self._lock, self._process = threading.Lock(), None

    def _exchange(self, request: bytes) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _start()
        try:
            _send(self._process, LENGTH.pack(len(request)) + request)
            length = LENGTH.unpack(_receive(self._process, LENGTH.size))[0]
            return json.loads(_receive(self._process, min(length, MAX_REPLY_LENGTH)))
        except (EOFError, BrokenPipeError, ValueError):
            raise TemplateError(f"The chat template was stopped: {_why(self._end())}.") from None

    def _end(self) -> int | None:
        """Kill the process and return its exit status, the original one if it had already ended."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        _close_pipes(process)
        return process.wait()


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(data)
    while rest:
        rest = rest[process.stdin.write(rest) :]


def _receive(process: subprocess.Popen[bytes], count: int) -> bytes:
    assert process.stdout is not None
    found = bytearray()
    while len(found) < count:
        data = process.stdout.read(count - len(found))
        if not data:
            raise EOFError
        found += data
    return bytes(found)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _start() -> subprocess.Popen[bytes]:
    # -I: nothing is imported from the working folder
    command = [sys.executable, "-I", "-c", START, json.dumps(sys.path), str(MAX_NBYTES)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    try:
        # a new session: Ctrl-C in a terminal must reach this process only, which then ends the other
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0, start_new_session=True)
    except OSError as err:
        raise TemplateError(f"The process that renders chat templates cannot be started: {err}.") from err


def _why(status: int | None) -> str:
    if status == -signal.SIGALRM:
        return f"it ran longer than {MAX_SECONDS:g} seconds"
    if status == OUT_OF_MEMORY:
        return f"it used more than {MAX_NBYTES >> 20:,} MiB of memory"
    return f"its process ended with status {status}"


process = TemplateProcess()
atexit.register(process.close)
os.register_at_fork(after_in_child=process.forget)
