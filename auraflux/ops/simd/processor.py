"""The processor that Numba compiles for: its kind, LLVM's name of it, its features."""

import platform
from typing import Any

import llvmlite.binding as llvm
from numba.core import config as _config

# its names are made when it is imported, out of sight of type checkers
config: Any = _config


def cpu_features() -> set[str]:
    """What Numba compiles for: its own settings, or what LLVM sees; ARM's products of bytes are found by trying."""
    given = config.CPU_FEATURES
    found = {name for name, there in llvm.get_host_cpu_features().items() if there}
    if given is not None:
        found = {name[1:] for name in given.split(",") if name.startswith("+")}
    if machine() == "aarch64":
        found |= _byte_products(given)
    return found


def cpu_name() -> str:
    """LLVM's name of the processor that Numba compiles for."""
    return config.CPU_NAME or llvm.get_host_cpu_name()


def machine() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


# an instruction that LLVM makes of a plain sum of byte products where it knows of a feature, and what it makes it of
BYTE_PRODUCTS = {"dotprod": ("sdot", "sext"), "i8mm": ("usdot", "zext")}


def _byte_products(features: str | None) -> set[str]:
    """Which products of bytes LLVM knows of for this processor.

    On ARM its list of features leaves them out, and asking for an instruction that LLVM does not know of ends the process. So
    sums that may become the instruction, or may not, are compiled and the result read.
    """
    source = """
define i32 @dot(<16 x i8> %a, <16 x i8> %b) {
  %x = WIDEN <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %p = mul <16 x i32> %x, %y
  %s = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %p)
  ret i32 %s
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""
    # kernels for ARM have lines of assembly, which the last reads
    for initialize in (llvm.initialize_native_target, llvm.initialize_native_asmprinter, llvm.initialize_native_asmparser):
        initialize()
    features = llvm.get_host_cpu_features().flatten() if features is None else features
    target = llvm.Target.from_default_triple().create_target_machine(cpu=cpu_name(), features=features)
    return {
        feature
        for feature, (instruction, widen) in BYTE_PRODUCTS.items()
        if instruction in target.emit_assembly(llvm.parse_assembly(source.replace("WIDEN", widen)))
    }
