"""Failures of the command line: one sentence on stderr and exit code 1."""

import contextlib
import errno
import io
import os
import sys
from typing import IO, Any

import click

from auraflux.weights.formats.untrusted import named

MAX_CHARACTERS = 1500
WRITE_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EBADF}


class Failure(click.ClickException):
    """An error printed as one sentence without a traceback."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        # the message may contain user input with any characters
        message = named(self.message)
        if len(message) > MAX_CHARACTERS:
            message = message[:MAX_CHARACTERS] + "..."
        click.echo(f"error: {message}", file=file, err=file is None)


def print_error(sentence: str) -> None:
    """Print a sentence on stderr, if that is writable."""
    with contextlib.suppress(OSError):
        click.echo(sentence, err=True)


def describe_os_error(err: OSError) -> str:
    """Describe an OS error without a file name; a write error is one of the output, because files have names."""
    what = "the output cannot be written: " if err.errno in WRITE_ERRORS else ""
    return f"{what}{err.strerror or err}."


def escape_unencodable() -> None:
    """Print characters that the output encoding lacks, such as ASCII, as escape sequences."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")


def open_output() -> None:
    """Make printing fail if stdout was closed at start; Python would drop the output without an error."""
    if sys.stdout is None:
        # opened for reading, so every write fails
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")


def discard_output() -> None:
    """Discard buffered output: flushing it would fail again at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
