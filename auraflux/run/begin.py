"""Beginning to compile what a CPU will most likely need, before it is known what model needs it.

It imports no more than that takes, so that the command line can begin while it imports the rest.
"""

import sys

from auraflux.cache import CacheSettings


def begin_compiling(settings: CacheSettings, exact: bool) -> None:
    """Begin with the kernels of attention over codes, the largest there are."""
    if settings.kv == "none":
        return
    # they need Numba, which a GPU does without
    from auraflux.ops.simd.ahead import begin
    from auraflux.ops.turboquant.cpu.attend import attend_float32, attend_int8, attend_kept

    begin([attend_kept, attend_float32 if exact else attend_int8])


def end_compiling() -> None:
    """Stop that, where no model will ask for it."""
    if (ahead := sys.modules.get("auraflux.ops.simd.ahead")) is not None:
        ahead.end_early()
