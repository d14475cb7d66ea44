"""`QTensor`: a quantized weight matrix.

`packed`, `scales` and `biases` are the arrays of MLX's format, row-major (`lanes` 1) or with `lanes` rows interleaved: then
element i of each of these rows is in adjacent memory, so that one vector load of the CPU kernels covers as many rows as the
vector has 32-bit lanes. The words are transposed within blocks of rows; codes of 3, 5 and 6 bits are also rearranged within
their words, see `packing.py`.

Super-block formats (`super_blocks.py`) have words in place of scales and biases; `expand_scales` computes these. Grid formats
(`grids.py`) have 16-bit halves in their place, and their words are not rearranged.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import affine, grids, levels, mxfp4, super_blocks
from auraflux.quant.packing import CHUNK, from_lane_layout, to_lane_layout, unpack
from auraflux.validation import check_fields

CODES = torch.float8_e4m3fn


class Unbiased(NamedTuple):
    """A format without biases: its name in messages, the dtype of its scales, its bits and its group sizes."""

    title: str
    scales: torch.dtype
    bits: tuple[int, ...]
    groups: tuple[int, ...]


UNBIASED = {
    "mxfp4": Unbiased("MXFP4", torch.uint8, (mxfp4.BITS,), (mxfp4.GROUP,)),
    "fp8": Unbiased("FP8", torch.float32, (8,), affine.GROUPS),
    "centred": Unbiased("centred codes", torch.float32, levels.CENTRED_BITS, (16,)),
    "iq4": Unbiased("IQ4", torch.float32, (4,), (32,)),
    "iq4_nl": Unbiased("IQ4_NL", torch.float16, (4,), (32,)),
    "q4_0": Unbiased("Q4_0", torch.int16, (4,), (32,)),
    "nvfp4": Unbiased("NVFP4", torch.float32, (4,), (16,)),
    **{kind: Unbiased(kind.upper(), torch.int32, (one.bits,), (one.group,)) for kind, one in super_blocks.FORMATS.items()},
    **{kind: Unbiased(kind.upper(), torch.int16, (one.bits,), (one.group,)) for kind, one in grids.FORMATS.items()},
}
KINDS = ("affine", *UNBIASED)
NOT_IN_MLX = ("fp8", *levels.KINDS, *grids.FORMATS)


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized weight [N, K], or a stack of them [E, N, K].

    packed   int32 [..., N, K*bits/32]; with lanes [..., N/lanes, K*bits/32, lanes], N rounded up to full blocks
    scales   [..., N, K/group] or [..., N/lanes, K/group, lanes]; bf16, f16 or f32, for MXFP4 uint8 exponents, for IQ4_NL
             f16, for Q4_0 its bits as int16, for other formats without biases f32; in super-blocks int32 words, with grids
             int16 halves, fewer than groups
    biases   like scales; None for all formats but the affine one
    shape    of the dequantized matrix or stack
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
        check_format(self.bits, self.group, self.kind, affine.STORED_GROUPS)
        if len(self.shape) < 2 or self.lanes < 1:
            raise FormatError(f"a weight has rows and columns, not shape {list(self.shape)} in blocks of {self.lanes} rows.")
        *stack, rows, width = self.shape
        if len(stack) > 1 or width % self.column_block:
            raise FormatError(
                f"a weight of shape {list(self.shape)} cannot be stored in "
                f"{'super-blocks' if self.has_super_blocks else 'groups'} of "
                f"{self.column_block if self.has_super_blocks else self.group} along its last axis."
            )
        if self.packed.dtype != torch.int32:
            raise FormatError(f"packed codes have dtype {self.packed.dtype}; int32 is needed (view uint32 words as int32).")
        if not self.is_expanded and self.packed.is_cuda:
            raise FormatError(f"GPU kernels do not read {self.kind} weights; call `expand_scales`.")
        dtypes = affine.SCALE_DTYPES if self.biases is not None else tuple({one.scales for one in UNBIASED.values()})
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
        if self.scales.dtype is torch.int16:
            halves = self.scales.shape[-2 if self.lanes > 1 else -1] * grids.SIZE // max(self.shape[-1], 1)
            return grids.KINDS.get((self.bits, halves), found)
        if found == "q4_k":
            words = self.scales.shape[-2 if self.lanes > 1 else -1]
            return "iq4_xs" if words * super_blocks.SIZE == self.shape[-1] * super_blocks.FORMATS["iq4_xs"].words else found
        return found

    @cached_property
    def super_block(self) -> super_blocks.SuperBlock | None:
        """The super-block format; None for other formats."""
        return super_blocks.FORMATS.get(self.kind)

    @cached_property
    def grid(self) -> grids.Grid | None:
        """The grid format; None for other formats."""
        return grids.FORMATS.get(self.kind)

    @property
    def is_expanded(self) -> bool:
        """Return whether `expand_scales` has nothing to do: no super-blocks, and biases where GPU kernels need them."""
        return self.super_block is None and self.kind != "q4_0"

    @property
    def has_super_blocks(self) -> bool:
        return self.super_block is not None or self.grid is not None

    @cached_property
    def column_block(self) -> int:
        """Columns that cannot be split: a group, a packing chunk or a super-block."""
        return super_blocks.SIZE if self.has_super_blocks else max(self.group, CHUNK)

    @cached_property
    def device(self) -> torch.device:
        return self.packed.device

    @cached_property
    def is_cpu(self) -> bool:
        return self.packed.is_cpu

    @cached_property
    def format(self) -> tuple[int, int, int, torch.dtype | str]:
        """The format that a kernel is compiled for: bits, group, lanes, and the scales' dtype or the kind."""
        scales = self.kind if self.kind in NOT_IN_MLX or self.super_block is not None else self.scales.dtype
        return self.bits, self.group, self.lanes, scales

    @property
    def expanded_kind(self) -> str:
        """The kind after `expand_scales`."""
        if self.super_block is not None:
            return self.super_block.expanded
        return "affine" if self.kind == "q4_0" else self.kind

    @property
    def in_mlx(self) -> bool:
        """Return whether MLX has this format; super-blocks count as their expanded format."""
        return self.expanded_kind not in NOT_IN_MLX and self.group in affine.GROUPS

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
        """Addresses of codes, scales and biases; 0 without biases."""
        return self.packed.data_ptr(), self.scales.data_ptr(), 0 if self.biases is None else self.biases.data_ptr()

    def to(self, device: torch.device | str, copy: Callable[[Tensor, torch.device], Tensor] = Tensor.to) -> "QTensor":
        """Return the weight on a device, with expanded scales on a GPU, whose kernels do not read super-blocks.

        copy  moves an array to a device
        """
        device = torch.device(device)
        if self.is_expanded or device.type != "cuda":
            return self._map(lambda t: copy(t, device))
        # the device expands them: less is copied, and it is faster
        scales, biases = self._expanded(copy(self.scales, device))
        return replace(self, packed=copy(self.packed, device), scales=scales, biases=biases)

    def expand_scales(self) -> "QTensor":
        """Return the weight with a float32 scale, and bias, per group in place of super-blocks; Q4_0 with biases."""
        if self.is_expanded:
            return self
        scales, biases = self._expanded(self.scales)
        return replace(self, scales=scales, biases=biases)

    def _expanded(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """Expand the words of super-blocks, on their device; or the scales of Q4_0, to biases in half precision if they fit."""
        if self.super_block is None:
            halves = words.view(torch.float16)
            fits = words.is_meta or bool(torch.isfinite(halves * -levels.Q4_0_ZERO).all())
            found = halves if fits else halves.float()
            return found, found * -levels.Q4_0_ZERO
        # interleaved rows are transposed, so that the words of a row are adjacent
        by_rows = (lambda t: t) if self.lanes == 1 else lambda t: t.transpose(-1, -2).contiguous()
        scales, biases = super_blocks.expand_scales(by_rows(words), self.kind)
        return by_rows(scales), None if biases is None else by_rows(biases)

    def _in_groups(self) -> "QTensor":
        """Return the weight without super-blocks; grids are requantized to 8 bits, as no smaller format is exact."""
        if self.grid is None:
            return self.expand_scales()
        return quantize(self.dequantize(torch.float32), 8, CHUNK)

    def __getitem__(self, index: int) -> "QTensor":
        """Return one matrix of a stack."""
        if len(self.shape) != 3:
            raise FormatError(f"only a stack of matrices can be indexed; this weight has shape {list(self.shape)}.")
        return self._map(lambda t: t[index], shape=self.shape[1:])

    def take(self, rows: Tensor) -> "QTensor":
        """Return some rows of the matrix, row-major."""
        if self.lanes == 1:
            return self._map(lambda t: t[rows], shape=(len(rows), self.shape[1]))
        block, lane = rows // self.lanes, rows % self.lanes
        return self._map(lambda t: t[block, :, lane].contiguous(), shape=(len(rows), self.shape[1]), lanes=1)._from_lanes()

    def permute_columns(self, order: Tensor, span: int) -> "QTensor":
        """Return the matrix with its columns, in runs of `span`, in another order."""
        if self.lanes != 1 or span % self.group or span * self.bits % 32 or len(order) * span != self.shape[-1]:
            raise FormatError(f"columns of {self!r} cannot be permuted in runs of {span}.")
        if span % self.column_block and self.has_super_blocks:
            return self._in_groups().permute_columns(order, span)
        return self._map(lambda t: t.unflatten(-1, (len(order), -1))[..., order, :].flatten(-2))

    def row_range(self, rows: range) -> "QTensor":
        """Return consecutive rows of a row-major matrix."""
        if len(self.shape) != 2 or self.lanes != 1:
            raise FormatError(f"only a row-major matrix can be sliced by rows; this is {self!r}.")
        return self._map(lambda t: t[rows.start : rows.stop], shape=(len(rows), self.shape[1]))

    def columns(self, wanted: range) -> "QTensor":
        """Return columns of a row-major matrix in full groups, with expanded scales where super-blocks would be split."""
        if self.has_super_blocks and (wanted.start % self.column_block or wanted.stop % self.column_block):
            return self._in_groups().columns(wanted)
        block = self.column_block
        if len(self.shape) != 2 or self.lanes != 1 or wanted.start % block or wanted.stop % block:
            raise FormatError(
                f"columns {wanted.start} to {wanted.stop} of {self!r} cannot be sliced without splitting a group."
            )
        width = self.shape[1]

        def sliced(t: Tensor) -> Tensor:
            return t[:, wanted.start * t.shape[1] // width : wanted.stop * t.shape[1] // width].contiguous()

        return self._map(sliced, shape=(self.shape[0], len(wanted)))

    def part(self, rows: slice) -> "QTensor":
        """Return the same rows of every matrix of a row-major stack."""
        if len(self.shape) != 3 or self.lanes != 1:
            raise FormatError(f"only a row-major stack of matrices can be sliced by rows; this is {self!r}.")
        count = len(range(*rows.indices(self.shape[1])))
        return self._map(lambda t: t[:, rows], shape=(self.shape[0], count, self.shape[2]))

    def flatten_stack(self) -> "QTensor":
        """Concatenate the matrices of a row-major stack along their rows."""
        if len(self.shape) != 3 or self.lanes != 1:
            raise FormatError(f"only a row-major stack of matrices can be flattened; this is {self!r}.")
        return self._map(lambda t: t.flatten(0, 1), shape=(self.shape[0] * self.shape[1], self.shape[2]))

    def empty_stack(self, count: int) -> "QTensor":
        """Return an uninitialised stack of `count` matrices of this shape and format."""
        return self._map(lambda t: t.new_empty(count, *t.shape), shape=(count, *self.shape))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix or stack as floats, by default in the scales' dtype (bf16 for MXFP4), as mlx does."""
        if self.super_block is not None:
            return self.expand_scales().dequantize(dtype)
        rows = self.rows()
        if self.grid is not None:
            return grids.decode(rows.packed, rows.scales, self.kind, dtype or torch.float32)
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
        """Return the weight with `lanes` rows interleaved; rows that pad the last block are zero."""
        if lanes == self.lanes:
            return self
        if self.lanes != 1:
            return self.rows().interleave(lanes)
        missing = -self.shape[-2] % lanes

        def transpose(t: Tensor) -> Tensor:
            if missing:
                t = torch.cat([t, t.new_zeros(*t.shape[:-2], missing, t.shape[-1])], -2)
            return t.unflatten(-2, (-1, lanes)).transpose(-1, -2).contiguous()

        packed = self.packed if self.grid else to_lane_layout(self.packed, self.bits)
        return replace(self, packed=packed)._map(transpose, lanes=lanes)

    def rows(self) -> "QTensor":
        """Return the weight row-major, as MLX stores it."""
        if self.lanes == 1:
            return self
        count = self.shape[-2]
        return self._map(lambda t: t.transpose(-1, -2).flatten(-3, -2)[..., :count, :].contiguous(), lanes=1)._from_lanes()

    def _from_lanes(self) -> "QTensor":
        """Return the weight with its codes moved back from the lane layout."""
        return self if self.grid else replace(self, packed=from_lane_layout(self.packed, self.bits))

    def _map(self, change: Callable[[Tensor], Tensor], **fields: Any) -> "QTensor":
        biases = None if self.biases is None else change(self.biases)
        return replace(self, packed=change(self.packed), scales=change(self.scales), biases=biases, **fields)

    def __repr__(self) -> str:
        order = f", {self.lanes} rows interleaved" if self.lanes > 1 else ""
        return f"QTensor({list(self.shape)}, {self.kind} {self.bits} bits, groups of {self.group}{order}, {self.device})"


def check_format(bits: int, group: int, kind: str = "affine", groups: tuple[int, ...] = affine.GROUPS) -> None:
    """Raise if a format does not have these bits and group size.

    groups  of the affine format
    """
    if kind == "affine":
        if bits not in affine.BITS or group not in groups:
            raise FormatError(f"{bits} bits in groups of {group} is not a format. Bits: {affine.BITS}; groups: {groups}.")
    elif kind not in UNBIASED:
        raise FormatError(f"there is no weight format {kind!r}. The formats are: {', '.join(KINDS)}.")
    elif bits not in UNBIASED[kind].bits or group not in UNBIASED[kind].groups:
        one = UNBIASED[kind]
        wanted = f"{' or '.join(map(str, one.bits))} bits and groups of {' or '.join(map(str, one.groups))}"
        raise FormatError(f"{one.title} has {wanted}; {bits} bits and groups of {group} were requested.")


def _unbiased(scales: torch.dtype, bits: int, group: int) -> str:
    """Return the format without biases that has scales of this dtype, these bits and this group size."""
    found = [kind for kind, one in UNBIASED.items() if one.scales == scales] or ["fp8"]
    found = [kind for kind in found if bits in UNBIASED[kind].bits] or found
    return next((kind for kind in found if group in UNBIASED[kind].groups), found[0])


def scale_count(kind: str, width: int, group: int) -> int:
    """Return the number of scales of a row of `width` inputs, or of words of its super-blocks."""
    if (grid := grids.FORMATS.get(kind)) is not None:
        return width // grids.SIZE * grid.halves
    found = super_blocks.FORMATS.get(kind)
    return width // group if found is None else width // super_blocks.SIZE * found.words


def quantize(weight: Tensor, bits: int = 4, group: int | None = None, kind: str = "affine") -> QTensor:
    """Quantize a dense weight, bit-identical to mlx.core.quantize; FP8 maps the largest of a group to the largest code.

    weight  [N, K] or [E, N, K], float32, bfloat16 or float16; scales and biases have its dtype, or float32 in formats
            that MLX does not have
    """
    group = group or (mxfp4.GROUP if kind == "mxfp4" else 64)
    check_format(bits, group, kind)
    if kind in super_blocks.FORMATS or kind in grids.FORMATS:
        raise FormatError(f"{kind.upper()} cannot be quantized to: it is read from GGUF files only.")
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
