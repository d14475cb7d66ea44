"""A GPU that is assumed: tables can be asked what they would do on an H200 where there is none."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_assumed: ContextVar[bool] = ContextVar("assumed", default=False)


@contextmanager
def assume_hopper() -> Iterator[None]:
    """Let tensors of any device pass for an H200's inside the block, to ask what would be launched; nothing can be."""
    token = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(token)


def hopper_assumed() -> bool:
    return _assumed.get()
