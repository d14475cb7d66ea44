"""The process that renders chat templates: it reads requests from stdin, answers on stdout, and has little time and memory.

A template may loop in C, where Python can stop nothing. So the kernel does: an alarm ends the process when the time is over,
and memory has a limit. Whoever asked sees how it ended (template_process.py) and starts another one for the next template.

A request is a length and marshalled data, an answer a length and JSON: nothing that comes from here is ever run.
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

from auraflux.run.sandbox import MAX_LENGTH, Refused, Sandbox
from auraflux.run.template_process import LENGTH, OUT_OF_MEMORY

KEPT = 8  # compiled templates
LONGEST_ERROR = 400  # characters
ASK_PARENT_S = 5.0
LOOK_S = 0.02


def main(memory_nbytes: int) -> None:
    """Answer requests until whoever asks is gone."""
    try:
        _serve(memory_nbytes)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _serve(memory_nbytes: int) -> None:
    parent, answers = os.getppid(), os.dup(1)
    rendering = _limit(memory_nbytes, parent)
    # nothing but answers may go there
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while (request := _next_request(parent)) is not None:
        seconds, source, values = request
        rendering.set()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = json.dumps(_answer(source, values)).encode("ascii")
        signal.setitimer(signal.ITIMER_REAL, 0)
        rendering.clear()
        _write(answers, LENGTH.pack(len(answer)) + answer)


def _limit(memory_nbytes: int, parent: int) -> threading.Event:
    """Bound what this process may take; gives the event that is set while a template runs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, memory_nbytes)):
        # macOS does not limit address space
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
    rendering = threading.Event()
    threading.Thread(target=_watch, args=(memory_nbytes, parent, rendering), daemon=True).start()
    return rendering


def _watch(most: int, parent: int, rendering: threading.Event) -> None:
    """End the process where it has taken more memory, the only limit there is on macOS, or nobody waits for it."""
    while rendering.wait():
        if os.getppid() != parent:
            os._exit(0)
        if _resident_nbytes() > most:
            os._exit(OUT_OF_MEMORY)
        time.sleep(LOOK_S)


def _resident_nbytes() -> int:
    try:
        # Linux counts into ru_maxrss what the process took that this one was started from
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _next_request(parent: int) -> tuple[float, str, dict[str, Any]] | None:
    # a process forked off by the one that asks may hold the pipe open after that has ended
    while not select.select([0], [], [], ASK_PARENT_S)[0]:
        if os.getppid() != parent:
            return None
    head = _read(LENGTH.size)
    body = _read(LENGTH.unpack(head)[0]) if head is not None else None
    return None if body is None else marshal.loads(body)


def _read(count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        piece = os.read(0, min(count - len(found), 1 << 20))
        if not piece:
            return None
        found += piece
    return bytes(found)


def _write(out: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(out, rest) :]


def _answer(source: str, values: dict[str, Any]) -> dict[str, str]:
    """Give the text, or a sentence about why there is none."""
    try:
        compiled = _compiled(source)
    except jinja2.TemplateSyntaxError as err:
        return {"error": f"has an error in line {err.lineno}: {_sentence(err)}"}
    except MemoryError:
        raise
    # what the compiler cannot digest, such as ten thousand brackets, comes out in many ways
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
    # a template is a program: it may fail in any way
    except Exception as err:
        return {"error": f"failed: {_sentence(err)}"}
    if len(text) > MAX_LENGTH:
        return {"error": f"was stopped: it builds more than {MAX_LENGTH:,} characters."}
    return {"text": text}


@lru_cache(KEPT)
def _compiled(source: str) -> jinja2.Template:
    return Sandbox().from_string(source)


def _sentence(err: Exception) -> str:
    line = " ".join(str(err)[:LONGEST_ERROR].split()) or type(err).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
