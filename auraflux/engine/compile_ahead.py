"""Compilation of a GPU's kernels on all cores before work that would compile them one by one."""

import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("auraflux")


def compile_ahead(work: Callable[[], Any], device: torch.device) -> None:
    """Run work on a GPU without launching its kernels, which are compiled meanwhile; its results mean nothing."""
    if device.type != "cuda":
        return
    try:
        from auraflux.ops.gpu import ahead
    except ImportError:
        # no Triton, or an incompatible version
        return
    if not ahead.is_supported():
        return
    try:
        with ahead.compiler() as compiler:
            with ahead.compile_launches_ahead(compiler):
                work()
            compiler.wait(lambda done, total: None)
    except Exception as err:
        log.warning("compiling kernels one by one: %s", err)
