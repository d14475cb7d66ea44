"""Ctrl-C in every phase of a command: one line on stderr and exit code 130.

`leave` ends the process at once. It is the handler while there is nothing to clean up: during the first imports, while arguments
are parsed, and at exit. In between, a command gets a KeyboardInterrupt. Handlers that were set before, such as "ignore" of a job
in the background, stay.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
REPEAT_S = 0.02


def leave(*_: Any) -> None:
    """End the process with one line, without exit handlers."""
    with contextlib.suppress(OSError):
        # Ctrl-C of a terminal leaves "^C" in the line
        os.write(2, b"\nInterrupted.\n" if os.isatty(2) else b"Interrupted.\n")
    os._exit(INTERRUPTED)


def leave_when_interrupted() -> None:
    """End the process at interrupts from here on."""
    _replace(signal.default_int_handler, leave)


def raise_when_interrupted() -> None:
    """Raise KeyboardInterrupt at interrupts from here on."""
    _replace(leave, signal.default_int_handler)


def _replace(old: Any, new: Any) -> None:
    # only the main thread may set handlers
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def is_interrupt(err: BaseException | None) -> bool:
    """Tell whether an error is an interrupt, or follows from one, as extension modules turn it into an ImportError."""
    while err is not None and not isinstance(err, KeyboardInterrupt):
        err = err.__cause__ or err.__context__
    return err is not None


def repeat_lost_interrupts() -> None:
    """Interrupt again where an interrupt hits a callback or a destructor, whose errors Python prints and drops."""
    show = sys.unraisablehook

    def hook(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            # at once, it would be lost in this function
            timer = threading.Timer(REPEAT_S, _thread.interrupt_main)
            timer.daemon = True
            timer.start()
        else:
            show(lost)

    sys.unraisablehook = hook
