"""Kernels compiled for ARM and run by qemu on any machine, with memory shared through a file."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from auraflux.ops.simd import isa
from auraflux.ops.simd.compile import cache_folder as folder_of_code
from bench.lab.cycles import TARGETS, assembly

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
BASE = 1 << 33  # address of the memory in the emulated program


def missing() -> list[str]:
    return [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]


class Machine:
    """An emulated processor with memory; create it before any kernel is imported."""

    def __init__(self, name: str, folder: Path, nbytes: int = 1 << 20):
        self.name, self.target, self.folder = name, TARGETS[name], folder
        isa.ISA = isa.ISAS[self.target.isa]
        # code that Numba compiles for this target must neither come from the JIT cache nor enter it
        folder_of_code.CACHE_FOLDER = ""
        self.file = folder / "memory"
        self.file.write_bytes(bytes(nbytes))
        self.memory = np.memmap(self.file, np.uint8, "r+")
        self._used = 0
        self._programs: dict[Any, Path] = {}

    def put(self, array: np.ndarray) -> int:
        """Copy an array into the shared memory; return its address."""
        data = np.ascontiguousarray(array)
        address = BASE + self._used
        self.memory[self._used : self._used + data.nbytes] = data.view(np.uint8).ravel()
        self._used += -(-data.nbytes // 64) * 64 + 64
        return address

    def room(self, dtype: Any, *shape: int) -> int:
        return self.put(np.full(shape, 0x7F, np.uint8).astype(dtype))

    def get(self, address: int, dtype: Any, *shape: int) -> np.ndarray:
        first, count = address - BASE, int(np.prod(shape))
        return self.memory[first : first + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape).copy()

    def here(self, address: int) -> int:
        """Return the same address in this process."""
        return self.memory.ctypes.data + address - BASE

    def run(self, kernel: Any, constants: tuple[Any, ...], *args: int | float) -> None:
        """Call a kernel; floats are passed as bits."""
        self.memory.flush()
        numbers = [int(np.float32(a).view(np.int32)) if isinstance(a, float) else int(a) for a in args]
        program = self._program(kernel, constants)
        given = [str(self.file), str(self.memory.size), str(BASE), *map(str, numbers)]
        subprocess.run([EMULATOR, "-cpu", EMULATED.get(self.name, "max"), str(program), *given], check=True, timeout=60)

    def _program(self, kernel: Any, constants: tuple[Any, ...]) -> Path:
        key = kernel, constants
        if key not in self._programs:
            program = self.folder / f"kernel{len(self._programs)}"
            source = program.with_suffix(".s")
            source.write_text(assembly(kernel, constants, {}, self.target))
            driver = Path(__file__).with_name("driver.c")
            known = "-Wa,-march=armv9-a+fp16+i8mm+bf16+sha3"
            subprocess.run([COMPILER, "-static", "-O1", known, str(driver), str(source), "-o", str(program)], check=True)
            self._programs[key] = program
        return self._programs[key]


# this qemu does not know the other processors by name
EMULATED = {"neoverse-n1": "neoverse-n1"}
