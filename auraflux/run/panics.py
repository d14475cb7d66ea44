"""Panics of the tokenizers package: Rust prints them, with a backtrace, before Python has an error to catch."""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from auraflux.errors import FormatError
from auraflux.weights.boundary import brief, read_json, shown

STDERR = 2
_alone = threading.Lock()


@contextmanager
def unprinted() -> Iterator[None]:
    """Keep what is printed to stderr inside the block until it ends, and drop it where the block fails."""
    with _alone, ExitStack() as stack:
        try:
            terminal = os.dup(STDERR)
            stack.callback(os.close, terminal)
            kept = stack.enter_context(tempfile.TemporaryFile())
        # it is closed, or there is no room for a file; a backtrace on the terminal is the lesser evil
        except OSError:
            yield
            return
        os.dup2(kept.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(terminal, STDERR)
        kept.seek(0)
        # of other threads
        if said := kept.read():
            os.write(terminal, said)


def cause(path: Path, err: BaseException) -> str:
    """Say why a tokenizer.json cannot be read: its first merge that gives no token, or what the package says."""
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
    # it is no JSON, or none of this kind
    except (FormatError, KeyError, TypeError, ValueError, AttributeError):
        pass
    return brief(err)
