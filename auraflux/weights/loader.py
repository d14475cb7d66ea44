"""`Weights`: what a model's constructor takes its tensors from, each by name and shape.

Nothing is raised while the model is put together. What is missing or has another shape is noted, a blank that takes no memory
stands in for it, and `done` tells all of it in one error, with the tensors nobody asked for.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from auraflux.errors import FormatError, SettingsError
from auraflux.machine import free_nbytes
from auraflux.quant import QTensor
from auraflux.weights.boundary import listed, shown
from auraflux.weights.divided import Division
from auraflux.weights.expert_store import ExpertStore, map_experts
from auraflux.weights.names import ROUTERS, Rename, ours
from auraflux.weights.rounding import quantize_large
from auraflux.weights.row_forms import RECORDS
from auraflux.weights.row_table import RowTable
from auraflux.weights.slices import WHOLE, Slices, cut, group_of
from auraflux.weights.stacks import Source, stacked
from auraflux.weights.stored import Checkpoint, Stored, dense, is_blank

Kept = TypeVar("Kept", Tensor, QTensor, Stored)
SHOWN = 4  # tensors of a kind in an error
WIDEST = 150  # characters of what is said of one
# of the files' bytes, for super-blocks to be widened: two Neoverse-N1 cores multiply one token 7 to 20 % faster so, and Q2_K
# takes 2.3 times the memory
WIDENED_FROM = 3
MOST_MISSING = 10_000  # tensors, after which no more are looked for

PART = re.compile(r"\.shard_(\d+)\.weight$")  # of a table that is published in many


class Weights:
    """Tensors of a checkpoint under a model's own names, made ready for a device.

    rename    the model's name for a tensor of the checkpoint; None for those it has no use for
    bits      to which dense matrices are rounded on the way; None leaves them as they are
    group     inputs that share a scale
    dtype     of the activations they will meet
    experts   how those of a packed model are kept; by default their files are mapped
    span      the numbers of the layers that are wanted; None for all
    division  which of every layer's experts are wanted; None for all
    slices    which heads and columns of every layer are wanted
    mtp       whether the layer that predicts further tokens is wanted, see `models/mtp.py`
    advance   called with the bytes of each tensor that was taken
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rename: Rename,
        *,
        bits: int | None = None,
        group: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        experts: ExpertStore | None = None,
        span: range | None = None,
        division: Division | None = None,
        slices: Slices = WHOLE,
        mtp: bool = False,
        advance: Callable[[int], None] = lambda nbytes: None,
    ):
        if experts is None and checkpoint.experts is not None:
            experts = map_experts(checkpoint.experts, device)
        self.experts, self.span, self.division, self.slices, self.mtp = experts, span, division, slices, mtp
        self.checkpoint, self.bits, self.group = checkpoint, bits, group
        self.dtype, self.device, self._advance = dtype, torch.device(device), advance
        # whose kernels read the weights
        self.layout = self.device.type
        self._sizes = checkpoint.sizes()
        # super-blocks take less memory, and one token a little more time
        self.widens = free_nbytes() >= WIDENED_FROM * sum(self._sizes.values())
        self._stored: dict[str, str] = {}
        for stored in self._sizes:
            name = ours(stored, rename, mtp)
            if name is not None:
                self._stored[name] = stored
        self._left = set(self._stored)
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        return self.checkpoint.shape(self._stored[name])

    def coded(self, name: str) -> bool:
        """Whether a tensor is there, and quantized."""
        return self.has(name) and isinstance(self.checkpoint.load(self._stored[name]), QTensor)

    def skip(self, *names: str) -> None:
        """Pass over tensors that some checkpoints have and the model can do without."""
        self._left -= set(names)

    def skip_under(self, prefix: str) -> None:
        """Pass over all tensors whose names begin so."""
        self._left -= {name for name in self._left if name.startswith(prefix)}

    def vector(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, shift: float = 0.0) -> Tensor:
        """Anything small that stays dense: norms, biases, sinks.

        shift  is added: 1 to a checkpoint's w of a (1 + w) norm
        """
        found = dense(self._take(name, shape)).to(self.device, dtype)
        return self.keep(name, found + shift if shift else found)

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        """Whole numbers from 0 up, as int32."""
        found = dense(self._take(name, shape))
        if (found.is_floating_point() and not is_blank(found)) or (
            found.numel() and not 0 <= found.min() <= found.max() < below
        ):
            self._wrong.append(f"{self._stored[name]} must hold whole numbers from 0 to {below - 1}")
            found = torch.zeros(shape)
        return self.keep(name, found.to(self.device, torch.int32))

    def integers(self, name: str, *shape: int) -> Tensor:
        """Whole numbers of any size, as int64; on the CPU."""
        found = dense(self._take(name, shape))
        if found.is_floating_point() and not is_blank(found):
            self._wrong.append(f"{self._stored[name]} must hold whole numbers")
        return self.keep(name, found.to("cpu", torch.int64))

    def table(self, name: str, least: int, width: int) -> Any:
        """A table of at least so many rows that stays on disk (`Rows`); None where it could not be had, which is noted.

        It is `name`.weight, or its parts: `name`.shard_0.weight and so on, or the records that `convert` writes.
        """
        names = [f"{name}.weight"] if self.has(f"{name}.weight") else self._parts_of(name)
        if not names or any(self._found(each, (None, None)) is None for each in names):
            self._missing += [f"{name}.weight"] if not names else []
            return None
        stored = [self._stored[each] for each in names]
        parts = [self.checkpoint.table_part(each) for each in stored]
        rows, form = sum(part.rows for part in parts), parts[0].form
        if rows < least or form.width != width:
            self._wrong.append(
                f"{stored[0]} and what follows it is a table of {[rows, form.width]}, [{least}, {width}] is needed"
            )
            return None
        self.checkpoint.unmap(stored)
        return RowTable(parts)

    def _parts_of(self, name: str) -> list[str]:
        """The names of a table's parts, in their order; those between others that are missing too."""
        found = {}
        for each in self._stored:
            if each.startswith(f"{name}.") and (part := PART.search(each) or RECORDS.search(each)) is not None:
                found[int(part[1])] = each
        count = min(max(found, default=-1) + 1, 2 * len(found))
        return [found.get(number, f"{name}.shard_{number}.weight") for number in range(count)]

    def number(self, name: str) -> float:
        """A tensor of one element, as a number."""
        found = dense(self._take(name, (1,)))
        self.keep(name, found)
        return float(found)

    def matrix(self, name: str, rows: int, width: int, take: Tensor | None = None, in_order: bool = False) -> Stored:
        """A weight of linear or embed, under `name`.weight.

        take      the rows to keep, and their order; `rows` of them
        in_order  do not put rows side by side for the CPU kernels
        """
        found = self._take(f"{name}.weight", (rows if take is None else None, width))
        if take is not None and not is_blank(found):
            found = self._some(f"{name}.weight", found, take)
        return self.keep(f"{name}.weight", self.ready(self.rounded(found, f"{name}.weight"), in_order))

    def some_rows(self, name: str, rows: int, width: int, some: range, in_order: bool = False) -> Stored:
        """A weight as `matrix` gives it, of which this rank has some of the rows."""
        return self._cut(name, rows, width, some, None, in_order)

    def some_columns(self, name: str, rows: int, width: int, columns: range) -> Stored:
        """A weight as `matrix` gives it, of which this rank has some of the columns; groups of them cannot be cut."""
        return self._cut(name, rows, width, None, columns)

    def _cut(
        self, name: str, rows: int, width: int, some: range | None, columns: range | None, in_order: bool = False
    ) -> Stored:
        if self.slices.whole:
            return self.matrix(name, rows, width, in_order=in_order)
        found, stored = self._take(f"{name}.weight", (rows, width)), f"{name}.weight"
        if columns is not None and not is_blank(found):
            group = group_of(found, self.rounds_in)
            if columns.start % group or columns.stop % group:
                raise SettingsError(
                    f"{name} is held in groups of {group} columns, and rank {self.slices.rank} would have its columns "
                    f"{columns.start} to {columns.stop}: a group cannot be cut. Give fewer ranks, or another way."
                )
        return self.keep(stored, self.ready(self.rounded(cut(found, some, columns), stored), in_order))

    @property
    def rounds_in(self) -> int | None:
        """The groups in which dense matrices are rounded; None where they are left as they are."""
        return None if self.bits is None else self.group

    def columns(self, name: str, rows: int, width: int) -> range:
        """Which columns of a matrix this rank has, in whole groups."""
        if self.slices.whole:
            return range(width)
        found = self._take(f"{name}.weight", (rows, width))
        return self.slices.columns(width, self.slices.group(found, self.rounds_in), name)

    def sample(self, name: str, count: int) -> list[Tensor]:
        """So many rows of a matrix as it would be held whole: they tell it from others."""
        found = self._take(f"{name}.weight", (None, None))
        rows = torch.arange(0, found.shape[0], max(1, found.shape[0] // count))
        taken = found.take(rows) if isinstance(found, QTensor) else found[rows].contiguous()
        return sampled(self.rounded(taken, f"{name}.weight"))

    def _some(self, name: str, found: Stored, take: Tensor) -> Stored:
        last = int(take.max())
        if last >= found.shape[0]:
            self._wrong.append(f"{self._stored[name]} has shape {shown(list(found.shape))}, {last + 1} rows are needed")
            return torch.zeros((), device=self.device).expand(len(take), found.shape[1])
        return found.take(take) if isinstance(found, QTensor) else found[take]

    def bias(self, name: str, size: int, some: range | None = None) -> Tensor | None:
        """`name`.bias if the checkpoint has one; `some` of it, by default all."""
        if not self.has(f"{name}.bias"):
            return None
        found = self.vector(f"{name}.bias", size)
        return found if some is None else found[some.start : some.stop]

    def bias_once(self, name: str, size: int) -> Tensor | None:
        """The bias of what is added up over ranks: one of them has it."""
        found = self.bias(name, size)
        return found if self.slices.first else None

    def stored(self, name: str, *shape: int | None) -> Stored:
        """A tensor as it lies in the checkpoint, for those who arrange it themselves; `release` it afterwards."""
        return self._take(name, shape)

    def one_of(self, name: str, index: int, *shape: int) -> Stored:
        """One matrix of a stack as it lies in the checkpoint; the shape is that of the stack."""
        return self._take(name, shape, index)

    def release(self, *names: str) -> None:
        """Say that tensors, those of them that are there, were copied."""
        for name in names:
            if name in self._stored:
                self.checkpoint.release(self._stored[name])

    def rounded(self, found: Stored, name: str) -> Stored:
        """A dense matrix or stack as codes, where that was asked for and its width allows it."""
        if self.bits is None or isinstance(found, QTensor) or is_blank(found) or found.shape[-1] % self.group:
            return found
        if ROUTERS.search(name):
            return found
        return quantize_large(found, self.bits, self.group)

    def ready(self, found: Stored, in_order: bool = False) -> Stored:
        """A matrix or stack in the form the device's kernels like."""
        if isinstance(found, QTensor) and (in_order or self.layout != "cpu" or self.widens):
            found = found.widened()
        if isinstance(found, QTensor) and not found.in_mlx and in_order:
            # kernels that want rows in order do not read all formats
            found = dense(found)
        if isinstance(found, QTensor):
            if self.layout == "cpu" and not in_order:
                from auraflux.ops.simd.isa import ISA

                return found.interleave(ISA.lanes)
            return found.to(self.device)
        return dense(found).to(self.device, self._dense_dtype(found))

    def _dense_dtype(self, found: Tensor) -> torch.dtype:
        # CPU kernels read bf16 and f32; on a GPU a matrix has the dtype of the activations
        if self.layout == "cpu":
            return found.dtype if found.dtype is torch.bfloat16 else torch.float32
        return self.dtype

    def keep(self, name: str, value: Kept) -> Kept:
        """Note that a tensor of the model is complete."""
        self.release(name)
        return value

    def stack(self, name: str, count: int, source: Source) -> Stored:
        """All experts' matrices of one projection, made ready one after the other."""

        def made(expert: int) -> Stored:
            found = source.matrix(expert)
            if isinstance(found, Tensor) and not is_blank(found):
                found = found.contiguous()
            return self.ready(self.rounded(found, name))

        whole = stacked(name, count, source, made)
        return whole if is_blank(whole) else self.keep(name, whole)

    def _take(self, name: str, shape: tuple[int | None, ...], index: int | None = None) -> Stored:
        stored = self._found(name, shape)
        if stored is None:
            sizes = [size or 1 for size in (shape if index is None else shape[1:])]
            return torch.zeros((), device=self.device).expand(sizes)
        return self.checkpoint.load(stored) if index is None else self.checkpoint.load_one(stored, index)

    def _found(self, name: str, shape: tuple[int | None, ...]) -> str | None:
        """The checkpoint's name of a tensor that fits; otherwise what is wrong is noted."""
        if name not in self._stored:
            self._missing.append(name)
            if len(self._missing) > MOST_MISSING:
                # a config may name any number of experts
                path = self.checkpoint.path
                raise FormatError(
                    f"the tensors in {path} do not fit the model. Too many are missing: {listed(self._missing, SHOWN, WIDEST)}."
                )
            return None
        stored = self._stored[name]
        if name in self._left:
            self._left.discard(name)
            self._advance(self._sizes[stored])
        found = self.checkpoint.shape(stored)
        if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            self._wrong.append(f"{stored} has shape {shown(list(found))}, [{wanted}] is needed")
            return None
        return stored

    def done(self) -> None:
        """Raise what was found to be wrong."""
        extra = sorted(self._stored[name] for name in self._left)
        reasons = [
            f"{len(names)} {what}: {listed(names, SHOWN, WIDEST)}"
            for what, names in (
                ("missing", sorted(set(self._missing))),
                ("of the wrong shape", list(dict.fromkeys(self._wrong))),
                ("that the model does not know", extra),
            )
            if names
        ]
        if reasons:
            raise FormatError(f"the tensors in {self.checkpoint.path} do not fit the model. {'; '.join(reasons)}.")


def sampled(rows: Stored) -> list[Tensor]:
    """Rows of a matrix as tensors that tell it from others."""
    if isinstance(rows, QTensor):
        return [part for part in (rows.packed, rows.scales, rows.biases) if part is not None]
    return [rows.bfloat16()]
