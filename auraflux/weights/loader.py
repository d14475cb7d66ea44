"""`Weights`: the tensors that a model's constructor loads, each by name and shape.

Nothing is raised while the model is constructed. A missing or mis-shaped tensor is recorded and replaced by a placeholder that
takes no memory; `check_loaded` raises one error with all of them and with the tensors that were never loaded.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from auraflux.errors import SettingsError
from auraflux.machine import free_nbytes
from auraflux.quant import QTensor
from auraflux.weights.convert.quantize_large import fitting_group, quantize_large
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.pool.load_pool import Matrices, write_blobs
from auraflux.weights.experts.row_table import RowTable
from auraflux.weights.experts.stacks import ExpertSource, stack_experts
from auraflux.weights.experts.store import ExpertStore, map_experts
from auraflux.weights.formats.row_layout import RECORDS
from auraflux.weights.formats.stored import Checkpoint, Stored, dense, is_placeholder
from auraflux.weights.formats.untrusted import shown
from auraflux.weights.kernel_layout import EXPAND_SCALES_FROM, cpu_lanes, expands_scales, to_kernel_layout
from auraflux.weights.mismatches import Mismatches
from auraflux.weights.named_weights import NamedWeight, NamedWeights
from auraflux.weights.names import ROUTERS, Rename, ours
from auraflux.weights.parallel.expert_parallel import ExpertSharding
from auraflux.weights.parallel.tensor_slices import UNSLICED, Slices, cut, group_of

T = TypeVar("T", Tensor, QTensor, Stored)
HOST = torch.device("cpu")
PART = re.compile(r"\.shard_(\d+)\.weight$")  # of a table published as several tensors


class Weights:
    """Tensors of a checkpoint under the model's names, converted for a device.

    rename           maps a checkpoint's tensor name to the model's; None if unused
    bits             quantization of dense matrices at load time; None loads them unquantized
    group            inputs that share a scale
    dtype            of the activations
    experts          store of a packed model's experts; by default their files are mapped
    expert_pool      pool that caches experts in GPU memory; None loads all of them onto the device
    span             range of layers to load; None for all
    expert_sharding  expert-parallel share of every layer's experts; None for all
    slices           tensor-parallel share of every layer's heads and columns
    mtp              whether to load the MTP head, see `models/mtp.py`
    advance          called with the bytes of each loaded tensor
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
        expert_pool: GpuExpertPool | None = None,
        span: range | None = None,
        expert_sharding: ExpertSharding | None = None,
        slices: Slices = UNSLICED,
        mtp: bool = False,
        advance: Callable[[int], None] = lambda nbytes: None,
    ):
        if experts is None and expert_pool is None and checkpoint.experts is not None:
            experts = map_experts(checkpoint.experts, device)
        self.experts, self.span, self.expert_sharding, self.slices, self.mtp = experts, span, expert_sharding, slices, mtp
        self.checkpoint, self.expert_pool, self.bits, self.group = checkpoint, expert_pool, bits, group
        self.dtype, self.device, self.advance = dtype, torch.device(device), advance
        # backend whose kernels read the weights
        self.layout = self.device.type
        self._sizes = checkpoint.sizes()
        self._has_memory_to_expand = free_nbytes() >= EXPAND_SCALES_FROM * sum(self._sizes.values())
        self._stored: dict[str, str] = {}
        for stored in self._sizes:
            name = ours(stored, rename, mtp)
            if name is not None:
                self._stored[name] = stored
        self._unloaded = set(self._stored)
        self.named = NamedWeights()
        self._mismatches = Mismatches(checkpoint.path)
        # name -> width, of matrices that no group divides
        self.unquantized: dict[str, int] = {}
        self.has_untied_head = False

    @property
    def expands_scales(self) -> bool:
        """True if super-blocks are expanded: they take less memory, expanded scales decode faster on some processors."""
        return expands_scales(self.layout, self._has_memory_to_expand)

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint."""
        return self.checkpoint.shape(self._stored[name])

    def is_quantized(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor in quantized form."""
        return self.has(name) and isinstance(self.checkpoint.load(self._stored[name]), QTensor)

    def equal(self, first: str, second: str) -> bool:
        """Return whether two tensors of the checkpoint are the same, in codes or in values."""
        one, other = (self.checkpoint.load(self._stored[name]) for name in (first, second))
        pairs = list(zip(_tensors(one), _tensors(other), strict=False))
        same = [a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs]
        self.release(first, second)
        return all(same) and len(_tensors(one)) == len(_tensors(other))

    def notes(self) -> list[str]:
        """Return remarks for the user on tensors that were not loaded as asked."""
        found = []
        if self.unquantized:
            widths = ", ".join(f"{width:,}" for width in sorted(set(self.unquantized.values())))
            found.append(
                f"{len(self.unquantized)} weights are not quantized, since no group of 32 divides their widths: {widths}."
            )
        if self.has_untied_head:
            found.append("config.json says tie_word_embeddings, but lm_head differs from the embedding; lm_head is used.")
        return found

    def skip(self, *names: str) -> None:
        """Ignore tensors that some checkpoints have and the model does not need."""
        self._unloaded -= set(names)

    def skip_prefix(self, prefix: str) -> None:
        """Ignore all tensors whose names begin with a prefix."""
        self._unloaded -= {name for name in self._unloaded if name.startswith(prefix)}

    def vector(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, shift: float = 0.0) -> Tensor:
        """Load a small dense tensor: norm, bias, sinks.

        shift  added to the values: 1 for a (1 + w) norm
        """
        found = dense(self._take(name, shape)).to(self.device, dtype)
        return self.complete(name, found + shift if shift else found)

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        """Load integers in [0, below) as int32."""
        found = dense(self._take(name, shape))
        if (found.is_floating_point() and not is_placeholder(found)) or (
            found.numel() and not 0 <= found.min() <= found.max() < below
        ):
            self._mismatches.add(f"{self._stored[name]} must hold integers from 0 to {below - 1}")
            found = torch.zeros(shape)
        return self.complete(name, found.to(self.device, torch.int32))

    def integers(self, name: str, *shape: int) -> Tensor:
        """Load integers as int64 on the CPU."""
        found = dense(self._take(name, shape))
        if found.is_floating_point() and not is_placeholder(found):
            self._mismatches.add(f"{self._stored[name]} must hold integers")
        return self.complete(name, found.to("cpu", torch.int64))

    def table(self, name: str, least: int, width: int) -> Any:
        """Open a table of at least `least` rows that stays on disk; None if it is missing or mis-shaped.

        It is stored as `name`.weight, as shards `name`.shard_0.weight and so on, or as the records that `convert` writes.
        """
        names = [f"{name}.weight"] if self.has(f"{name}.weight") else self._parts_of(name)
        if not names or any(self._found(each, (None, None)) is None for each in names):
            if not names:
                self._mismatches.add_missing(f"{name}.weight")
            return None
        stored = [self._stored[each] for each in names]
        parts = [self.checkpoint.table_part(each) for each in stored]
        rows, form = sum(part.rows for part in parts), parts[0].form
        if rows < least or form.width != width:
            self._mismatches.add(
                f"{stored[0]} and its further shards form a table of {[rows, form.width]}, [{least}, {width}] is needed"
            )
            return None
        self.checkpoint.unmap(stored)
        return RowTable(parts)

    def _parts_of(self, name: str) -> list[str]:
        """Return the names of a table's shards in order, including missing ones between others."""
        found = {}
        for each in self._stored:
            if each.startswith(f"{name}.") and (part := PART.search(each) or RECORDS.search(each)) is not None:
                found[int(part[1])] = each
        count = min(max(found, default=-1) + 1, 2 * len(found))
        return [found.get(number, f"{name}.shard_{number}.weight") for number in range(count)]

    def scalar(self, name: str) -> float:
        """Load a tensor of one element as a float."""
        found = dense(self._take(name, (1,)))
        self.complete(name, found)
        return float(found)

    def matrix(self, name: str, rows: int, width: int, take: Tensor | None = None, in_order: bool = False) -> Stored:
        """Load the weight of a linear or embedding layer, `name`.weight.

        take      indexes of the rows to select, `rows` of them
        in_order  do not interleave rows for the CPU kernels
        """
        found: Stored | None = None
        if take is None and not in_order:
            found = self._interleaved(f"{name}.weight", (rows, width))
        if found is None:
            found = self._take(f"{name}.weight", (rows if take is None else None, width))
        if take is not None and not is_placeholder(found):
            found = self._select(f"{name}.weight", found, take)
        made = self.complete(f"{name}.weight", self.to_kernel_layout(self.quantized(found, f"{name}.weight"), in_order))
        self.named.linears[name].append(NamedWeight(made, take))
        return made

    def row_shard(self, name: str, rows: int, width: int, some: range, in_order: bool = False) -> Stored:
        """Load this rank's rows of a matrix."""
        return self._cut(name, rows, width, some, None, in_order)

    def column_shard(self, name: str, rows: int, width: int, columns: range) -> Stored:
        """Load this rank's columns of a matrix; boundaries must fall between quantization groups."""
        return self._cut(name, rows, width, None, columns)

    def _cut(
        self, name: str, rows: int, width: int, some: range | None, columns: range | None, in_order: bool = False
    ) -> Stored:
        if self.slices.unsliced:
            return self.matrix(name, rows, width, in_order=in_order)
        found, stored = self._take(f"{name}.weight", (rows, width)), f"{name}.weight"
        if columns is not None and not is_placeholder(found):
            group = group_of(found, self.quantization_group)
            if columns.start % group or columns.stop % group:
                raise SettingsError(
                    f"{name} is quantized in groups of {group} columns, and rank {self.slices.rank} would have columns "
                    f"{columns.start} to {columns.stop}, which split a group. Use fewer ranks, or another kind of parallelism."
                )
        return self.complete(stored, self.to_kernel_layout(self._quantized(cut(found, some, columns), stored, width), in_order))

    @property
    def quantization_group(self) -> int | None:
        """Group size of quantization at load time; None if dense matrices stay unquantized."""
        return None if self.bits is None else self.group

    def shard_columns(self, name: str, rows: int, width: int) -> range:
        """Return this rank's columns of a matrix, aligned to quantization groups."""
        if self.slices.unsliced:
            return range(width)
        found = self._take(f"{name}.weight", (rows, width))
        return self.slices.columns(width, self.slices.group(found, self.quantization_group), name)

    def sample(self, name: str, count: int) -> list[Tensor]:
        """Return about `count` rows of a matrix, which identify the weights."""
        found = self._take(f"{name}.weight", (None, None))
        rows = torch.arange(0, found.shape[0], max(1, found.shape[0] // count))
        taken = found.take(rows) if isinstance(found, QTensor) else found[rows].contiguous()
        return sampled(self.quantized(taken, f"{name}.weight"))

    def _select(self, name: str, found: Stored, take: Tensor) -> Stored:
        last = int(take.max())
        if last >= found.shape[0]:
            self._mismatches.add(f"{self._stored[name]} has shape {shown(list(found.shape))}, {last + 1} rows are needed")
            return torch.zeros((), device=self.device).expand(len(take), found.shape[1])
        return found.take(take) if isinstance(found, QTensor) else found[take]

    def bias(self, name: str, size: int, some: range | None = None) -> Tensor | None:
        """Load `name`.bias, or the range `some` of it; None if the checkpoint has none."""
        if not self.has(f"{name}.bias"):
            return None
        found = self.vector(f"{name}.bias", size)
        return found if some is None else found[some.start : some.stop]

    def bias_on_first_rank(self, name: str, size: int) -> Tensor | None:
        """Load a bias on the first rank only, for outputs that are all-reduced."""
        found = self.bias(name, size)
        return found if self.slices.first else None

    def stored(self, name: str, *shape: int | None) -> Stored:
        """Return a tensor in the checkpoint's layout; the caller calls `release` afterwards."""
        return self._take(name, shape)

    def stack_entry(self, name: str, index: int, *shape: int) -> Stored:
        """Return one matrix of a stack in the checkpoint's layout; `shape` is that of the stack."""
        return self._take(name, shape, index)

    def release(self, *names: str) -> None:
        """Drop the mapped pages of tensors that were copied."""
        for name in names:
            if name in self._stored:
                self.checkpoint.release(self._stored[name])

    def quantized(self, found: Stored, name: str) -> Stored:
        """Quantize a dense matrix or stack if `bits` is set and a group of 32 or more divides its width."""
        return self._quantized(found, name, found.shape[-1])

    def _quantized(self, found: Stored, name: str, width: int) -> Stored:
        """Quantize a matrix, or some columns of one of `width`."""
        if self.bits is None or isinstance(found, QTensor) or is_placeholder(found) or ROUTERS.search(name):
            return found
        if (group := fitting_group(width, self.group)) is None:
            self.unquantized[name] = width
            return found
        return quantize_large(found, self.bits, group, self.device if self.device.type == "cuda" else None)

    def to_kernel_layout(self, found: Stored, in_order: bool = False) -> Stored:
        """Convert a matrix or stack to the layout of the device's kernels."""
        return self._converted(found, in_order, self.device)

    def _converted(self, found: Stored, in_order: bool, device: torch.device) -> Stored:
        return to_kernel_layout(found, self.layout, device, self.dtype, in_order=in_order, expands=self.expands_scales)

    def complete(self, name: str, value: T) -> T:
        """Release a tensor's mapped pages once its final value is ready, and return that value."""
        self.release(name)
        return value

    def stack(self, name: str, count: int, source: ExpertSource) -> Stored:
        """Load all experts' matrices of one projection, converting one at a time."""

        def converted(expert: int) -> Stored:
            return self.to_kernel_layout(self._prepared(name, source.matrix(expert)))

        stack = stack_experts(name, count, source, converted)
        return stack if is_placeholder(stack) else self.complete(name, stack)

    def host_expert(self, name: str, found: Stored) -> Stored:
        """Convert one expert's matrix to the layout of the device's kernels, in host memory."""
        return self._converted(self._prepared(name, found), False, HOST)

    def _prepared(self, name: str, found: Stored) -> Stored:
        """Return one expert's matrix, quantized if it has to be."""
        if isinstance(found, Tensor) and not is_placeholder(found):
            found = found.contiguous()
        return self.quantized(found, name)

    def load_blobs(
        self,
        name: str,
        rows: Tensor,
        stored: Callable[[int], Matrices],
        convert: Callable[[Matrices], Matrices],
        like: Matrices,
    ) -> None:
        """Write the experts of a layer into rows of host memory, see `write_blobs`."""
        write_blobs(name, rows, stored, convert, like)

    def _take(self, name: str, shape: tuple[int | None, ...], index: int | None = None) -> Stored:
        stored = self._found(name, shape)
        if stored is None:
            sizes = [size or 1 for size in (shape if index is None else shape[1:])]
            return torch.zeros((), device=self.device).expand(sizes)
        return self.checkpoint.load(stored) if index is None else self.checkpoint.load_one(stored, index)

    def _interleaved(self, name: str, shape: tuple[int, ...]) -> QTensor | None:
        """Load a quantized matrix in the layout of the CPU kernels without further steps; None where it takes some."""
        stored = self._stored.get(name)
        if stored is None or self.layout != "cpu" or self.checkpoint.shape(stored) != shape:
            return None
        found = self.checkpoint.load_interleaved(stored, cpu_lanes(), self.expands_scales)
        if found is not None:
            self._found(name, shape)
        return found

    def _found(self, name: str, shape: tuple[int | None, ...]) -> str | None:
        """Return the checkpoint's name of a tensor if it has the expected shape; otherwise record the mismatch."""
        if name not in self._stored:
            self._mismatches.add_missing(name)
            return None
        stored = self._stored[name]
        if name in self._unloaded:
            self._unloaded.discard(name)
            self.advance(self._sizes[stored])
        return stored if self._mismatches.check_shape(stored, self.checkpoint.shape(stored), shape) else None

    def check_loaded(self) -> None:
        """Raise one error for all missing, mis-shaped and unexpected tensors."""
        self._mismatches.raise_all([self._stored[name] for name in self._unloaded])


def sampled(rows: Stored) -> list[Tensor]:
    """Return rows of a matrix as tensors that identify it."""
    return _tensors(rows) if isinstance(rows, QTensor) else [rows.bfloat16()]


def _tensors(found: Stored) -> list[Tensor]:
    if isinstance(found, QTensor):
        return [part for part in (found.packed, found.scales, found.biases) if part is not None]
    return [found]
