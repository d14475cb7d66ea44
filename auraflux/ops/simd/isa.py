"""`ISA`, the instruction set that kernels are compiled for: the best one that the processor supports.

The environment variable `AURAFLUX_ISA` selects another from `ISAS` that the processor supports.
"""

import os

from auraflux.errors import BackendError
from auraflux.ops.simd import amx
from auraflux.ops.simd.arm import Dotprod, I8mm
from auraflux.ops.simd.portable import Isa
from auraflux.ops.simd.processor import config, cpu_features, cpu_name, machine
from auraflux.ops.simd.x86 import Avx2, Avx512, Avx512Amx, AvxVnni

ISAS = {isa.name: isa for isa in (Avx512Amx(), Avx512(), AvxVnni(), Avx2(), I8mm(), Dotprod(), Isa())}


def _choose() -> Isa:
    supported = cpu_features() if machine() in ("x86_64", "aarch64") else set()
    usable = [isa for isa in ISAS.values() if set(isa.features) <= supported and _is_permitted(isa)]
    best = next(isa for isa in usable if not cpu_name().startswith(isa.slow_on))
    wanted = os.environ.get("AURAFLUX_ISA", best.name)
    for isa in usable:
        if isa.name == wanted:
            return isa
    raise BackendError(f"AURAFLUX_ISA is {wanted!r}; this processor can run: {', '.join(isa.name for isa in usable)}.")


def _is_permitted(isa: Isa) -> bool:
    """Return whether the system lets this process use an instruction set, unless kernels are compiled for another processor."""
    return not isa.matrix_tiles or amx.is_permitted() or config.CPU_FEATURES is not None


ISA = _choose()
