"""The processor that Numba compiles for: architecture, LLVM's CPU name, features, cache lines."""

import platform
from typing import Any

import llvmlite.binding as llvm
from numba.core import config as _config

# Numba sets its attributes at import, invisible to type checkers
config: Any = _config

LINE = 64  # bytes in a cache line
# features that kernels use where the processor has them, besides those of their instruction set
OPTIONAL = ("f16c", "avx512vbmi", "avx512bf16")


def has_feature(name: str) -> bool:
    """Return whether Numba compiles for one of the features in `OPTIONAL`."""
    assert name in OPTIONAL, f"{name} is not in OPTIONAL: prebuilt kernels would not depend on it"
    return name in cpu_features()


def cpu_features() -> set[str]:
    """Return the features that Numba compiles for: its setting, or LLVM's detection; ARM's byte dot products are probed."""
    given = config.CPU_FEATURES
    found = {name for name, there in llvm.get_host_cpu_features().items() if there}
    if given is not None:
        found = {name[1:] for name in given.split(",") if name.startswith("+")}
    if machine() == "aarch64":
        found |= _byte_products(given)
    return found


def cpu_name() -> str:
    """Return LLVM's name of the processor that Numba compiles for."""
    return config.CPU_NAME or llvm.get_host_cpu_name()


def machine() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


# by feature: the instruction LLVM selects for a sum of byte products, and the extension of the first operand that leads to it
BYTE_PRODUCTS = {"dotprod": ("sdot", "sext"), "i8mm": ("usdot", "zext")}


def _byte_products(features: str | None) -> set[str]:
    """Return the byte dot-product features that LLVM supports for this processor.

    On ARM, LLVM's feature list omits them, and emitting an unsupported instruction aborts the process. So generic sums of
    products are compiled, and the assembly shows whether LLVM selects the instruction.
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
    # the assembly parser is for the inline assembly of ARM kernels
    for initialize in (llvm.initialize_native_target, llvm.initialize_native_asmprinter, llvm.initialize_native_asmparser):
        initialize()
    features = llvm.get_host_cpu_features().flatten() if features is None else features
    target = llvm.Target.from_default_triple().create_target_machine(cpu=cpu_name(), features=features)
    return {
        feature
        for feature, (instruction, widen) in BYTE_PRODUCTS.items()
        if instruction in target.emit_assembly(llvm.parse_assembly(source.replace("WIDEN", widen)))
    }
