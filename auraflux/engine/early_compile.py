"""Compilation of the CPU kernels that any model needs, started before the model is known.

It imports little, so that compilation overlaps with the remaining imports of the command line.
"""

import sys

from auraflux.cache import CacheSettings


def start_compiling(settings: CacheSettings, exact: bool) -> None:
    """Start compiling the kernels of attention over a quantized KV cache, the slowest to compile."""
    if settings.kv == "none":
        return
    # imported here: they need Numba, which a GPU does not
    from auraflux.ops.simd.compile.ahead import start_early
    from auraflux.ops.turboquant.cpu.attend import attend_float32, attend_int8, attend_window

    start_early([attend_window, attend_float32 if exact else attend_int8])


def stop_compiling() -> None:
    """Stop the early compilation if no model used it."""
    if (ahead := sys.modules.get("auraflux.ops.simd.compile.ahead")) is not None:
        ahead.cancel_early()
