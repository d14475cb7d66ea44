"""How the command line says no: one sentence on stderr and exit code 1."""

import contextlib
import errno
import io
import os
import sys
from typing import IO, Any

import click

from auraflux.weights.boundary import named

LONGEST = 1500  # characters of a sentence
WRITING = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EBADF}


class Failure(click.ClickException):
    """A reason to stop, told without a traceback."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        # it may name what was given, which may be anything
        said = named(self.message)
        click.echo(f"error: {said if len(said) <= LONGEST else said[:LONGEST] + '...'}", file=file, err=file is None)


def say(sentence: str) -> None:
    """Tell it on stderr, if that can be written to."""
    with contextlib.suppress(OSError):
        click.echo(sentence, err=True)


def nameless(err: OSError) -> str:
    """A sentence for an error that names no file: files are written elsewhere, so one of writing is of the output."""
    what = "the output cannot be written: " if err.errno in WRITING else ""
    return f"{what}{err.strerror or err}."


def escape_what_cannot_be_written() -> None:
    """Have characters that the output's encoding lacks written as their numbers: a locale may have ASCII only."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")


def open_output() -> None:
    """Have printing fail where stdout was closed before the program began: Python would drop the text and say nothing."""
    if sys.stdout is None:
        # open for reading, so that every write is refused
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")


def end_output() -> None:
    """Let what is still to be written to stdout go nowhere: it would fail again when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
