"""Parameter counts and memory of a model by part and format, from headers only."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.cache import LayerShape
from auraflux.defaults import KV as DEFAULT_KV
from auraflux.errors import SettingsError
from auraflux.quant import QTensor, grids, super_blocks
from auraflux.quant.gguf_blocks import memory_bits
from auraflux.quant.gguf_layouts import NOT_IN_MLX
from auraflux.weights.convert.quantize_large import fitting_group
from auraflux.weights.experts.row_table import ON_DISK_TABLE, ROW_CACHE_NBYTES
from auraflux.weights.formats.folder import Folder
from auraflux.weights.formats.gguf import DENSE, GGUFFile
from auraflux.weights.formats.row_layout import RECORDS, parse_row_format
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.names import ROUTERS, Rename
from auraflux.weights.names import ours as our_name

KV = ("none", "k8v8", "k8v4", "k4v4", "k4v2", "k3v3")
CONTEXTS = (4096, 32768, 131072)
# parts of a model by tensor name; the first match wins
KINDS = {
    "shared experts": r"shared_expert(s)?\.",
    "experts": r"\.(switch_mlp|experts)\.",
    "routers": r"((mlp|block_sparse_moe)\.gate\.|shared_expert_gate|\.router\.)",
    "rows on disk": ON_DISK_TABLE.pattern,
    "n-grams": r"\.ple\.",
    "streams": r"hyper_connection",
    "embeddings": r"(embed_tokens|lm_head)",
    "norms": r"norm",
    "attention": r"self_attn\.",
    "recurrent": r"linear_attn\.",
    "mlp": r"\.mlp\.",
}

# copies of embedding and head in an MTP head, which shares those of the model
COPIES = re.compile(r"(embed_tokens|shared_head\.head)\.weight$")


@dataclass
class TensorTotals:
    """Totals over a group of tensors.

    nbytes         on disk
    memory_nbytes  once loaded
    """

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    memory_nbytes: int = 0

    def add(self, parameters: int, nbytes: int, memory_nbytes: int) -> None:
        self.tensors += 1
        self.parameters += parameters
        self.nbytes += nbytes
        self.memory_nbytes += memory_nbytes


@dataclass
class MemoryPlan:
    """Totals of a model's tensors.

    kinds    by part of the model
    formats  by weight format
    mtp      MTP head, loaded only for speculative decoding
    unused   tensors that are not loaded, such as a vision tower
    rows     tables that stay on disk, also part of the other totals; memory is the largest size of their row cache
    tables   bytes of each such table
    """

    kinds: dict[str, TensorTotals] = field(default_factory=lambda: defaultdict(TensorTotals))
    formats: dict[str, TensorTotals] = field(default_factory=lambda: defaultdict(TensorTotals))
    total: TensorTotals = field(default_factory=TensorTotals)
    mtp: TensorTotals = field(default_factory=TensorTotals)
    unused: TensorTotals = field(default_factory=TensorTotals)
    rows: TensorTotals = field(default_factory=TensorTotals)
    tables: dict[str, int] = field(default_factory=dict)


def plan_memory(
    checkpoint: Checkpoint, rename: Rename, bits: int | None = None, group: int = 64, mtp_prefixes: tuple[str, ...] = ()
) -> MemoryPlan:
    """Add up a checkpoint's tensors.

    bits, group   quantization of dense matrices at load time; None loads them unquantized
    mtp_prefixes  prefixes of the MTP head's tensor names
    """
    found = MemoryPlan()
    for name, nbytes in checkpoint.sizes().items():
        shape, ours = checkpoint.shape(name), our_name(name, rename, bool(mtp_prefixes))
        count = math.prod(shape)
        if ours is None or (ours.startswith(mtp_prefixes) and COPIES.search(ours)):
            found.unused.add(count, nbytes, 0)
            continue
        if ON_DISK_TABLE.search(ours):
            _add_rows(found, checkpoint, name, ours)
            continue
        label, per_weight = weight_bits(checkpoint, name, ours, bits, group)
        memory = round(count * per_weight / 8)
        if ours.startswith(mtp_prefixes):
            found.mtp.add(count, nbytes, memory)
            continue
        for share in (found.kinds[part_of(ours)], found.formats[label], found.total):
            share.add(count, nbytes, memory)
    for table, nbytes in found.tables.items():
        for share in (found.kinds[part_of(table)], found.rows, found.total):
            share.memory_nbytes += min(nbytes, ROW_CACHE_NBYTES)
    return found


def _add_rows(found: MemoryPlan, checkpoint: Checkpoint, name: str, ours: str) -> None:
    """Add a shard of a table that stays on disk."""
    rows, width = checkpoint.shape(name)
    nbytes, label = checkpoint.sizes()[name], ""
    if (record := RECORDS.search(name)) is not None:
        form = parse_row_format(record[2], width)
        width, label = (form.width, form.name) if form is not None else (width, record[2])
        label = re.sub(r"affine(\d)_(\d+)_.*", r"\1 bits, groups of \2", label)
    for share in (found.kinds[part_of(ours)], found.formats[label or _format(checkpoint, name)[0]], found.total, found.rows):
        share.add(rows * width, nbytes, 0)
    table = ours[: ours.index(".ngram_embedding.") + len(".ngram_embedding.")]
    found.tables[table] = found.tables.get(table, 0) + nbytes


def part_of(name: str) -> str:
    """Return the part of a model that a tensor belongs to, one of `KINDS`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def weight_bits(checkpoint: Checkpoint, name: str, ours: str, bits: int | None = None, group: int = 64) -> tuple[str, float]:
    """Return the name of a tensor's format in the checkpoint, and the bits of one weight in memory.

    ours         name of the tensor in the model
    bits, group  quantization of dense matrices at load time
    """
    label, per_weight = _format(checkpoint, name)
    shape = checkpoint.shape(name)
    if bits is not None and label in DTYPES and len(shape) > 1 and not ROUTERS.search(ours):
        fitting = fitting_group(shape[-1], group)
        per_weight = per_weight if fitting is None else bits + 2 * DTYPES[label].itemsize * 8 / fitting
    return label, per_weight


def gpu_weight_bits(checkpoint: Checkpoint, name: str, ours: str, bits: int | None = None, group: int = 64) -> float:
    """Return the bits of one weight in the layout of GPU kernels, see `weight_bits`."""
    label, per_weight = weight_bits(checkpoint, name, ours, bits, group)
    shape = checkpoint.shape(name)
    if label in DTYPES and per_weight in (16, 32):
        return 32 if len(shape) == 1 or ours.endswith("bias") else 16
    if label.lower() in grids.FORMATS:
        return per_weight
    if "embed_tokens" in ours and label.upper() in NOT_IN_MLX:
        # rows are looked up, for which these formats have no kernel
        return 16
    if label == "Q4_0":
        # a bias for each scale
        return per_weight + 0.5
    if (form := super_blocks.FORMATS.get(label.lower())) is not None:
        return form.bits + (64 if form.has_biases else 32) / form.group
    return per_weight


def _format(checkpoint: Checkpoint, name: str) -> tuple[str, float]:
    """Return the name of a tensor's format and the bits of one weight in memory."""
    shape = checkpoint.shape(name)
    if isinstance(checkpoint, GGUFFile):
        # loading would repack its blocks
        kind = checkpoint.formats[name]
        return kind, _dense_bits(kind, shape) if kind in DENSE else memory_bits(kind, shape[-1])
    if isinstance(checkpoint, Folder) and (stored_format := checkpoint.stored_format(name)) is not None:
        return stored_format.label, stored_format.bits
    stored = checkpoint.load(name)
    if isinstance(stored, QTensor):
        named = stored.kind == "mxfp4" or stored.has_super_blocks
        kind = stored.kind.upper() if named else f"{stored.bits} bits, groups of {stored.group}"
        return kind, stored.nbytes * 8 / math.prod(shape)
    kind = str(stored.dtype).removeprefix("torch.")
    return kind, _dense_bits(kind, shape)


def format_of(checkpoint: Checkpoint, name: str) -> str:
    """Return the name of a tensor's format."""
    return _format(checkpoint, name)[0]


def _dense_bits(kind: str, shape: tuple[int, ...]) -> int:
    # bf16 matrices stay bf16; everything else becomes float32
    return 16 if DTYPES.get(kind) is torch.bfloat16 and len(shape) > 1 else 32


def cache_nbytes(
    shapes: Sequence[LayerShape], kv: str, context: int, sequences: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Return the bytes of a KV cache for sequences of `context` tokens: all pages and states."""
    # on the meta device the cache's tensors take no memory
    cache = Cache(list(shapes), _settings(kv, dtype), context=context, sequences=sequences, dtype=dtype, device="meta")
    return cache.reserved_nbytes


def full_precision_nbytes(shapes: Sequence[LayerShape], dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of a sequence's full-precision KV with default settings; 0 if the KV cache cannot be quantized."""
    try:
        return Cache(list(shapes), _settings(DEFAULT_KV, dtype), context=1, dtype=dtype, device="meta").sequence_nbytes
    except SettingsError:
        return 0


def _settings(kv: str, dtype: torch.dtype) -> CacheSettings:
    return CacheSettings(kv).for_device("cpu" if dtype is torch.float32 else "cuda")


def contexts(limit: int) -> list[int]:
    """Return the context lengths to list: the usual ones up to the model's limit, and the limit."""
    return sorted({*(n for n in CONTEXTS if n < limit), min(limit, CONTEXTS[-1])})


def cache_table(shapes: Sequence[LayerShape], lengths: Sequence[int]) -> dict[str, dict[int, int] | str]:
    """Return the cache bytes at each length for each KV setting, or the reason why a setting is not supported."""
    table: dict[str, dict[int, int] | str] = {}
    for kv in KV:
        try:
            table[kv] = {length: cache_nbytes(shapes, kv, length) for length in lengths}
        except SettingsError as err:
            table[kv] = str(err)
    return table
