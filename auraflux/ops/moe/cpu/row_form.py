"""`RowForm`: the format of a row-major weight as the CPU kernels of row_major.py see it, and the arithmetic they use."""

from typing import NamedTuple

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import LINE
from auraflux.ops.simd.processor import has_feature

LANES = ISA.lanes
HAS_TABLES = LANES == 16  # one AVX-512 instruction looks up 16 float32 values, or 32 of 16 bits
HAS_BF16 = HAS_TABLES and has_feature("avx512bf16")
SCALE_NBYTES = {"bf16": 2, "f16": 2, "f32": 4}


class RowForm(NamedTuple):
    """The format of a row-major weight, and the arithmetic of its products.

    kind  the dtype of scales and biases
    bf16  codes become bf16 instead of float32
    """

    bits: int
    group: int
    kind: str
    bf16: bool

    @property
    def text(self) -> str:
        return f"{self.bits} {self.group} {self.kind} {int(self.bf16)}"

    @classmethod
    def parse(cls, text: str) -> "RowForm":
        bits, group, kind, bf16 = text.split()
        return cls(int(bits), int(group), kind, bf16 == "1")

    @property
    def scale_nbytes(self) -> int:
        return SCALE_NBYTES[self.kind]

    @property
    def parts(self) -> int:
        """Vectors of values that a vector of words holds."""
        return (16 if self.bf16 else 32) // self.bits

    @property
    def step(self) -> int:
        """Inputs of a vector of words."""
        return LANES * 32 // self.bits

    @property
    def step_nbytes(self) -> int:
        """Bytes of the permuted activations of a step."""
        return self.step * (2 if self.bf16 else 4)

    @property
    def unit(self) -> int:
        """Inputs of an iteration: a step, or a group if that is longer."""
        return max(self.step, self.group)

    @property
    def unit_groups(self) -> int:
        return self.unit // self.group

    def token_nbytes(self, width: int) -> int:
        """Return the bytes of a token's permuted activations, padded to full units, and of its sums."""
        return self.sums_offset(width) + -(-4 * width // self.group // LINE) * LINE

    def sums_offset(self, width: int) -> int:
        """Return the offset of a token's sums per group."""
        return -(-width // self.unit) * self.unit // self.step * self.step_nbytes
