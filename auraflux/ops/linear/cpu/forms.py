"""Formats that the quantized product kernels are compiled for: codes, scales and activations, fast or exact."""

from typing import NamedTuple

from llvmlite import ir

from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.processor import has_feature
from auraflux.ops.simd.vectors import I16, MAGIC, MAGIC_BITS, splat, vector
from auraflux.quant import grids
from auraflux.quant.levels import IQ4
from auraflux.quant.packing import CHUNK
from auraflux.quant.super_blocks import SIZE


class Form(NamedTuple):
    """Format that a kernel is compiled for; `text` passes it through Numba as one compile-time constant.

    activation_bits  8 or 16 for the byte dot product (e4m3: 8 for half precision), 32 for float32
    bits, group  of the codes
    kind   dtype of scales: bf16, f16, f32, or e8m0 (MXFP4 exponents, no biases); without biases and with scales in f32
           (f16: iq4_nl, q4_0): e4m3 (FP8 codes), centred, q4_0, iq4, iq4_nl and nvfp4 (see `quant/levels.py`), and the
           grids (`quant/grids.py`)
    words  of a super-block, which has f32 scales and biases in another form (see `quant/super_blocks.py`); halves of a grid's;
           0 without them
    """

    activation_bits: int
    bits: int
    group: int
    kind: str
    words: int = 0

    @property
    def text(self) -> str:
        return f"{self.activation_bits} {self.bits} {self.group} {self.kind} {self.words}"

    @classmethod
    def parse(cls, text: str) -> "Form":
        activation_bits, bits, group, kind, words = text.split()
        return cls(int(activation_bits), int(bits), int(group), kind, int(words))

    @property
    def grid(self) -> grids.Grid | None:
        """The grid format; None for other codes."""
        return grids.FORMATS.get(self.kind)

    @property
    def by_entry(self) -> bool:
        """Entries of a grid are looked up in registers, not in memory."""
        return IN_REGISTERS and self.kind in SMALL_GRIDS

    @property
    def lift(self) -> int:
        """Power of two by which scales and biases are scaled down, because they start as denormal floats.

        Sums of codes and of activations are scaled up by as much, which limits activations to 2**100.
        """
        return 23 if self.words and self.grid is None and self.kind != "nvfp4" and ISA.small_unit < 1 else 0

    @property
    def magic(self) -> tuple[int, float]:
        """Initial value of integer sums, see `MAGIC`, as bits and as a float."""
        return MAGIC_BITS + (self.lift << 23), MAGIC * 2.0**self.lift

    @property
    def scales_of(self) -> tuple[int, int]:
        """Number of scales, or words of a super-block, and of the inputs that they cover."""
        return (self.words, SIZE) if self.words else (1, self.group)

    @property
    def scale_nbytes(self) -> int:
        return {"bf16": 2, "f16": 2, "iq4_nl": 2, "q4_0": 2, "e8m0": 1}.get(self.kind, 4 if self.grid is None else 2)

    @property
    def has_biases(self) -> bool:
        return self.kind in ("bf16", "f16", "f32")

    @property
    def lowest_precision(self) -> bool:
        """Activations are int8; half precision for e4m3."""
        return self.activation_bits == 8

    @property
    def digits(self) -> int:
        """Bytes of an activation for the byte dot product; 0 for float32 activations."""
        if self.kind == "e4m3":
            return 0
        return {8: 1, 16: 2}.get(self.activation_bits, ISA.digits)

    @property
    def halves(self) -> bool:
        """Activations and sums of a group are half precision, which represents e4m3 / 256 exactly."""
        return self.kind == "e4m3" and self.lowest_precision

    @property
    def raw(self) -> bool:
        """Float32 activations are scaled, for weights with e4m3 exponents."""
        return self.kind == "e4m3" and ISA.denormals and not self.lowest_precision

    @property
    def by_halves(self) -> bool:
        """E4m3 codes become half precision, over 256, and then float32."""
        return self.kind == "e4m3" and ISA.widens_halves and not ISA.denormals

    @property
    def act_nbytes(self) -> int:
        return self.digits or 4

    @property
    def unpacked_nbytes(self) -> int:
        """Bytes of an unpacked code."""
        if self.halves:
            return 2
        return 1 if self.digits else 4

    @property
    def value_bits(self) -> int:
        """Significant bits of the dot product's weight bytes."""
        if self.grid is not None:
            return 7
        if self.kind in LEVELS and not self.signed:
            return (max(LEVELS[self.kind]) - min(LEVELS[self.kind])).bit_length()
        return self.bits

    @property
    def signed(self) -> bool:
        """Levels are looked up as signed values."""
        if self.grid is not None:
            return ISA.by_lane or not self.digits
        return self.kind in LEVELS and ISA.by_lane and self.digits > 0

    @property
    def table(self) -> list[int]:
        """Lookup table of codes, as signed bytes."""
        least = 0 if self.signed else min(LEVELS[self.kind])
        return [(level - least + 128) % 256 - 128 for level in LEVELS[self.kind]]

    @property
    def zero(self) -> int:
        """Zero point of the dot product's weight bytes, for formats without biases."""
        if self.grid is not None:
            return 0 if self.signed else 64 if self.grid.has_signs else 16
        if self.kind in LEVELS:
            found = 0 if self.signed else -min(LEVELS[self.kind])
        else:
            found = 2 ** (self.bits - 1) if self.kind in ("centred", "q4_0") else 0
        return found - 128 if self.digits and self.value_bits == 8 and ISA.signed_codes else found

    @property
    def unit(self) -> float:
        """Unit of codes, which activations include; MXFP4's scales do."""
        if self.by_halves:
            return 256.0
        if self.grid is not None:
            return self.grid.unit
        return 0.5 if self.kind == "nvfp4" else 1.0

    @property
    def span(self) -> int:
        """Inputs per loop iteration: a group, or the groups of a chunk."""
        return max(self.group, CHUNK)

    @property
    def parts(self) -> int:
        """Groups of a span."""
        return self.span // self.group


BLOCK = ISA.lanes
IN_REGISTERS = ISA.name.startswith("avx512") and has_feature("avx512vbmi")
# a gather is faster from 1024 entries on: by half with IQ2_S on two Sapphire Rapids cores
SMALL_GRIDS = ("iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s")
FLOATS, INTS, BYTES = ISA.floats, ISA.ints, ISA.bytes

# twice the MXFP4 levels: integers
TWICE = tuple(sign * v for sign in (1, -1) for v in (0, 1, 2, 3, 4, 6, 8, 12))
LEVELS = {"e8m0": TWICE, "nvfp4": TWICE, "iq4": IQ4, "iq4_nl": IQ4}
# exponent of a group's largest activation where e4m3 is divided by 2**120: products stay far from float32's limits
MIDDLE = 60
# the same for half-precision activations and e4m3 / 256: 64 products of a group's 128 stay below 65504, and values as small
# as the smallest normal e4m3 have all their bits
HALF_MIDDLE = 8
HALVES = ISA.halves


def activation_order(bits: int) -> list[int]:
    """Return the inputs of the bytes of eight consecutive code vectors: words are split by shifts, without a permutation."""
    per_word = 32 // bits if 32 % bits == 0 else 4
    step = per_word // 4
    return [word + part + step * i for word in range(0, CHUNK, per_word) for part in range(step) for i in range(4)]


def float_order(form: Form) -> list[int]:
    """Return where each input of a chunk is in float32 activations; the order is its own inverse."""
    four = (0, 2, 1, 3) if form.by_halves else (0, 1, 2, 3)
    return [first + place for first in range(0, CHUNK, 4) for place in four]


def half_floats(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Widen f16 in 32-bit lanes."""
    if ISA.widens_halves:
        return b.fpext(b.bitcast(b.trunc(bits, vector(I16, BLOCK)), vector(ir.HalfType(), BLOCK)), FLOATS)
    # by integer operations: processors without a conversion instruction would need a library call
    size = b.shl(b.and_(bits, splat(INTS, 0x7FFF)), splat(INTS, 13))
    value = b.bitcast(b.fmul(b.bitcast(size, FLOATS), splat(FLOATS, 2.0**112)), INTS)
    special = b.icmp_unsigned(">=", size, splat(INTS, 0x7C00 << 13))
    value = b.select(special, b.or_(size, splat(INTS, 0x7F800000)), value)
    return b.bitcast(b.or_(value, b.shl(b.and_(bits, splat(INTS, 0x8000)), splat(INTS, 16))), FLOATS)
