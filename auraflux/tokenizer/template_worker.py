"""Subprocess that renders chat templates: it reads requests from stdin and replies on stdout, with time and memory limits.

A template may loop inside C code, which Python cannot interrupt. So the operating system does: an alarm ends the process at the
time limit, and its address space is limited. The parent reads the exit status (template_process.py) and starts a new process
for the next template.

A request is a length and marshalled data, a reply a length and JSON: the parent never executes a reply.
"""

import contextlib
import json
import marshal
import os
import resource
import select
import signal
import threading
import time
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.sandbox import SecurityError

from auraflux.tokenizer.template_process import LENGTH, OUT_OF_MEMORY
from auraflux.tokenizer.template_sandbox import MAX_LENGTH, Refused, Sandbox

COMPILED_CACHE = 8  # templates
MAX_ERROR_LENGTH = 400  # characters
PARENT_CHECK_S = 5.0
MEMORY_CHECK_S = 0.02


def main(memory_nbytes: int) -> None:
    """Serve requests until the parent ends."""
    try:
        _serve(memory_nbytes)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _serve(memory_nbytes: int) -> None:
    parent, replies = os.getppid(), os.dup(1)
    rendering = _limit(memory_nbytes, parent)
    # a template must not print into the replies
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while (request := _next_request(parent)) is not None:
        seconds, source, values = request
        rendering.set()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        reply = json.dumps(_reply(source, values)).encode("ascii")
        signal.setitimer(signal.ITIMER_REAL, 0)
        rendering.clear()
        _write(replies, LENGTH.pack(len(reply)) + reply)


def _limit(memory_nbytes: int, parent: int) -> threading.Event:
    """Limit memory and files of this process; return the event that is set while a template runs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, memory_nbytes)):
        # macOS does not limit address space
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
    rendering = threading.Event()
    threading.Thread(target=_watch, args=(memory_nbytes, parent, rendering), daemon=True).start()
    return rendering


def _watch(most: int, parent: int, rendering: threading.Event) -> None:
    """End the process when it exceeds its memory, as macOS has no such limit, or its parent has ended."""
    while rendering.wait():
        if os.getppid() != parent:
            os._exit(0)
        if _resident_nbytes() > most:
            os._exit(OUT_OF_MEMORY)
        time.sleep(MEMORY_CHECK_S)


def _resident_nbytes() -> int:
    try:
        # on Linux, ru_maxrss includes the peak of the process that started this one
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _next_request(parent: int) -> tuple[float, str, dict[str, Any]] | None:
    # another child of the parent may hold the pipe open after the parent has ended
    while not select.select([0], [], [], PARENT_CHECK_S)[0]:
        if os.getppid() != parent:
            return None
    head = _read(LENGTH.size)
    body = _read(LENGTH.unpack(head)[0]) if head is not None else None
    return None if body is None else marshal.loads(body)


def _read(count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        data = os.read(0, min(count - len(found), 1 << 20))
        if not data:
            return None
        found += data
    return bytes(found)


def _write(out: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(out, rest) :]


def _reply(source: str, values: dict[str, Any]) -> dict[str, str]:
    """Render a template into {"text": ...} or {"error": ...}."""
    try:
        compiled = _compiled(source)
    except jinja2.TemplateSyntaxError as err:
        return {"error": f"has an error in line {err.lineno}: {_sentence(err)}"}
    except MemoryError:
        raise
    # the compiler fails in many ways, for example on ten thousand nested brackets
    except Exception as err:
        return {"error": f"cannot be compiled: {_sentence(err)}"}
    try:
        text = compiled.render(values)
    except Refused as err:
        return {"error": f"refuses the messages: {_sentence(err)}"}
    except (SecurityError, RecursionError) as err:
        return {"error": f"was stopped: {_sentence(err)}"}
    except MemoryError:
        raise
    # a template is code and may raise anything
    except Exception as err:
        return {"error": f"failed: {_sentence(err)}"}
    if len(text) > MAX_LENGTH:
        return {"error": f"was stopped: it builds more than {MAX_LENGTH:,} characters."}
    return {"text": text}


@lru_cache(COMPILED_CACHE)
def _compiled(source: str) -> jinja2.Template:
    return Sandbox().from_string(source)


def _sentence(err: Exception) -> str:
    line = " ".join(str(err)[:MAX_ERROR_LENGTH].split()) or type(err).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
