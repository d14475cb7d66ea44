"""Reads from stdin, which may be closed or not be text."""

import sys
from typing import TextIO

from auraflux.errors import InputError


def stdin() -> TextIO:
    """Return stdin; raise InputError if it was closed at start."""
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
