"""What a model consists of, and how much memory it needs. Nothing of its weights is read."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.cache import LayerShape
from auraflux.errors import SettingsError
from auraflux.quant import QTensor
from auraflux.quant.gguf_blocks import memory_bits
from auraflux.weights.folder import Folder
from auraflux.weights.gguf import DENSE, GGUFFile
from auraflux.weights.names import ROUTERS, Rename
from auraflux.weights.names import ours as our_name
from auraflux.weights.row_forms import RECORDS, form_named
from auraflux.weights.row_table import BY_ROWS, HOT_NBYTES
from auraflux.weights.stored import Checkpoint

KV = ("none", "k8v8", "k8v4", "k4v4", "k4v2", "k3v3")
CONTEXTS = (4096, 32768, 131072)
# the first that is found in a tensor's name
KINDS = {
    "shared experts": r"shared_expert(s)?\.",
    "experts": r"\.(switch_mlp|experts)\.",
    "routers": r"((mlp|block_sparse_moe)\.gate\.|shared_expert_gate|\.router\.)",
    "rows on disk": BY_ROWS.pattern,
    "n-grams": r"\.ple\.",
    "streams": r"hyper_connection",
    "embeddings": r"(embed_tokens|lm_head)",
    "norms": r"norm",
    "attention": r"self_attn\.",
    "recurrent": r"linear_attn\.",
    "mlp": r"\.mlp\.",
}


# of embedding and head, which a layer that predicts further tokens has in common with the model
COPIES = re.compile(r"(embed_tokens|shared_head\.head)\.weight$")


@dataclass
class Share:
    """Tensors that have something in common.

    nbytes         on disk
    memory_nbytes  once they are loaded
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
class Survey:
    """What the tensors of a model are.

    mtp     those of a layer that predicts further tokens, which are loaded only for guesses
    unused  those that it has no use for, such as those of vision
    rows    those of tables that stay on disk, which are among the others too; what is in memory of them at most
    tables  bytes of each such table
    """

    kinds: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    formats: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    total: Share = field(default_factory=Share)
    mtp: Share = field(default_factory=Share)
    unused: Share = field(default_factory=Share)
    rows: Share = field(default_factory=Share)
    tables: dict[str, int] = field(default_factory=dict)


def survey(
    checkpoint: Checkpoint, rename: Rename, bits: int | None = None, group: int = 64, beyond: tuple[str, ...] = ()
) -> Survey:
    """Add up a checkpoint's tensors.

    bits, group  to which dense matrices are rounded when they are loaded; None leaves them as they are
    beyond       what names begin with of a layer that predicts further tokens
    """
    found = Survey()
    for name, nbytes in checkpoint.sizes().items():
        shape, ours = checkpoint.shape(name), our_name(name, rename, bool(beyond))
        count = math.prod(shape)
        if ours is None or (ours.startswith(beyond) and COPIES.search(ours)):
            found.unused.add(count, nbytes, 0)
            continue
        if BY_ROWS.search(ours):
            _add_rows(found, checkpoint, name, ours)
            continue
        label, per_weight = _format(checkpoint, name)
        if bits is not None and label in DTYPES and len(shape) > 1 and shape[-1] % group == 0 and not ROUTERS.search(ours):
            per_weight = bits + 2 * DTYPES[label].itemsize * 8 / group
        memory = round(count * per_weight / 8)
        if ours.startswith(beyond):
            found.mtp.add(count, nbytes, memory)
            continue
        for share in (found.kinds[part_of(ours)], found.formats[label], found.total):
            share.add(count, nbytes, memory)
    for table, nbytes in found.tables.items():
        for share in (found.kinds[part_of(table)], found.rows, found.total):
            share.memory_nbytes += min(nbytes, HOT_NBYTES)
    return found


def _add_rows(found: Survey, checkpoint: Checkpoint, name: str, ours: str) -> None:
    """Add a part of a table that stays on disk."""
    rows, width = checkpoint.shape(name)
    nbytes, label = checkpoint.sizes()[name], ""
    if (record := RECORDS.search(name)) is not None:
        form = form_named(record[2], width)
        width, label = (form.width, form.name) if form is not None else (width, record[2])
        label = re.sub(r"affine(\d)_(\d+)_.*", r"\1 bits, groups of \2", label)
    for share in (found.kinds[part_of(ours)], found.formats[label or _format(checkpoint, name)[0]], found.total, found.rows):
        share.add(rows * width, nbytes, 0)
    table = ours[: ours.index(".ngram_embedding.") + len(".ngram_embedding.")]
    found.tables[table] = found.tables.get(table, 0) + nbytes


def part_of(name: str) -> str:
    """The part of a model that a tensor of ours belongs to, one of `KINDS`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _format(checkpoint: Checkpoint, name: str) -> tuple[str, float]:
    """What a tensor's format is called, and the bits of one weight in memory."""
    shape = checkpoint.shape(name)
    if isinstance(checkpoint, GGUFFile):
        # loading would put its blocks in another order
        kind = checkpoint.formats[name]
        return kind, _dense_bits(kind, shape) if kind in DENSE else memory_bits(kind, shape[-1])
    if isinstance(checkpoint, Folder) and (held := checkpoint.held(name)) is not None:
        return held.label, held.bits
    stored = checkpoint.load(name)
    if isinstance(stored, QTensor):
        named = stored.kind == "mxfp4" or stored.super_block is not None
        kind = stored.kind.upper() if named else f"{stored.bits} bits, groups of {stored.group}"
        return kind, stored.nbytes * 8 / math.prod(shape)
    kind = str(stored.dtype).removeprefix("torch.")
    return kind, _dense_bits(kind, shape)


def format_of(checkpoint: Checkpoint, name: str) -> str:
    """What a tensor's format is called."""
    return _format(checkpoint, name)[0]


def _dense_bits(kind: str, shape: tuple[int, ...]) -> int:
    # matrices in bf16 stay so; all else is widened
    return 16 if DTYPES.get(kind) is torch.bfloat16 and len(shape) > 1 else 32


def cache_nbytes(
    shapes: Sequence[LayerShape], kv: str, context: int, sequences: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Most bytes that the cache takes for sequences of `context` tokens: all of its pages and states."""
    # the meta device makes the cache's own stores without their memory
    cache = Cache(list(shapes), CacheSettings(kv=kv), context=context, sequences=sequences, dtype=dtype, device="meta")
    return cache.reserved_nbytes


def plain_nbytes(shapes: Sequence[LayerShape], dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a sequence's positions that the usual settings keep as they are beside codes; 0 where keys have none."""
    try:
        return Cache(list(shapes), CacheSettings(), context=1, dtype=dtype, device="meta").sequence_nbytes
    except SettingsError:
        return 0


def contexts(limit: int) -> list[int]:
    """The lengths for which memory is told: those usual, up to what the model was made for, and that."""
    return sorted({*(n for n in CONTEXTS if n < limit), min(limit, CONTEXTS[-1])})


def cache_table(shapes: Sequence[LayerShape], lengths: Sequence[int]) -> dict[str, dict[int, int] | str]:
    """For each setting the bytes at each length; where a setting cannot be honoured, why."""
    table: dict[str, dict[int, int] | str] = {}
    for kv in KV:
        try:
            table[kv] = {length: cache_nbytes(shapes, kv, length) for length in lengths}
        except SettingsError as err:
            table[kv] = str(err)
    return table
