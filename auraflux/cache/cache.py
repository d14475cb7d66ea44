"""The cache of a whole model: all layers, all sequences."""

from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from auraflux.cache.batch import Batch
from auraflux.cache.calibration import ModelVectors
from auraflux.cache.deal import ALONE, Deal
from auraflux.cache.index import Note, StepIndex, unheard
from auraflux.cache.pages import LayerGroup
from auraflux.cache.recurrent import StateGroup
from auraflux.cache.sequence import Checkpoints, Part, Sequence, Snapshot
from auraflux.cache.settings import CacheSettings
from auraflux.cache.shapes import AttentionShape, CompressedShape, IndexedShape, LatentShape, RecurrentShape
from auraflux.errors import CacheFull, ContextError, InputError, SettingsError
from auraflux.ops.turboquant.calibration import Calibration

SHORTEST = 64  # tokens; no index is made for less
PARTED = 4  # texts of each that windows have room for, whose first positions are their own

LayerShape = AttentionShape | LatentShape | CompressedShape | IndexedShape | RecurrentShape


class Cache:
    """What a model remembers of its sequences.

    context    most tokens of one sequence
    sequences  for which there is room
    tokens     of all sequences together, in layers that see everything; unless given, as many as `sequences` of `context` fill
    page       tokens in a page
    chunk      most tokens of a step, over all sequences, for which windows have room
    spare      tokens by which a sequence with windows can be truncated at once
    kept       sequences more for which windows have room: those that are parked
    vectors    of the model's keys, for layers that code them; None to code keys as they are
    held       layers that have memory here; those of others are only counted. By default all
    deal       pages that have memory here, of layers that see everything. By default all
    dtype      of what is not compressed
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
        spare: int = 32,
        kept: int = 0,
        vectors: ModelVectors | None = None,
        held: range | None = None,
        deal: Deal = ALONE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        sizes = {"context": context, "sequences": sequences, "tokens": tokens, "page": page, "chunk": chunk}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise SettingsError(f"{name}={size} must be at least 1.")
        # every sequence may reach the context, in pages of its own
        self.tokens = -(-context // page) * page * sequences if tokens is None else tokens
        if spare < 0:
            raise SettingsError(f"spare={spare} is negative.")
        self.shapes, self.settings, self.context, self.sequences = shapes, settings, context, sequences
        self.page, self.chunk, self.spare, self.kept, self.vectors = page, chunk, spare, kept, vectors
        # asked for a page of a part before checkpoints are: tells whether it has given up one
        self.reclaim: Callable[[Part], bool] = lambda part: False
        self.dtype, self.device = dtype, torch.device(device)
        self.checkpoints = Checkpoints(settings.checkpoint_stride, settings.checkpoint_nbytes)
        self._groups: dict[tuple[int | None, int, int | None], LayerGroup] = {}
        self._angles: dict[Hashable, Tensor] = {}
        self._indexes: dict[tuple[int, int], StepIndex] = {}
        plan = settings.plan(shapes)
        kinds = enumerate(zip(shapes, plan, strict=True))
        self.note: Note = unheard
        self.held, self.deal = range(len(shapes)) if held is None else held, deal
        self._holds = True
        self.layers: list[Any] = [self._built(shape, bits, number) for number, (shape, bits) in kinds]
        for shape in shapes:
            if shape.attends:
                self.group(shape.span, shape.page).plain_nbytes += shape.plain_nbytes
        # codes lie in another order on a GPU than on a CPU
        kind = self.device.type if any(plan) else None
        kept_plain = settings.plain_first, settings.plain_newest, None if vectors is None else vectors.digest
        self.format = repr((shapes, plan, *(kept_plain if any(plan) else ()), settings.seed, page, dtype, kind))
        self._check_budget()

    def _check_budget(self) -> None:
        limit = self.settings.checkpoint_nbytes
        if self.moves and 0 < limit < self.states.slot_nbytes:
            raise SettingsError(
                f"checkpoint_nbytes={limit} holds no checkpoint: one takes {self.states.slot_nbytes} bytes. "
                "Give at least that, or 0 for none."
            )

    def _built(self, shape: LayerShape, bits: Any, number: int) -> Any:
        self._holds = number in self.held
        for part in self.parts:
            part.holds = self._holds
        return shape.build(self, bits, number)

    @cached_property
    def states(self) -> StateGroup:
        made = StateGroup(self.sequences, self.device)
        made.holds = self._holds
        return made

    def group(self, span: int | None, size: int | None = None, limit: int | None = None) -> LayerGroup:
        """The group of layers whose queries see `span` positions, of the first `limit`, in pages of `size` tokens."""
        key = span, size or self.page, limit
        if key not in self._groups:
            deal = self.deal if span is None and limit is None else ALONE
            self._groups[key] = LayerGroup(span, self._pages(*key), key[1], self.spare, self.device, limit, deal)
            self._groups[key].holds = self._holds
        return self._groups[key]

    def _pages(self, span: int | None, size: int, limit: int | None) -> int:
        texts = self.sequences + self.kept
        if limit is not None:
            return PARTED * texts * -(-limit // size)
        if span is None:
            return -(-self.tokens // size)
        # what a token sees, and as much again as a checkpoint holds; a step's tokens are shared by the sequences
        seen, step = -(-(span - 1) // size) + 1, -(-self.chunk // size)
        each = -(-(span - 1 + self.spare) // size) + 2 + seen
        whole = -(-self.context // size) + seen
        return min(texts * each + step, texts * whole)

    def calibration(self, number: int, heads: int, width: int) -> Calibration | None:
        """What the codes of a layer's keys leave out."""
        if self.vectors is None:
            return None
        found = self.vectors.of(number, heads, width)
        if found.turning not in self._angles:
            # a sequence's last page may reach beyond the context
            reach = -(-self.context // self.page) * self.page
            self._angles[found.turning] = found.angles(reach).to(self.device)
        return found.made_ready(self._angles[found.turning])

    @property
    def parts(self) -> list[Part]:
        # states first: they alone may run out when a sequence is opened, before anything else is taken
        return [*([self.states] if self.moves else []), *self._groups.values()]

    @property
    def token_nbytes(self) -> int:
        """Bytes that one more token takes in all layers, within the windows of those that have one."""
        return sum(layer.token_nbytes for layer in self.layers)

    @property
    def held_token_nbytes(self) -> int:
        """The same of the layers that have memory here."""
        # layers after the last keep nothing of their own
        held = [self.layers[number] for number in self.held if number < len(self.layers)]
        return sum(-(-layer.token_nbytes // layer.group.deal.size) for layer in held)

    @property
    def sequence_nbytes(self) -> int:
        """Bytes that a sequence takes beside its tokens' codes: positions that are kept as they are as well."""
        return sum(layer.plain_nbytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes in use: pages with an owner, states of open sequences, and the states that checkpoints keep."""
        kept = sum(c.marks[self.states].nbytes for c in self.checkpoints) if self.moves else 0
        return sum(part.nbytes for part in self.parts) + kept

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all pages and states, in use or not."""
        return sum(part.reserved_nbytes for part in self.parts)

    @property
    def page_nbytes(self) -> int:
        """Bytes here of a page of the layers that see everything; of as many tokens where their pages have another size."""
        return sum(-(-group.own_page_nbytes * self.page // group.size) for group in self._groups.values() if group.grows)

    @property
    def plain_nbytes(self) -> int:
        """Bytes that the same positions and states would take with nothing compressed, in bf16."""
        states = self.states.nbytes if self.moves else 0
        return states + sum(group.pool.used * group.size * group.plain_nbytes for group in self._groups.values())

    def open(self) -> Sequence:
        """Begin an empty sequence."""
        return Sequence({part: part.open() for part in self.parts}, self.checkpoints, self.format)

    @property
    def page_groups(self) -> list[LayerGroup]:
        return list(self._groups.values())

    @property
    def moves(self) -> bool:
        """Whether sequences have states, which lie side by side in a batch."""
        return "states" in vars(self)

    @property
    def forgets(self) -> bool:
        """Whether sequences can be cut back only to checkpoints: they have states or windows."""
        return self.moves or any(group.span is not None for group in self._groups.values())

    @property
    def fills(self) -> bool:
        """Whether steps can be filled up with tokens that belong to no sequence."""
        return not self.moves

    def batch(
        self, sequences: list[Sequence], expected: int = 0, fillers: int = 0, silent: bool = False, ends: bool = False
    ) -> Batch:
        """Make a batch; `expected` is a length that one of its sequences will reach, if it is known."""
        return Batch(sequences, self.context, self._index, self.make_room, min(expected, self.context), fillers, silent, ends)

    def make_room(self, part: Part) -> bool:
        """Free a page of a part that nothing running needs; tell whether there was one."""
        return self.reclaim(part) or self.checkpoints.make_room(part)

    def _index(self, count: int, longest: int) -> StepIndex:
        """The index for so many sequences up to a length; kernels share their work by how far it reaches."""
        return self.index(count, min(1 << max(longest, SHORTEST - 1).bit_length(), self.context))

    def index(self, count: int, reach: int) -> StepIndex:
        """The index for so many sequences, none longer than `reach`."""
        key = count, reach
        if key not in self._indexes:
            self._indexes[key] = StepIndex(count, reach, self.device)
            self._indexes[key].note = partial(self.note, key)
        return self._indexes[key]

    def tell(self, note: Note) -> None:
        """Let somebody hear from now on what is written: (where, what, numbers); where is a part's number or an index's key."""
        self.note = note
        for number, part in enumerate(self.parts):
            part.note = partial(note, number)

    def forget_steps(self) -> None:
        """Begin anew with steps: whoever heard of them is gone."""
        self._indexes.clear()

    def restore(self, snapshot: Snapshot) -> Sequence:
        """Make a sequence of a snapshot, with pages of its own."""
        if snapshot.format != self.format:
            raise InputError(f"a snapshot of {snapshot.format} does not fit a cache of {self.format}.")
        if snapshot.length > self.context:
            raise ContextError(
                f"a snapshot of {snapshot.length} tokens does not fit: the context is limited to {self.context}. "
                f"Make the cache with context={snapshot.length} or more."
            )
        for part, image in zip(self.parts, snapshot.images, strict=True):
            while image.pages > part.free:
                if not self.make_room(part):
                    raise CacheFull(
                        f"a snapshot needs {image.pages} {part.describe()}, and {part.free} are free. Close a sequence, "
                        "or make the cache with more 'sequences' or 'tokens'."
                    )
        rows = {part: part.open() for part in self.parts}
        for row, image in zip(rows.values(), snapshot.images, strict=True):
            row.restore(image)
        return Sequence(rows, self.checkpoints, self.format, snapshot.length)
