"""The process in which chat templates run, as seen from here: started when a template is first rendered, then kept.

A template that takes too long or too much memory ends that process, not this one; the next template gets a new one. It ends
with this process too, however that ends: what it reads from is closed then.
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
# in characters of JSON; a text has at most a sixth of it
LONGEST_ANSWER = 1 << 27
OUT_OF_MEMORY = 3  # exit status
# finds the package and what it needs where this process found them
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from auraflux.run.template_worker import main
main(int(sys.argv[2]))
"""


class TemplateProcess:
    """Renders templates elsewhere, one at a time. Threads may share it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The number of the process there is; None before the first template and after one that was ended."""
        return None if self._process is None else self._process.pid

    def render(self, source: str, values: dict[str, Any]) -> str:
        """Give the text of a template, or a TemplateError that says why there is none."""
        request = marshal.dumps((MAX_SECONDS, source, values))
        with self._turn:
            try:
                answer = self._exchange(request)
            except BaseException:
                # also Ctrl-C: an answer that nobody took must not be taken for the next one
                self._end()
                raise
        if "text" not in answer:
            raise TemplateError(f"The chat template {answer.get('error')}")
        return str(answer["text"])

    def warm_up(self) -> None:
        """Start the process, so that it is ready by the time a template is rendered."""
        # whoever renders one is told why it cannot be started
        with self._turn, contextlib.suppress(TemplateError):
            if self._process is None:
                self._process = _start()

    def close(self) -> None:
        """End the process, if there is one."""
        with self._turn:
            self._end()

    def forget(self) -> None:
        """Let go of a process that belongs to another one, from which this was forked."""
        if self._process is not None:
            _close_pipes(self._process)
            self._process.returncode = 0
        self._turn, self._process = threading.Lock(), None

    def _exchange(self, request: bytes) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _start()
        try:
            _send(self._process, LENGTH.pack(len(request)) + request)
            length = LENGTH.unpack(_receive(self._process, LENGTH.size))[0]
            return json.loads(_receive(self._process, min(length, LONGEST_ANSWER)))
        except (EOFError, BrokenPipeError, ValueError):
            raise TemplateError(f"The chat template was stopped: {_why(self._end())}.") from None

    def _end(self) -> int | None:
        """End the process; gives its exit status, its own where it had ended."""
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
        piece = process.stdout.read(count - len(found))
        if not piece:
            raise EOFError
        found += piece
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
        # a session of its own: Ctrl-C in a terminal is for this process, which then ends that one
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0, start_new_session=True)
    except OSError as err:
        raise TemplateError(f"The process that renders chat templates cannot be started: {err}.") from err


def _why(status: int | None) -> str:
    if status == -signal.SIGALRM:
        return f"it did not end within {MAX_SECONDS:g} seconds"
    if status == OUT_OF_MEMORY:
        return f"it took more than {MAX_NBYTES >> 20:,} MiB of memory"
    return f"its process ended with status {status}"


process = TemplateProcess()
atexit.register(process.close)
os.register_at_fork(after_in_child=process.forget)
