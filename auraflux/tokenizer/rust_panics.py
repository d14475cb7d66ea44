"""Panics of the tokenizers package: Rust prints a backtrace to stderr before Python can catch the error."""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from auraflux.errors import FormatError
from auraflux.weights.formats.untrusted import brief, read_json, shown

STDERR = 2
_stderr_lock = threading.Lock()


@contextmanager
def suppress_stderr() -> Iterator[None]:
    """Buffer stderr inside the block; print it when the block succeeds, drop it when it fails."""
    with _stderr_lock, ExitStack() as stack:
        try:
            terminal = os.dup(STDERR)
            stack.callback(os.close, terminal)
            buffer = stack.enter_context(tempfile.TemporaryFile())
        # stderr is closed or the disk is full: a backtrace on the terminal does less harm than a failure
        except OSError:
            yield
            return
        os.dup2(buffer.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(terminal, STDERR)
        buffer.seek(0)
        # output of other threads
        if said := buffer.read():
            os.write(terminal, said)


def load_failure(path: Path, err: BaseException) -> str:
    """Return why a tokenizer.json is invalid: its first merge without a token, or the error of the package."""
    try:
        model = read_json(path, path.parent)["model"]
        vocabulary, prefix = model["vocab"], model.get("continuing_subword_prefix") or ""
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            for part in (left, right, left + right[len(prefix) :]):
                if part not in vocabulary:
                    return f"it merges {shown(left)} and {shown(right)}, but has no token {shown(part)}"
            if not right.startswith(prefix):
                return f"it merges {shown(left)} and {shown(right)}, which does not begin with {shown(prefix)}"
    # not JSON, or another kind of model
    except (FormatError, KeyError, TypeError, ValueError, AttributeError):
        pass
    return brief(err)
