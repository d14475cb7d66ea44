"""The KV cache of a model: all layers, all sequences."""

from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Logits
from auraflux.cache.block_shapes import BlockSparseShape, HeadBlocksShape
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.cache.kv_sequence import CacheGroup, Checkpoints, KVSequence, Snapshot
from auraflux.cache.layer_shapes import (
    AttentionShape,
    BidirectionalShape,
    CompressedShape,
    LatentShape,
    is_bidirectional,
)
from auraflux.cache.layers.recurrent import StateGroup
from auraflux.cache.page_shards import UNSHARDED, PageShard
from auraflux.cache.pages import LayerGroup
from auraflux.cache.recurrent_shapes import RecurrentShape
from auraflux.cache.settings import CacheSettings
from auraflux.cache.step_index import StepIndex, WriteObserver, no_observer
from auraflux.errors import CacheFull, ContextError, InputError, SettingsError
from auraflux.ops.turboquant.calibration import Calibration

MIN_LENGTH_BUCKET = 64  # tokens
SINK_COPIES = 4  # distinct sink-token pages to reserve per sequence, for forks and prefix entries

LayerShape = (
    AttentionShape | BidirectionalShape | LatentShape | CompressedShape | BlockSparseShape | HeadBlocksShape | RecurrentShape
)


class Cache:
    """The pages and recurrent states of all layers, and the sequences that own them.

    context           most tokens of one sequence
    sequences         open at the same time
    tokens            capacity of full-attention layers over all sequences; by default `sequences` times `context`
    page              tokens in a page
    chunk             most tokens of a step over all sequences, which sliding windows reserve pages for
    rollback_tokens   tokens by which a sequence with sliding windows can be truncated without a checkpoint
    cached_sequences  prefix-cache entries that sliding windows reserve pages for, in addition to `sequences`
    key_calibration   per-channel mean and scale of keys, for quantized layers; None to quantize keys without
    local_layers      layers that have memory on this rank; the others are only counted. By default all
    page_shard        pages of full-attention layers that have memory on this rank. By default all
    dtype             of tensors that are not quantized
    """

    def __init__(
        self,
        shapes: list[LayerShape],
        settings: CacheSettings,
        *,
        context: int,
        sequences: int = 1,
        tokens: int | None = None,
        page: int = 64,
        chunk: int = 512,
        rollback_tokens: int = 32,
        cached_sequences: int = 0,
        key_calibration: ModelCalibration | None = None,
        local_layers: range | None = None,
        page_shard: PageShard = UNSHARDED,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        sizes = {"context": context, "sequences": sequences, "tokens": tokens, "page": page, "chunk": chunk}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise SettingsError(f"{name}={size} must be at least 1.")
        # every sequence may reach the context without sharing pages
        self.tokens = -(-context // page) * page * sequences if tokens is None else tokens
        if rollback_tokens < 0:
            raise SettingsError(f"rollback_tokens={rollback_tokens} is negative.")
        self.shapes, self.settings, self.context, self.sequences = shapes, settings, context, sequences
        self.page, self.chunk, self.rollback_tokens = page, chunk, rollback_tokens
        self.cached_sequences, self.key_calibration = cached_sequences, key_calibration
        # set by the prefix cache: frees pages of a group before checkpoints are evicted, and returns whether it could
        self.evict_prefix: Callable[[CacheGroup], bool] = lambda group: False
        self.dtype, self.device = dtype, torch.device(device)
        self.checkpoints = Checkpoints(settings.checkpoint_stride, settings.checkpoint_nbytes)
        self._page_groups: dict[tuple[int | None, int, int | None], LayerGroup] = {}
        self._angles: dict[Hashable, Tensor] = {}
        self._indexes: dict[tuple[int, int, int], StepIndex] = {}
        plan = settings.plan(shapes)
        kinds = enumerate(zip(shapes, plan, strict=True))
        self.on_write: WriteObserver = no_observer
        self.local_layers, self.page_shard = range(len(shapes)) if local_layers is None else local_layers, page_shard
        self._is_local = True
        self.layers: list[Any] = [self._build(shape, bits, number) for number, (shape, bits) in kinds]
        for shape in shapes:
            if shape.attends:
                # shapes count bf16
                nbytes = shape.uncompressed_nbytes * dtype.itemsize // 2
                self.group(shape.span, shape.page).uncompressed_nbytes += nbytes
        self.format = self._format(plan)
        self._check_budget()

    def _format(self, plan: list[Any]) -> str:
        """Return a description of the stored bytes: snapshots fit caches of the same format."""
        settings, quantized = self.settings, any(plan)
        # the GPU and the CPU codec order codes differently
        device = self.device.type if quantized else None
        digest = None if self.key_calibration is None else self.key_calibration.digest
        rows = settings.resolved_sink_tokens, settings.resolved_recent_window, settings.bf16_window
        window = (*rows, digest) if quantized else ()
        return repr((self.shapes, plan, *window, settings.seed, self.page, self.dtype, device))

    def _check_budget(self) -> None:
        limit = self.settings.checkpoint_nbytes
        if self.has_states and 0 < limit < self.states.slot_nbytes:
            raise SettingsError(
                f"checkpoint_nbytes={limit} holds no checkpoint: one takes {self.states.slot_nbytes} bytes. "
                "Give at least that, or 0 for none."
            )

    def _build(self, shape: LayerShape, bits: Any, number: int) -> Any:
        self._is_local = number in self.local_layers
        for group in self.groups:
            group.is_local = self._is_local
        return shape.build(self, bits, number)

    def divides(self, length_bucket: int) -> bool:
        """Return whether some layers attend within chunks shorter than such sequences."""
        sizes = (shape.window for shape in self.shapes if isinstance(shape, AttentionShape) and shape.chunked)
        return any(size is not None and size < length_bucket for size in sizes)

    @cached_property
    def states(self) -> StateGroup:
        """The group of all recurrent layers."""
        made = StateGroup(self.sequences, self.device)
        made.is_local = self._is_local
        return made

    def group(self, span: int | None, size: int | None = None, limit: int | None = None) -> LayerGroup:
        """Return the group of layers that attend to `span` positions and store the first `limit`, in pages of `size` tokens."""
        key = span, size or self.page, limit
        if key not in self._page_groups:
            page_shard = self.page_shard if span is None and limit is None else UNSHARDED
            options = key[1], self.rollback_tokens, self.device, limit, page_shard
            self._page_groups[key] = LayerGroup(span, self._pages(*key), *options)
            self._page_groups[key].is_local = self._is_local
        return self._page_groups[key]

    def _pages(self, span: int | None, size: int, limit: int | None) -> int:
        """Return the number of pages to reserve for a group."""
        sequences = self.sequences + self.cached_sequences
        if limit is not None:
            return SINK_COPIES * sequences * -(-limit // size)
        if span is None:
            return -(-self.tokens // size)
        # the window of each sequence, and another one for a checkpoint; sequences share the tokens of a step
        window, step = -(-(span - 1) // size) + 1, -(-self.chunk // size)
        each = -(-(span - 1 + self.rollback_tokens) // size) + 2 + window
        full = -(-self.context // size) + window
        return min(sequences * each + step, sequences * full)

    def layer_calibration(self, number: int, heads: int, width: int) -> Calibration | None:
        """Return the key calibration of a layer as ops take it; None where keys are not calibrated."""
        if self.key_calibration is None:
            return None
        found = self.key_calibration.for_layer(number, heads, width)
        if found.rope_key not in self._angles:
            # a sequence's last page may extend past the context
            positions = -(-self.context // self.page) * self.page
            self._angles[found.rope_key] = found.angles(positions).to(self.device)
        return found.prepare(self._angles[found.rope_key])

    @property
    def groups(self) -> list[CacheGroup]:
        """All cache groups: recurrent states, then pages."""
        # states first: opening a sequence may fail for lack of a slot, before anything else is allocated
        return [*([self.states] if self.has_states else []), *self._page_groups.values()]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one more token in all layers, within their windows."""
        return sum(layer.token_nbytes for layer in self.layers)

    @property
    def local_token_nbytes(self) -> int:
        """Bytes of one more token on this rank."""
        # layers after the last one with a cache append nothing
        local = [self.layers[number] for number in self.local_layers if number < len(self.layers)]
        return sum(-(-layer.token_nbytes // layer.group.page_shard.size) for layer in local if layer.token_nbytes)

    @property
    def sequence_nbytes(self) -> int:
        """Bytes of a sequence's sink and recent tokens in full precision."""
        return sum(layer.full_precision_nbytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes in use: pages, states of open sequences, and states in checkpoints."""
        saved = sum(c.saved[self.states].nbytes for c in self.checkpoints) if self.has_states else 0
        return sum(group.nbytes for group in self.groups) + saved

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all pages and states, in use or not."""
        return sum(group.reserved_nbytes for group in self.groups)

    @property
    def page_nbytes(self) -> int:
        """Bytes on this rank of `page` tokens in all full-attention layers."""
        groups = self._page_groups.values()
        return sum(-(-group.local_page_nbytes * self.page // group.size) for group in groups if group.grows)

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes that the stored tokens and states would take without quantization, in this cache's dtype."""
        states = self.states.nbytes if self.has_states else 0
        groups = self._page_groups.values()
        return states + sum(group.pool.used * group.size * group.uncompressed_nbytes for group in groups)

    def open(self) -> KVSequence:
        """Open an empty sequence."""
        return KVSequence({group: group.open() for group in self.groups}, self.checkpoints, self.format)

    @property
    def page_groups(self) -> list[LayerGroup]:
        return list(self._page_groups.values())

    @property
    def has_states(self) -> bool:
        """Return whether the model has recurrent layers; their states lie in adjacent slots in a batch."""
        return "states" in vars(self)

    @property
    def needs_checkpoints(self) -> bool:
        """Return whether sequences can be truncated to checkpoints only: they have recurrent states or sliding windows."""
        return self.has_states or any(group.span is not None for group in self._page_groups.values())

    @property
    def bidirectional(self) -> bool:
        """Return whether tokens attend to later ones: a prompt is computed in one step, and nothing follows it."""
        return is_bidirectional(self.shapes)

    @property
    def supports_padding(self) -> bool:
        """Return whether batches can be padded with dummy sequences."""
        return not self.has_states

    def batch(
        self,
        sequences: list[KVSequence],
        expected: int = 0,
        padding_sequences: int = 0,
        logits: Logits = Logits.ALL,
        part: int = 0,
    ) -> Batch:
        """Make a batch.

        expected  length that one of its sequences will reach, if it is known
        part      number of the batch in a step of several, each of which has an index of its own
        """
        expected, find_index = min(expected, self.context), partial(self._find_index, part=part)
        return Batch(sequences, self.context, find_index, self.evict, expected, padding_sequences, logits)

    def evict(self, group: CacheGroup) -> bool:
        """Free pages of a group from the prefix cache or from checkpoints; return whether there were any."""
        return self.evict_prefix(group) or self.checkpoints.evict(group)

    def _find_index(self, count: int, longest: int, part: int = 0) -> StepIndex:
        """Return the index of the power-of-two length bucket for `count` sequences: kernels split their work by it."""
        return self.index(count, min(1 << max(longest, MIN_LENGTH_BUCKET - 1).bit_length(), self.context), part)

    def index(self, count: int, length_bucket: int, part: int = 0) -> StepIndex:
        """Return the index for `count` sequences, none longer than `length_bucket`, in a part of a step."""
        key = count, length_bucket, part
        if key not in self._indexes:
            self._indexes[key] = StepIndex(count, length_bucket, self.device)
            if part == 0:
                # ranks run no step of several parts
                self._indexes[key].on_write = partial(self.on_write, key[:2])
        return self._indexes[key]

    def observe(self, on_write: WriteObserver) -> None:
        """Call an observer for each later write: (target, kind, arguments); a target is a group's number or an index's key."""
        self.on_write = on_write
        for number, group in enumerate(self.groups):
            group.on_write = partial(on_write, number)

    def clear_indexes(self) -> None:
        """Drop all step indexes: the ranks that replicated them are gone."""
        self._indexes.clear()

    @property
    def growth_nbytes(self) -> int:
        """Bytes that are in use twice while a store grows."""
        return max((store.nbytes for group in self.page_groups if group.grows for store in group.local_stores), default=0)

    def grow(self, nbytes: int) -> bool:
        """Add pages of so many bytes to full-attention layers; return whether there are any. Drops all step indexes."""
        pages = nbytes // self.page_nbytes if self.page_nbytes and self.page_shard is UNSHARDED else 0
        if pages == 0:
            return False
        for group in self.page_groups:
            if group.grows:
                group.grow(pages * self.page // group.size)
        self.tokens += pages * self.page
        self.clear_indexes()
        return True

    def restore(self, snapshot: Snapshot) -> KVSequence:
        """Open a sequence with the contents of a snapshot."""
        if snapshot.format != self.format:
            raise InputError(f"a snapshot of {snapshot.format} does not fit a cache of {self.format}.")
        if snapshot.length > self.context:
            raise ContextError(
                f"a snapshot of {snapshot.length} tokens does not fit: the context is limited to {self.context}. "
                f"Make the cache with context={snapshot.length} or more."
            )
        for group, image in zip(self.groups, snapshot.images, strict=True):
            while image.pages > group.free:
                if not self.evict(group):
                    raise CacheFull(
                        f"a snapshot needs {image.pages} {group.describe()}, and {group.free} are free. Close a sequence, "
                        "or make the cache with more 'sequences' or 'tokens'."
                    )
        states = {group: group.open() for group in self.groups}
        for state, image in zip(states.values(), snapshot.images, strict=True):
            state.restore(image)
        return KVSequence(states, self.checkpoints, self.format, snapshot.length)
