"""Ctrl-C in every phase of a command: one line on stderr and exit code 130.

While there is nothing to clean up, the process ends at once: during the first imports, while arguments are parsed, and at exit.
In between, a command gets a KeyboardInterrupt, but not within an import: a module that is cut short stays behind broken, and
some turn the interrupt into an error or drop it. Handlers that were set before, such as "ignore" of a job in the background,
stay.
"""

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT
REPEAT_S = 0.02
IMPORTS = "<frozen importlib._bootstrap"  # code of the import system


def leave_when_interrupted() -> None:
    """End the process at interrupts from here on."""
    _replace((signal.default_int_handler, _interrupt), _leave)


def raise_when_interrupted() -> None:
    """Raise KeyboardInterrupt at interrupts from here on."""
    _replace((_leave,), _interrupt)


def _replace(old: tuple[Any, ...], new: Any) -> None:
    # only the main thread may set handlers
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in old:
        signal.signal(signal.SIGINT, new)


def _leave(*_: Any) -> None:
    with contextlib.suppress(OSError):
        # Ctrl-C of a terminal leaves "^C" in the line, and a progress bar hides the cursor
        os.write(2, b"\x1b[?25h\nInterrupted.\n" if os.isatty(2) else b"Interrupted.\n")
    os._exit(INTERRUPTED)


def _imports_torch() -> bool:
    """Tell whether torch is being imported, which takes seconds; no command has written anything before."""
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTS):
            return _leave() if _imports_torch() else _repeat()
        frame = frame.f_back
    raise KeyboardInterrupt


def _repeat() -> None:
    """Interrupt the main thread again after a moment."""

    def wait() -> None:
        time.sleep(REPEAT_S)
        # a signal also ends what the main thread waits for, unlike `_thread.interrupt_main`
        if (main := threading.main_thread().ident) is not None:
            signal.pthread_kill(main, signal.SIGINT)

    # the interrupted code may hold the locks of `threading`
    _thread.start_new_thread(wait, ())


def repeat_lost_interrupts() -> None:
    """Interrupt again where an interrupt hits a callback or a destructor, whose errors Python prints and drops."""
    show = sys.unraisablehook

    def hook(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            _repeat()
        else:
            show(lost)

    sys.unraisablehook = hook


def is_interrupt(err: BaseException | None) -> bool:
    """Tell whether an error is an interrupt or follows from one."""
    while err is not None and not isinstance(err, KeyboardInterrupt):
        err = err.__cause__ or err.__context__
    return err is not None


def exit_interrupted() -> NoReturn:
    """Exit with code 130.

    After an interrupt within `exec`, as dataclasses use it, Python would end by SIGINT, whatever the code of SystemExit.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)
