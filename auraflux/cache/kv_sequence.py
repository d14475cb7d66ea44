"""One sequence in the cache: its state in each group of layers, and the checkpoints it can be rewound to."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from auraflux.cache.step_index import StepIndex, WriteObserver
from auraflux.errors import InputError


class SequenceState(Protocol):
    """The state of one sequence in one cache group: a page table, or a recurrent-state slot.

    version    changes with the page table
    slot       of a recurrent state; None for pages, which are found through the step's index
    suspended  the state is in checkpoints only
    """

    version: int

    @property
    def suspended(self) -> bool: ...
    @property
    def slot(self) -> int | None: ...
    @property
    def nbytes(self) -> int: ...
    def used_nbytes(self, length: int) -> int:
        """Return the bytes that a sequence of `length` tokens fills."""

    def uncompressed_nbytes(self, length: int) -> int:
        """Return the bytes that they would take without quantization; 0 if they are copies of quantized tokens."""

    def release_expired(self, length: int) -> None: ...
    def extend(self, length: int, new: int) -> None: ...
    def can_truncate(self, length: int) -> bool: ...
    def truncate(self, length: int) -> None: ...
    def drop_padding(self, length: int) -> None: ...
    def checkpoint(self, length: int) -> Any: ...
    def rewind(self, length: int, saved: Any) -> None: ...
    def fork(self) -> "SequenceState": ...
    def suspend(self) -> None: ...
    def snapshot(self) -> Any: ...
    def snapshot_at(self, length: int, saved: Any) -> Any: ...
    def restore(self, image: Any) -> None: ...
    def close(self) -> None: ...


class CacheGroup(Hashable, Protocol):
    """Layers that share a page table, or all recurrent layers: each sequence has one state per group.

    is_local  whether layers built next have memory on this rank
    on_write  observer of writes to the group's memory
    """

    is_local: bool
    on_write: WriteObserver

    @property
    def reserved_nbytes(self) -> int: ...
    def release_expired(self) -> bool:
        """Release the pages that no sequence will read again; return whether there were any."""

    @property
    def free(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def padding_state(self) -> Any: ...
    def describe(self) -> str: ...
    def pages_needed(self, extensions: list[tuple[Any, int, int]]) -> int: ...
    def update_index(self, index: StepIndex, states: list[Any]) -> None: ...
    def open(self) -> Any: ...


@dataclass(eq=False)
class Checkpoint:
    """The state of each group at a position; None for a group that can be truncated without a checkpoint."""

    position: int
    saved: dict[CacheGroup, Any]
    owners: int = 1

    @cached_property
    def nbytes(self) -> int:
        return sum(saved.nbytes for saved in self.saved.values() if saved is not None)


class Checkpoints:
    """The checkpoints of all sequences within a memory budget, in LRU order.

    stride        tokens between automatic checkpoints of a sequence; None for none
    limit_nbytes  budget of all checkpoints together
    nbytes        of all checkpoints together
    """

    def __init__(self, stride: int | None, limit_nbytes: int):
        self.stride, self.limit_nbytes, self.nbytes = stride, limit_nbytes, 0
        # a dict: there may be thousands, and every step looks them up
        self._entries: dict[Checkpoint, None] = {}

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._entries)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._entries

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint; evict the least recently used ones over the budget."""
        self._entries[checkpoint] = None
        self.nbytes += checkpoint.nbytes
        while self._entries and self.nbytes > self.limit_nbytes:
            self._drop(next(iter(self._entries)))

    def touch(self, checkpoint: Checkpoint) -> None:
        """Make a checkpoint the most recently used one."""
        del self._entries[checkpoint]
        self._entries[checkpoint] = None

    def release(self, checkpoint: Checkpoint) -> None:
        """Remove one owner of a checkpoint; drop it with its last owner."""
        checkpoint.owners -= 1
        if checkpoint.owners == 0 and checkpoint in self:
            self._drop(checkpoint)

    def evict(self, group: CacheGroup) -> bool:
        """Drop the least recently used checkpoint that holds pages of a group; return whether there was one."""
        for checkpoint in self._entries:
            if checkpoint.saved[group] is not None:
                self._drop(checkpoint)
                return True
        return False

    def _drop(self, checkpoint: Checkpoint) -> None:
        del self._entries[checkpoint]
        self.nbytes -= checkpoint.nbytes
        for saved in checkpoint.saved.values():
            if saved is not None:
                saved.release()


@dataclass(frozen=True)
class Snapshot:
    """A copy of a sequence's whole state, for a cache of the same format. It owns no pages."""

    format: str
    length: int
    images: tuple[Any, ...]


class PromptInputs(Protocol):
    """Changes that images make to a prompt: the tokens' RoPE positions, and embeddings in place of tokens."""

    def position(self, at: int) -> int:
        """Return the RoPE position of a token that is no image's."""

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return the RoPE positions of some tokens: int32 [T], or [T, R/2] where frequencies have positions of their own."""

    def ends(self, span: range, windowed: bool) -> np.ndarray | None:
        """Return the position before which each of some tokens attends, int32 [T]; None where each attends up to its own.

        windowed  in layers with a window
        """

    def embeddings(self, start: int, stop: int) -> tuple[np.ndarray, Tensor] | None:
        """Return which of some tokens have embeddings, as numbers from `start` on, and these [N, H]; None for none."""


class KVSequence:
    """The tokens of one sequence in all layers.

    adapter  number of the adapter that computes it; None for the model alone
    inputs   of its prompt, where that has images
    """

    inputs: PromptInputs | None = None

    def __init__(self, group_states: dict[CacheGroup, SequenceState], checkpoints: Checkpoints, format: str, length: int = 0):
        self.group_states, self.length, self.format = group_states, length, format
        self.closed = False
        self.adapter: int | None = None
        self._store = checkpoints
        self._own: list[Checkpoint] = []
        self._stride_length = length

    def position(self, at: int) -> int:
        """Return the RoPE position of a token that is no image's."""
        return at if self.inputs is None else self.inputs.position(at)

    def positions(self, start: int, stop: int, padding: int = 0) -> np.ndarray:
        """Return the RoPE positions of some tokens, of which the last are padding; see `PromptInputs`."""
        if self.inputs is None:
            return np.arange(start, stop, dtype=np.int32)
        # padding repeats a position: the tokens after it may be an image's, whose positions have another shape
        found = self.inputs.positions(start, stop - padding)
        return np.concatenate([found, np.repeat(found[-1:], padding, 0)])

    def attends_ahead(self, new: int) -> bool:
        """Return whether some of the next `new` tokens attend to later ones."""
        return self.inputs is not None and self.inputs.ends(range(self.length, self.length + new), True) is not None

    @property
    def nbytes(self) -> int:
        """Bytes of its pages and states; pages shared with other sequences are counted in full."""
        return sum(state.nbytes for state in self.group_states.values())

    @property
    def used_nbytes(self) -> int:
        """Bytes of its tokens and states: less than `nbytes`, because the last pages are partly empty."""
        return sum(state.used_nbytes(self.length) for state in self.group_states.values())

    @property
    def full_precision_nbytes(self) -> int:
        """Bytes of `used_nbytes` for sink and recent tokens, stored in full precision in addition to their codes."""
        states = (state for state in self.group_states.values() if state.uncompressed_nbytes(self.length) == 0)
        return sum(state.used_nbytes(self.length) for state in states)

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes that its tokens and states would take without quantization, in the dtype of this cache."""
        return sum(state.uncompressed_nbytes(self.length) for state in self.group_states.values())

    @property
    def checkpoints(self) -> list[int]:
        """Positions of its checkpoints."""
        self._own = [checkpoint for checkpoint in self._own if checkpoint in self._store]
        return [checkpoint.position for checkpoint in self._own]

    def checkpoint(self, before: int = 0) -> None:
        """Save a checkpoint at the present length, or `before` tokens earlier. Call it between steps."""
        self.check_open()
        self._stride_length, position = self.length, self.length - before
        if position == 0 or position in self.checkpoints:
            return
        made = Checkpoint(position, {group: state.checkpoint(position) for group, state in self.group_states.items()})
        if any(saved is not None for saved in made.saved.values()):
            self._own.append(made)
            self._store.add(made)

    def drop_checkpoint(self, position: int) -> None:
        """Drop the checkpoint at a position, if there is one."""
        for checkpoint in [each for each in self._own if each.position == position]:
            self._store.release(checkpoint)
            self._own.remove(checkpoint)

    def checkpoint_at_stride(self) -> None:
        """Save a checkpoint if the length crossed a multiple of the stride since the last one."""
        stride = self._store.stride
        if stride is not None and self.length // stride > self._stride_length // stride:
            self.checkpoint()

    def truncate(self, length: int) -> int:
        """Drop the tokens from `length` on; return the number of tokens before `length` that must be recomputed.

        Usually 0. Where a recurrent state or a sliding window cannot go back that far, the sequence is rewound to the last
        checkpoint at or before `length`, or emptied, and `self.length` is where to resume.
        """
        self.check_open()
        if not 0 <= length <= self.length:
            raise InputError(f"a sequence of {self.length} tokens cannot be truncated to {length}.")
        if length == self.length:
            return 0
        if not self._suspended and all(state.can_truncate(length) for state in self.group_states.values()):
            self._truncate_groups(length)
        else:
            self._rewind(length)
        return length - self.length

    def drop_padding(self, padding: int) -> None:
        """Drop the padding tokens at the end of the last step, see `Batch`."""
        self.length -= padding
        for state in self.group_states.values():
            state.drop_padding(self.length)

    def _rewind(self, length: int) -> None:
        positions = [position for position in self.checkpoints if position <= length]
        if not positions:
            self._truncate_groups(0)
            return
        found = next(checkpoint for checkpoint in self._own if checkpoint.position == max(positions))
        self._store.touch(found)
        for group, state in self.group_states.items():
            state.rewind(found.position, found.saved[group])
        self._set_length(found.position)

    def _truncate_groups(self, length: int) -> None:
        for state in self.group_states.values():
            state.truncate(length)
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        """Shorten the sequence and release the checkpoints past its end."""
        for checkpoint in self._own:
            if checkpoint.position > length:
                self._store.release(checkpoint)
        self._own = [checkpoint for checkpoint in self._own if checkpoint.position <= length]
        self.length, self._stride_length = length, min(self._stride_length, length)

    def fork(self) -> "KVSequence":
        """Return another sequence with the same tokens; both share pages until one of them writes."""
        self.check_open()
        states = {group: state.fork() for group, state in self.group_states.items()}
        other = KVSequence(states, self._store, self.format, self.length)
        other.adapter = self.adapter
        other._own, other._stride_length = list(self._own), self._stride_length
        for checkpoint in self._own:
            checkpoint.owners += 1
        return other

    def suspend(self) -> None:
        """Save a checkpoint and free the recurrent-state slot: from then on it can only be branched and truncated."""
        self.checkpoint()
        for state in self.group_states.values():
            state.suspend()

    def truncatable_length(self, length: int) -> int:
        """Return the length that `branch` or `truncate` to `length` would end at."""
        if not self._suspended and (
            length == self.length or all(state.can_truncate(length) for state in self.group_states.values())
        ):
            return length
        return max((position for position in self.checkpoints if position <= length), default=0)

    @property
    def _suspended(self) -> bool:
        """Return whether some of its state is in checkpoints only."""
        return any(state.suspended for state in self.group_states.values())

    def branch(self, length: int) -> "KVSequence":
        """Return another sequence with the longest prefix of at most `length` tokens that can be recovered."""
        other = self.fork()
        if self._suspended:
            other._rewind(length)
        else:
            other.truncate(length)
        return other

    def snapshot(self) -> Snapshot:
        """Copy its state for `Cache.restore`; the copy of a suspended sequence ends at its last checkpoint."""
        self.check_open()
        if not self._suspended:
            return Snapshot(self.format, self.length, tuple(state.snapshot() for state in self.group_states.values()))
        found = max((c for c in self._own if c in self._store), key=lambda c: c.position, default=None)
        if found is None:
            raise InputError("a suspended sequence whose checkpoints were evicted cannot be copied.")
        images = tuple(state.snapshot_at(found.position, found.saved[group]) for group, state in self.group_states.items())
        return Snapshot(self.format, found.position, images)

    def close(self) -> None:
        """Release its pages, states and checkpoints. Closing twice does nothing."""
        if not self.closed:
            self._set_length(-1)
            for state in self.group_states.values():
                state.close()
            self.length, self.closed = 0, True

    def check_open(self) -> None:
        """Raise if the sequence is closed."""
        if self.closed:
            raise InputError("the sequence is closed.")
