"""Levels: the processors that prebuilt kernels are compiled for, each with a fixed LLVM CPU name and list of features.

Kernels of a level run on every processor that has its features. A level serves a processor only if natively compiled kernels
would be the same but for LLVM's tuning: with the same instruction set and the same optional features.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from auraflux.ops.simd.processor import OPTIONAL


@dataclass(frozen=True)
class Level:
    """A set of processors.

    name       of the level
    isa        name of the instruction set of its kernels, see isa.py
    cpu        LLVM's name of the processor to tune for
    features   that LLVM may use
    unlisted   features that LLVM does not list for a processor that has them; those of the instruction set imply them
    """

    name: str
    isa: str
    cpu: str
    features: tuple[str, ...]
    unlisted: tuple[str, ...] = ()

    @property
    def llvm_features(self) -> str:
        """Return the features in LLVM's notation."""
        return ",".join(f"+{name}" for name in (*self.features, *self.unlisted))

    def serves(self, isa: str, features: set[str]) -> bool:
        """Return whether its kernels are those of a processor with an instruction set and features."""
        optional = {*OPTIONAL}
        return (
            self.isa == isa
            and features.issuperset(self.features)
            and features & optional == optional.intersection(self.features)
        )


V3 = (
    "avx",
    "avx2",
    "bmi",
    "bmi2",
    "cx16",
    "f16c",
    "fma",
    "lzcnt",
    "movbe",
    "popcnt",
    "sse3",
    "sse4.1",
    "sse4.2",
    "ssse3",
    "xsave",
)
V4 = (*V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
ICE_LAKE = ("avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni", "avx512vpopcntdq")
# every processor with byte dot products has these
IMPLIED = ("fullfp16", "lse")
LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level("avx512-amx", "avx512-amx", "x86-64-v4", (*V4, *ICE_LAKE, "avx512bf16", "amx-int8", "amx-tile")),
        Level("avx512-bf16", "avx512-vnni", "x86-64-v4", (*V4, *ICE_LAKE, "avx512bf16")),
        Level("avx512-vbmi", "avx512-vnni", "x86-64-v4", (*V4, *ICE_LAKE)),
        Level("avx512-vnni", "avx512-vnni", "x86-64-v4", (*V4, "avx512vnni")),
        Level("avx512", "avx2", "x86-64-v4", V4),
        Level("avx-vnni", "avx-vnni", "x86-64-v3", (*V3, "avxvnni")),
        Level("avx2", "avx2", "x86-64-v3", V3),
    ),
    "aarch64": (
        Level("neon-i8mm", "neon-i8mm", "generic", ("dotprod", "i8mm", "neon"), IMPLIED),
        Level("neon-dotprod", "neon-dotprod", "generic", ("dotprod", "neon"), IMPLIED),
    ),
}


def level_for(levels: Iterable[Level], isa: str, features: set[str]) -> Level | None:
    """Return the first level that serves a processor."""
    return next((level for level in levels if level.serves(isa, features)), None)
