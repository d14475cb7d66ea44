"""The state of recurrent layers: the last inputs of a short convolution and the memory of a delta rule or of Mamba-2's.

Such a state is as large after one token as after a million, and cannot be cut back: only a copy made earlier can be restored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer
from auraflux.cache.deal import ALONE
from auraflux.cache.index import Note, StepIndex, unheard
from auraflux.cache.pages import reserve
from auraflux.errors import CacheFull
from auraflux.ops.delta.reference import (
    CONV_WIDTH,
    channel_delta,
    delta_layer_step,
    gated_delta_prefill,
    selective_scan,
    short_conv,
)


class StateGroup:
    """The states of all recurrent layers, with one slot for each sequence.

    stores       of all layers; those that others hold are on the device meta
    slot_nbytes  of a slot in all of them
    note         hears what is done to states
    """

    deal = ALONE

    def __init__(self, slots: int, device: torch.device):
        self.slots, self.device, self.slot_nbytes = slots, device, 0
        self.stores: list[Tensor] = []
        self._free = list(range(slots - 1, -1, -1))
        self._open: set[StateRow] = set()
        self.own: list[Tensor] = []
        self.holds = True
        self.note: Note = unheard
        self._marks = count()

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Make a store of all slots, [S, *shape]."""
        where = self.device if self.holds else torch.device("meta")
        self.stores.append(reserve(self.slots, *shape, dtype=dtype, device=where))
        if self.holds:
            self.own.append(self.stores[-1])
        self.slot_nbytes += self.stores[-1][0].nbytes
        return self.stores[-1]

    def held(self, length: int) -> int:
        """Positions that are kept: a state holds none."""
        return 0

    @property
    def nbytes(self) -> int:
        return (self.slots - len(self._free)) * self.slot_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all slots here."""
        return self.slots * sum(store[0].nbytes for store in self.own)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def filler(self) -> "StateRow":
        raise NotImplementedError("steps of recurrent layers are not filled up with other tokens.")

    def describe(self) -> str:
        return "recurrent states"

    def needs(self, steps: list[tuple["StateRow", int, int]]) -> int:
        return 0

    def settle(self) -> bool:
        """Tell that states need all they have."""
        return False

    def refresh(self, index: StepIndex, rows: list["StateRow"]) -> None:
        """States do not move, but those of another sequence are elsewhere."""
        if index.count == 1:
            index.move_to(rows[0].slot)

    def open(self) -> "StateRow":
        if not self._free:
            raise CacheFull(
                f"all {self.slots} recurrent states are in use. Close a sequence, or make the cache with more 'sequences'."
            )
        row = StateRow(self, self._free.pop())
        self._open.add(row)
        row.truncate(0)
        return row

    def close(self, row: "StateRow") -> None:
        """Take back the slot of a row."""
        self._open.remove(row)
        self._free.append(row.slot)

    def arrange(self, rows: list["StateRow"]) -> None:
        """Move states so that these lie side by side from the first slot on: kernels then read them where they are."""
        there = {row.slot: row for row in self._open}
        for slot, row in enumerate(rows):
            if row.slot == slot:
                continue
            other, old = there.get(slot), row.slot
            assert old is not None
            (self.move if other is None else self.swap)(old, slot)
            if other is None:
                self._free[self._free.index(slot)] = old
                there.pop(old)
            else:
                other.slot, there[old] = old, other
            row.slot, there[slot] = slot, row

    def clear(self, slot: int) -> None:
        """Begin a state."""
        for store in self.own:
            store[slot].zero_()
        self.note("clear", slot)

    def move(self, slot: int, other: int) -> None:
        """Write a state to another slot."""
        for store in self.own:
            store[other] = store[slot]
        self.note("move", slot, other)

    def swap(self, slot: int, other: int) -> None:
        """Let two states change places."""
        for store in self.own:
            kept = store[other].clone()
            store[other] = store[slot]
            store[slot] = kept
        self.note("swap", slot, other)

    def keep(self, slot: int) -> "StateMark":
        """Copy a state for a checkpoint."""
        made = StateMark([store[slot].clone() for store in self.own], self, next(self._marks))
        self.note("keep", slot, made.number)
        return made

    def put(self, slot: int, mark: "StateMark") -> None:
        """Give a slot the state of a checkpoint."""
        for store, tensor in zip(self.own, mark.tensors, strict=True):
            store[slot] = tensor
        self.note("put", slot, mark.number)


@dataclass(frozen=True)
class StateMark:
    """The state that a checkpoint keeps, one tensor for each store here; others know theirs by its number."""

    tensors: list[Tensor]
    group: StateGroup
    number: int

    @property
    def nbytes(self) -> int:
        return self.group.slot_nbytes

    def release(self) -> None:
        self.group.note("drop", self.number)


@dataclass(frozen=True)
class StateImage:
    """A copy of one sequence's state, one tensor for each store."""

    tensors: list[Tensor]
    pages: int = 0


class StateRow:
    """The state of one sequence. It takes the place of a `PageRow`, and holds only the newest position.

    parked  it has given its slot back: only checkpoints know the state
    """

    def __init__(self, group: StateGroup, slot: int):
        self.group, self.slot, self.stamp, self.parked = group, slot, 0, False

    @property
    def place(self) -> int:
        return self.slot

    @property
    def nbytes(self) -> int:
        return 0 if self.parked else self.group.slot_nbytes

    @property
    def plain_nbytes(self) -> int:
        return self.nbytes

    def settle(self, length: int) -> None:
        """Nothing gets old."""

    def extend(self, length: int, new: int) -> None:
        """There is always room."""

    def reaches(self, length: int) -> bool:
        return length == 0

    def truncate(self, length: int) -> None:
        assert length == 0, "only a checkpoint has an earlier state"
        if not self.parked:
            self.group.clear(self.slot)

    def shorten(self, length: int) -> None:
        """Extra tokens have left the state as it was."""

    def mark(self, length: int) -> StateMark:
        return self.group.keep(self.slot)

    def rewind(self, length: int, mark: StateMark) -> None:
        if not self.parked:
            self.group.put(self.slot, mark)

    def fork(self) -> "StateRow":
        other = self.group.open()
        if not self.parked:
            self.group.move(self.slot, other.slot)
        return other

    def park(self) -> None:
        """Give the slot back."""
        self.close()
        self.parked = True

    def snapshot(self) -> StateImage:
        return StateImage([store[self.slot].cpu().clone() for store in self.group.stores])

    def image_of(self, length: int, mark: StateMark) -> StateImage:
        """Copy what the row held at a checkpoint."""
        return StateImage([tensor.cpu() for tensor in mark.tensors])

    def restore(self, image: StateImage) -> None:
        for store, tensor in zip(self.group.stores, image.tensors, strict=True):
            store[self.slot] = tensor.to(store.device)

    def close(self) -> None:
        if not self.parked:
            self.group.close(self)


class RecurrentLayer(Layer):
    """The convolution and delta state of one layer."""

    token_nbytes = 0

    def __init__(self, group: StateGroup, channels: int, heads: int, key_width: int, value_width: int, dtype: torch.dtype):
        self.group = group
        self.conv = group.zeros(CONV_WIDTH - 1, channels, dtype=dtype)
        self.delta = group.zeros(heads, key_width, value_width, dtype=torch.float32)

    def view(self, batch: Batch) -> slice | Tensor:
        """Slots of the batch's sequences, as an index of a store."""
        slots = batch.places
        if slots == tuple(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[0] + len(slots))
        return torch.tensor(slots, device=self.conv.device)

    def step(
        self,
        batch: Batch,
        qkv: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        weights: tuple[Tensor, ...],
        unit_eps: float,
        eps: float,
    ) -> Tensor:
        """Take one token of each sequence through all of the layer between its projections, see `delta_layer_step`.

        weights  taps, a_log, dt_bias and norm
        """
        with self._chosen(batch, self.conv) as conv, self._chosen(batch, self.delta) as state:
            return delta_layer_step(qkv, z, a, b, conv, state, *weights, batch.starts, unit_eps, eps)

    def convolve(self, batch: Batch, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the new tokens through the short convolution, see `short_conv`: [T, C] -> [T, C]."""
        return self._convolve(batch, x, weight, self.conv, bias)

    def _convolve(self, batch: Batch, x: Tensor, weight: Tensor, store: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._carried(batch, store, lambda state, starts: short_conv(x, state, weight, starts, bias))

    def _carried(self, batch: Batch, store: Tensor, convolve: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run the new tokens through a convolution that is given states and where sequences begin."""
        if batch.extra is None:
            with self._chosen(batch, store) as state:
                return convolve(state, batch.starts)
        # extra tokens go as a sequence of their own, whose state is dropped
        slots = batch.index.slots
        states = store.index_select(0, slots)
        out = convolve(states, batch.index.parts)
        store.index_copy_(0, slots[:1], states[:1])
        return out

    def update(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Write the new tokens to the delta memory and read it, see `gated_delta_prefill`: [T, H, V]."""
        if batch.extra is not None:
            # a memory that neither fades nor is written to stays what it is to the bit
            decay, beta = decay.maximum(batch.beyond), torch.addcmul(beta, beta, batch.beyond, value=-1)
        with self._chosen(batch, self.delta) as state:
            return gated_delta_prefill(state, q, k, v, decay, beta, batch.starts)

    @contextmanager
    def _chosen(self, batch: Batch, store: Tensor) -> Iterator[Tensor]:
        """The states of the batch's sequences, [B, ...]; what is written to them is kept."""
        slots: slice | Tensor = batch.view(self)
        if batch.extra is not None and self.group.slots > 1:
            # a step that recurs does so for other sequences too
            slots = batch.index.slots[:1]
        chosen = store[slots]
        yield chosen
        if not isinstance(slots, slice):
            store[slots] = chosen


class ChannelDeltaLayer(RecurrentLayer):
    """A delta memory whose channels fade by themselves; queries, keys and values are convolved apart."""

    def __init__(self, group: StateGroup, channels: int, heads: int, key_width: int, value_width: int, dtype: torch.dtype):
        super().__init__(group, channels, heads, key_width, value_width, dtype)
        self.others = [group.zeros(CONV_WIDTH - 1, channels, dtype=dtype) for _ in range(2)]

    def convolve_each(self, batch: Batch, qkv: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Run queries, keys and values of the new tokens through their convolutions, each [T, C]."""
        stores = zip(qkv, weights, (self.conv, *self.others), strict=True)
        return [self._convolve(batch, x, weight, store) for x, weight, store in stores]

    def update(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Write the new tokens to the delta memory and read it, see `channel_delta`: [T, H, V]."""
        if batch.extra is not None:
            # a memory that neither fades nor is written to stays what it is to the bit
            beyond = batch.beyond
            decay, beta = decay.maximum(beyond.unsqueeze(2)), torch.addcmul(beta, beta, beyond, value=-1)
        with self._chosen(batch, self.delta) as state:
            return channel_delta(state, q, k, v, decay, beta, batch.starts)


class ScanLayer(RecurrentLayer):
    """A memory that is written to without a look at what it holds."""

    def scan(self, batch: Batch, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor) -> Tensor:
        """Write the new tokens to the memory and read it, see `selective_scan`: [T, H V]."""
        if batch.extra is not None:
            # a memory that neither fades nor is written to stays what it is to the bit
            decay, step = decay.maximum(batch.beyond), torch.addcmul(step, step, batch.beyond, value=-1)
        with self._chosen(batch, self.delta) as state:
            return selective_scan(state, xbc, decay, step, skip, batch.starts)
