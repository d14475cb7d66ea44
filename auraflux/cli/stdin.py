"""What commands read from stdin, which may be closed or hold anything."""

import sys
from typing import TextIO

from auraflux.errors import InputError


def stdin() -> TextIO:
    """The stream, or an InputError where it was closed before the program began."""
    if sys.stdin is None:
        raise InputError("stdin is closed, so nothing can be read from it.")
    return sys.stdin


def read_all() -> str:
    """Read all of stdin's text."""
    try:
        return stdin().read()
    except UnicodeDecodeError as err:
        raise InputError(f"stdin is not text: {err}.") from err


def read_line() -> str | None:
    """Read stdin's next line; None at the end."""
    try:
        return stdin().readline() or None
    except UnicodeDecodeError as err:
        raise InputError(f"stdin is not text: {err}.") from err
