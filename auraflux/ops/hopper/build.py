"""One specialisation of a kernel, to be compiled without a GPU; see `compile.py`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel, compiled for Hopper by a test that needs no GPU.

    kernel     a function under @triton.jit or @gluon.jit
    types      those of the arguments that are not constants, in order: "*bf16 *fp32 i32:16 fp32"; i32:16 is a multiple of 16,
               and pointers always are
    constants  by name: the constexpr arguments, None for pointers that are left out, 1 for strides that are
    hot        part of decoding a token or of prefill: it may not spill registers
    options    of the launch: num_warps, num_stages, maxnreg
    """

    kernel: Any
    types: str
    constants: dict[str, Any] = field(default_factory=dict)
    hot: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        constants = " ".join(f"{key}={value}" for key, value in self.constants.items())
        return f"{self.kernel.__name__} {self.types} {constants}".strip()
