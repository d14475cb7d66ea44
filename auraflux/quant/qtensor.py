"""`QTensor`: a weight matrix held as codes.

`packed`, `scales` and `biases` are the arrays of MLX's format, with the rows of the matrix in their natural order (`lanes` 1)
or with `lanes` rows side by side: then element i of each of those rows lies in adjacent memory, so that one vector load of the
CPU kernels meets as many rows as the vector has 32-bit lanes. The words are the same, transposed within blocks of rows; but
codes of 3, 5 and 6 bits are then in other places of their words, see `packing.py`.

Formats in super-blocks (`super_blocks.py`) have words in place of scales and biases. `widened` writes these out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.kinds import check_fields
from auraflux.quant import affine, levels, mxfp4, super_blocks
from auraflux.quant.packing import CHUNK, placed, unpack, unplaced

CODES = torch.float8_e4m3fn


class Unbiased(NamedTuple):
    """A format without biases: how it is called in words, its scales' dtype, its bits and its groups of inputs."""

    title: str
    scales: torch.dtype
    bits: tuple[int, ...]
    groups: tuple[int, ...]


UNBIASED = {
    "mxfp4": Unbiased("MXFP4", torch.uint8, (mxfp4.BITS,), (mxfp4.GROUP,)),
    "fp8": Unbiased("FP8", torch.float32, (8,), affine.GROUPS),
    "centred": Unbiased("centred codes", torch.float32, levels.CENTRED_BITS, (16,)),
    "iq4": Unbiased("IQ4", torch.float32, (4,), (32,)),
    "nvfp4": Unbiased("NVFP4", torch.float32, (4,), (16,)),
    **{kind: Unbiased(kind.upper(), torch.int32, (one.bits,), (one.group,)) for kind, one in super_blocks.FORMATS.items()},
}
KINDS = ("affine", *UNBIASED)
NOT_IN_MLX = ("fp8", *levels.KINDS)


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized weight [N, K], or a stack of them [E, N, K].

    packed   int32 [..., N, K*bits/32]; with lanes [..., N/lanes, K*bits/32, lanes], N rounded up to whole blocks
    scales   [..., N, K/group] or [..., N/lanes, K/group, lanes]; bf16, f16 or f32, for MXFP4 uint8 exponents, for other
             formats without biases f32; in super-blocks int32 words, fewer than groups
    biases   like scales; None for all formats but the affine one
    shape    of the matrix or stack it stands for
    """

    packed: Tensor
    scales: Tensor
    biases: Tensor | None
    bits: int
    group: int
    shape: tuple[int, ...]
    lanes: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_format(self.bits, self.group, self.kind, affine.HELD_GROUPS)
        if len(self.shape) < 2 or self.lanes < 1:
            raise FormatError(f"a weight has rows and columns, not shape {list(self.shape)} in blocks of {self.lanes} rows.")
        *stack, rows, width = self.shape
        if len(stack) > 1 or width % self.whole:
            raise FormatError(
                f"a weight of shape {list(self.shape)} cannot be held in "
                f"{'groups' if self.super_block is None else 'super-blocks'} of "
                f"{self.group if self.super_block is None else self.whole} along its last axis."
            )
        if self.packed.dtype != torch.int32:
            raise FormatError(f"packed codes have dtype {self.packed.dtype}; int32 is needed (view uint32 words as int32).")
        if self.super_block is not None and self.packed.is_cuda:
            raise FormatError(f"kernels of a GPU read no super-blocks; `widened` writes out the scales of this {self.kind}.")
        dtypes = affine.SCALE_DTYPES if self.biases is not None else (torch.uint8, torch.float32, torch.int32)
        for name in ("scales", "biases"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype not in dtypes:
                raise FormatError(f"{name} have dtype {tensor.dtype}; {self.kind} holds {' or '.join(map(str, dtypes))}.")
        scales = scale_count(self.kind, width, self.group)
        for name, count in (("packed", width * self.bits // 32), ("scales", scales), ("biases", scales)):
            tensor = getattr(self, name)
            wanted = (*stack, -(-rows // self.lanes), count, self.lanes) if self.lanes > 1 else (*stack, rows, count)
            if tensor is not None and tuple(tensor.shape) != wanted:
                shape = list(tensor.shape)
                raise FormatError(
                    f"{name} have shape {shape}; {list(wanted)} is needed for a {self.bits}-bit {list(self.shape)}."
                )
            if tensor is not None and tensor.device != self.packed.device:
                raise FormatError(f"{name} are on {tensor.device}, the codes on {self.packed.device}.")

    @cached_property
    def kind(self) -> str:
        if self.biases is not None:
            return "affine"
        found = _unbiased(self.scales.dtype, self.bits, self.group)
        if found == "q4_k":
            words = self.scales.shape[-2 if self.lanes > 1 else -1]
            return "iq4_xs" if words * super_blocks.SIZE == self.shape[-1] * super_blocks.FORMATS["iq4_xs"].words else found
        return found

    @cached_property
    def super_block(self) -> super_blocks.SuperBlock | None:
        """The format's super-blocks, if it has any."""
        return super_blocks.FORMATS.get(self.kind)

    @cached_property
    def whole(self) -> int:
        """Columns that cannot be cut apart."""
        return max(self.group, CHUNK) if self.super_block is None else super_blocks.SIZE

    @cached_property
    def device(self) -> torch.device:
        return self.packed.device

    @cached_property
    def is_cpu(self) -> bool:
        return self.packed.is_cpu

    @cached_property
    def format(self) -> tuple[int, int, int, torch.dtype | str]:
        """What a kernel is compiled for: bits, group, how many rows lie side by side, the scales' dtype, or the kind."""
        held = self.kind if self.kind in NOT_IN_MLX or self.super_block is not None else self.scales.dtype
        return self.bits, self.group, self.lanes, held

    @property
    def in_mlx(self) -> bool:
        """Whether MLX has such a format; one in super-blocks once it is widened."""
        plain = self.kind if self.super_block is None else self.super_block.plain
        return plain not in NOT_IN_MLX and self.group in affine.GROUPS

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.packed, self.scales, self.biases) if t is not None)

    def is_contiguous(self) -> bool:
        return self._contiguous

    @cached_property
    def _contiguous(self) -> bool:
        return all(t.is_contiguous() for t in (self.packed, self.scales, self.biases) if t is not None)

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Where codes, scales and biases lie in memory; 0 for biases that are not there."""
        return self.packed.data_ptr(), self.scales.data_ptr(), 0 if self.biases is None else self.biases.data_ptr()

    def to(self, device: torch.device | str) -> "QTensor":
        """The same weight elsewhere; widened where kernels do not read super-blocks."""
        here = self.widened() if torch.device(device).type == "cuda" else self
        return here._map(lambda t: t.to(device))

    def widened(self) -> "QTensor":
        """The same weight with a float32 scale, and bias, for each group in place of super-blocks."""
        if self.super_block is None:
            return self
        # with rows side by side, words of one are apart
        turned = (lambda t: t) if self.lanes == 1 else lambda t: t.transpose(-1, -2).contiguous()
        scales, biases = super_blocks.widened(turned(self.scales), self.kind)
        return replace(self, scales=turned(scales), biases=None if biases is None else turned(biases))

    def __getitem__(self, index: int) -> "QTensor":
        """One matrix of a stack."""
        if len(self.shape) != 3:
            raise FormatError(f"only a stack of matrices can be indexed; this weight has shape {list(self.shape)}.")
        return self._map(lambda t: t[index], shape=self.shape[1:])

    def take(self, rows: Tensor) -> "QTensor":
        """Some rows of the matrix, in their natural order."""
        if self.lanes == 1:
            return self._map(lambda t: t[rows], shape=(len(rows), self.shape[1]))
        block, lane = rows // self.lanes, rows % self.lanes
        return self._map(lambda t: t[block, :, lane].contiguous(), shape=(len(rows), self.shape[1]), lanes=1)._in_order()

    def moved(self, order: Tensor, span: int) -> "QTensor":
        """The matrix with its columns, in runs of `span`, in another order."""
        if self.lanes != 1 or span % self.group or span * self.bits % 32 or len(order) * span != self.shape[-1]:
            raise FormatError(f"columns of {self!r} cannot be moved in runs of {span}.")
        if span % self.whole and self.super_block is not None:
            return self.widened().moved(order, span)
        return self._map(lambda t: t.unflatten(-1, (len(order), -1))[..., order, :].flatten(-2))

    def between(self, rows: range) -> "QTensor":
        """Rows of a matrix that follow each other in their natural order."""
        if len(self.shape) != 2 or self.lanes != 1:
            raise FormatError(f"only a matrix with its rows in order can be cut; this is {self!r}.")
        return self._map(lambda t: t[rows.start : rows.stop], shape=(len(rows), self.shape[1]))

    def columns(self, wanted: range) -> "QTensor":
        """Columns of a matrix whose rows are in their natural order, in whole groups; widened where super-blocks are cut."""
        if self.super_block is not None and (wanted.start % self.whole or wanted.stop % self.whole):
            return self.widened().columns(wanted)
        whole = self.whole
        if len(self.shape) != 2 or self.lanes != 1 or wanted.start % whole or wanted.stop % whole:
            raise FormatError(f"columns {wanted.start} to {wanted.stop} of {self!r} cannot be taken without cutting a group.")
        width = self.shape[1]

        def taken(t: Tensor) -> Tensor:
            return t[:, wanted.start * t.shape[1] // width : wanted.stop * t.shape[1] // width].contiguous()

        return self._map(taken, shape=(self.shape[0], len(wanted)))

    def part(self, rows: slice) -> "QTensor":
        """The same rows of every matrix of a stack whose rows are in their natural order."""
        if len(self.shape) != 3 or self.lanes != 1:
            raise FormatError(f"only a stack of matrices with their rows in order has parts; this is {self!r}.")
        count = len(range(*rows.indices(self.shape[1])))
        return self._map(lambda t: t[:, rows], shape=(self.shape[0], count, self.shape[2]))

    def joined(self) -> "QTensor":
        """The matrices of a stack whose rows are in their natural order, one below the other."""
        if len(self.shape) != 3 or self.lanes != 1:
            raise FormatError(f"only a stack of matrices with their rows in order can be joined; this is {self!r}.")
        return self._map(lambda t: t.flatten(0, 1), shape=(self.shape[0] * self.shape[1], self.shape[2]))

    def stacked(self, count: int) -> "QTensor":
        """A stack of so many matrices of this one's shape and format, not filled."""
        return self._map(lambda t: t.new_empty(count, *t.shape), shape=(count, *self.shape))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix or stack in plain numbers; by default in the scales' dtype (bf16 for MXFP4), as mlx gives it."""
        if self.super_block is not None:
            return self.widened().dequantize(dtype)
        rows = self.rows()
        if self.kind == "fp8":
            groups = rows.packed.contiguous().view(CODES).float().unflatten(-1, (-1, self.group))
            return (groups * rows.scales[..., None]).flatten(-2).to(dtype or torch.float32)
        codes = unpack(rows.packed, self.bits)
        if self.kind == "mxfp4":
            return mxfp4.decode(codes, rows.scales, dtype or torch.bfloat16)
        if rows.biases is None:
            return levels.decode(codes, rows.scales, self.kind, self.bits, dtype or torch.float32)
        return affine.decode(codes, rows.scales, rows.biases, dtype or rows.scales.dtype)

    def interleave(self, lanes: int) -> "QTensor":
        """The same weight with `lanes` rows side by side; rows that fill the last block are zero."""
        if lanes == self.lanes:
            return self
        if self.lanes != 1:
            return self.rows().interleave(lanes)
        missing = -self.shape[-2] % lanes

        def turn(t: Tensor) -> Tensor:
            if missing:
                t = torch.cat([t, t.new_zeros(*t.shape[:-2], missing, t.shape[-1])], -2)
            return t.unflatten(-2, (-1, lanes)).transpose(-1, -2).contiguous()

        return replace(self, packed=placed(self.packed, self.bits))._map(turn, lanes=lanes)

    def rows(self) -> "QTensor":
        """The same weight with its rows one after the other, as MLX stores it."""
        if self.lanes == 1:
            return self
        count = self.shape[-2]
        return self._map(lambda t: t.transpose(-1, -2).flatten(-3, -2)[..., :count, :].contiguous(), lanes=1)._in_order()

    def _in_order(self) -> "QTensor":
        """With codes that were in the places they have with rows side by side."""
        return replace(self, packed=unplaced(self.packed, self.bits))

    def _map(self, change: Callable[[Tensor], Tensor], **fields: Any) -> "QTensor":
        biases = None if self.biases is None else change(self.biases)
        return replace(self, packed=change(self.packed), scales=change(self.scales), biases=biases, **fields)

    def __repr__(self) -> str:
        order = f", {self.lanes} rows side by side" if self.lanes > 1 else ""
        return f"QTensor({list(self.shape)}, {self.kind} {self.bits} bits, groups of {self.group}{order}, {self.device})"


def check_format(bits: int, group: int, kind: str = "affine", groups: tuple[int, ...] = affine.GROUPS) -> None:
    """Refuse a width or group size that the format does not have.

    groups  of the affine format
    """
    if kind == "affine":
        if bits not in affine.BITS or group not in groups:
            raise FormatError(f"{bits} bits in groups of {group} is not a format. Bits: {affine.BITS}; groups: {groups}.")
    elif kind not in UNBIASED:
        raise FormatError(f"there is no weight format {kind!r}. Those there are: {', '.join(KINDS)}.")
    elif bits not in UNBIASED[kind].bits or group not in UNBIASED[kind].groups:
        one = UNBIASED[kind]
        wanted = f"{' or '.join(map(str, one.bits))} bits and groups of {' or '.join(map(str, one.groups))}"
        raise FormatError(f"{one.title} has {wanted}; {bits} bits and groups of {group} were asked for.")


def _unbiased(scales: torch.dtype, bits: int, group: int) -> str:
    """The format without biases that has such scales; one of several by its bits, then by its groups."""
    found = [kind for kind, one in UNBIASED.items() if one.scales == scales] or ["fp8"]
    found = [kind for kind in found if bits in UNBIASED[kind].bits] or found
    return next((kind for kind in found if group in UNBIASED[kind].groups), found[0])


def scale_count(kind: str, width: int, group: int) -> int:
    """Scales of a row of so many inputs, or words of its super-blocks."""
    found = super_blocks.FORMATS.get(kind)
    return width // group if found is None else width // super_blocks.SIZE * found.words


def quantize(weight: Tensor, bits: int = 4, group: int | None = None, kind: str = "affine") -> QTensor:
    """Round a dense weight to codes, exactly as mlx.core.quantize does; to FP8 with the largest of a group on its largest code.

    weight  [N, K] or [E, N, K], float32, bfloat16 or float16; scales and biases keep its dtype; they are float32 in
            formats that MLX has not
    """
    group = group or (mxfp4.GROUP if kind == "mxfp4" else 64)
    check_format(bits, group, kind)
    if kind in super_blocks.FORMATS:
        raise FormatError(f"nothing is rounded to {kind.upper()}, which is read from GGUF files only.")
    if weight.dtype not in affine.SCALE_DTYPES:
        raise FormatError(f"a weight of dtype {weight.dtype} cannot be quantized; float32, bfloat16 or float16 is needed.")
    if weight.dim() not in (2, 3):
        raise FormatError(f"a weight of shape {list(weight.shape)} cannot be quantized; [N, K] or [E, N, K] is needed.")
    if weight.shape[-1] % group:
        raise FormatError(f"groups of {group} do not divide the input width {weight.shape[-1]}.")
    if kind == "fp8":
        return QTensor(*_encode_fp8(weight, group), None, bits, group, tuple(weight.shape))
    if kind in levels.KINDS:
        return QTensor(*levels.encode(weight, kind, bits, group), None, bits, group, tuple(weight.shape))
    if kind == "mxfp4":
        return QTensor(*mxfp4.encode(weight), None, bits, group, tuple(weight.shape))
    return QTensor(*affine.encode(weight, bits, group), bits, group, tuple(weight.shape))


def _encode_fp8(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(-1, (-1, group))
    scales = (groups.abs().amax(-1) / torch.finfo(CODES).max).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (groups / scales[..., None]).to(CODES).flatten(-2)
    return codes.contiguous().view(torch.int32), scales
