"""The state of recurrent layers: the last inputs of a short convolution, and the state of a delta rule or of Mamba-2.

Such a state has a fixed size and cannot be truncated: only a copy saved earlier can be restored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer
from auraflux.cache.page_pool import reserve
from auraflux.cache.page_shards import UNSHARDED
from auraflux.cache.step_index import StepIndex, WriteObserver, no_observer
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
    """The states of all recurrent layers, with one slot per sequence.

    stores        of all layers; those of other ranks are on the meta device
    local_stores  of layers that have memory on this rank
    slot_nbytes   of a slot in all stores
    on_write      observer of writes to states
    """

    page_shard, grows = UNSHARDED, False

    def __init__(self, slots: int, device: torch.device):
        self.slots, self.device, self.slot_nbytes = slots, device, 0
        self.stores: list[Tensor] = []
        self._free = list(range(slots - 1, -1, -1))
        self._open: set[StateSlot] = set()
        self.local_stores: list[Tensor] = []
        self.is_local = True
        self.on_write: WriteObserver = no_observer
        self._checkpoint_numbers = count()

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate a store of all slots, [S, *shape]."""
        where = self.device if self.is_local else torch.device("meta")
        self.stores.append(reserve(self.slots, *shape, dtype=dtype, device=where))
        if self.is_local:
            self.local_stores.append(self.stores[-1])
        self.slot_nbytes += self.stores[-1][0].nbytes
        return self.stores[-1]

    def resident_tokens(self, length: int) -> int:
        """Return 0: a state stores no positions."""
        return 0

    @property
    def nbytes(self) -> int:
        return (self.slots - len(self._free)) * self.slot_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all slots on this rank."""
        return self.slots * sum(store[0].nbytes for store in self.local_stores)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def padding_state(self) -> "StateSlot":
        raise NotImplementedError("batches of recurrent layers cannot be padded with sequences.")

    def describe(self) -> str:
        return "recurrent states"

    def pages_needed(self, extensions: list[tuple["StateSlot", int, int]]) -> int:
        return 0

    def release_expired(self) -> bool:
        """Return False: states hold no pages."""
        return False

    def update_index(self, index: StepIndex, states: list["StateSlot"]) -> None:
        """Write the slot of a single sequence to the index of a step."""
        if index.count == 1:
            index.set_slot(states[0].slot)

    def open(self) -> "StateSlot":
        if not self._free:
            raise CacheFull(
                f"all {self.slots} recurrent states are in use. Close a sequence, or make the cache with more 'sequences'."
            )
        state = StateSlot(self, self._free.pop())
        self._open.add(state)
        state.truncate(0)
        return state

    def close(self, state: "StateSlot") -> None:
        """Free a slot."""
        self._open.remove(state)
        self._free.append(state.slot)

    def compact(self, states: list["StateSlot"]) -> None:
        """Move states to adjacent slots from the first on, so that kernels read them without a gather."""
        there = {state.slot: state for state in self._open}
        for slot, state in enumerate(states):
            if state.slot == slot:
                continue
            other, old = there.get(slot), state.slot
            assert old is not None
            (self.copy if other is None else self.swap)(old, slot)
            if other is None:
                self._free[self._free.index(slot)] = old
                there.pop(old)
            else:
                other.slot, there[old] = old, other
            state.slot, there[slot] = slot, state

    def clear(self, slot: int) -> None:
        """Set a state to zeros."""
        for store in self.local_stores:
            store[slot].zero_()
        self.on_write("clear", slot)

    def copy(self, slot: int, other: int) -> None:
        """Copy a state to another slot."""
        for store in self.local_stores:
            store[other] = store[slot]
        self.on_write("copy", slot, other)

    def swap(self, slot: int, other: int) -> None:
        """Swap the states of two slots."""
        for store in self.local_stores:
            saved = store[other].clone()
            store[other] = store[slot]
            store[slot] = saved
        self.on_write("swap", slot, other)

    def save(self, slot: int) -> "StateCheckpoint":
        """Copy a state for a checkpoint."""
        made = StateCheckpoint([store[slot].clone() for store in self.local_stores], self, next(self._checkpoint_numbers))
        self.on_write("save", slot, made.number)
        return made

    def load(self, slot: int, saved: "StateCheckpoint") -> None:
        """Restore the state of a checkpoint to a slot."""
        for store, tensor in zip(self.local_stores, saved.tensors, strict=True):
            store[slot] = tensor
        self.on_write("load", slot, saved.number)


@dataclass(frozen=True)
class StateCheckpoint:
    """The state of a checkpoint, one tensor per local store; other ranks find theirs by its number."""

    tensors: list[Tensor]
    group: StateGroup
    number: int

    @property
    def nbytes(self) -> int:
        return self.group.slot_nbytes

    def release(self) -> None:
        self.group.on_write("drop", self.number)


@dataclass(frozen=True)
class StateImage:
    """A copy of one sequence's state, one tensor per store."""

    tensors: list[Tensor]
    pages: int = 0


class StateSlot:
    """The recurrent-state slot of one sequence: the counterpart of a `PageTable`, with the state after the last token only.

    suspended  the slot is free again, and the state is in checkpoints only
    """

    def __init__(self, group: StateGroup, slot: int):
        self.group, self.slot, self.version, self.suspended = group, slot, 0, False

    @property
    def nbytes(self) -> int:
        return 0 if self.suspended else self.group.slot_nbytes

    def used_nbytes(self, length: int) -> int:
        return self.nbytes

    def uncompressed_nbytes(self, length: int) -> int:
        return self.nbytes

    def release_expired(self, length: int) -> None:
        """Do nothing: a state has no pages."""

    def extend(self, length: int, new: int) -> None:
        """Do nothing: a state has a fixed size."""

    def can_truncate(self, length: int) -> bool:
        return length == 0

    def truncate(self, length: int) -> None:
        assert length == 0, "only a checkpoint has an earlier state"
        if not self.suspended:
            self.group.clear(self.slot)

    def drop_padding(self, length: int) -> None:
        """Do nothing: padding tokens do not change the state."""

    def checkpoint(self, length: int) -> StateCheckpoint:
        return self.group.save(self.slot)

    def rewind(self, length: int, saved: StateCheckpoint) -> None:
        if not self.suspended:
            self.group.load(self.slot, saved)

    def fork(self) -> "StateSlot":
        other = self.group.open()
        if not self.suspended:
            self.group.copy(self.slot, other.slot)
        return other

    def suspend(self) -> None:
        """Free the slot."""
        self.close()
        self.suspended = True

    def snapshot(self) -> StateImage:
        return StateImage([store[self.slot].cpu().clone() for store in self.group.stores])

    def snapshot_at(self, length: int, saved: StateCheckpoint) -> StateImage:
        """Copy the state of a checkpoint at `length`."""
        return StateImage([tensor.cpu() for tensor in saved.tensors])

    def restore(self, image: StateImage) -> None:
        for store, tensor in zip(self.group.stores, image.tensors, strict=True):
            store[self.slot] = tensor.to(store.device)

    def close(self) -> None:
        if not self.suspended:
            self.group.close(self)


class RecurrentLayer(Layer):
    """The convolution inputs and delta state of one layer."""

    token_nbytes = 0

    def __init__(self, group: StateGroup, channels: int, heads: int, key_width: int, value_width: int, dtype: torch.dtype):
        self.group = group
        self.conv = group.zeros(CONV_WIDTH - 1, channels, dtype=dtype)
        self.delta = group.zeros(heads, key_width, value_width, dtype=torch.float32)

    def view(self, batch: Batch) -> slice | Tensor:
        """Return the slots of the batch's sequences as an index of a store: a slice where they are adjacent."""
        slots = batch.slots
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
        """Run one token of each sequence through the layer between its projections, see `delta_layer_step`.

        weights  taps, a_log, dt_bias and norm
        """
        with self._states(batch, self.conv) as conv, self._states(batch, self.delta) as state:
            return delta_layer_step(qkv, z, a, b, conv, state, *weights, batch.starts, unit_eps, eps)

    def convolve(self, batch: Batch, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the new tokens through the short convolution, see `short_conv`: [T, C] -> [T, C]."""
        return self._convolve(batch, x, weight, self.conv, bias)

    def _convolve(self, batch: Batch, x: Tensor, weight: Tensor, store: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._run_conv(batch, store, lambda state, starts: short_conv(x, state, weight, starts, bias))

    def _run_conv(self, batch: Batch, store: Tensor, convolve: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run a convolution, a function of states and starts, over the new tokens."""
        if batch.padding is None:
            with self._states(batch, store) as state:
                return convolve(state, batch.starts)
        # padding tokens run as a second sequence, whose state is dropped
        slots = batch.index.slots
        states = store.index_select(0, slots)
        out = convolve(states, batch.index.padding_starts)
        store.index_copy_(0, slots[:1], states[:1])
        return out

    def update(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Update the delta state with the new tokens and read it, see `gated_delta_prefill`: [T, H, V]."""
        if batch.padding is not None:
            # decay 1 and write strength 0 on padding: the state stays bit-identical
            decay, beta = decay.maximum(batch.padding_mask), torch.addcmul(beta, beta, batch.padding_mask, value=-1)
        with self._states(batch, self.delta) as state:
            return gated_delta_prefill(state, q, k, v, decay, beta, batch.starts)

    @contextmanager
    def _states(self, batch: Batch, store: Tensor) -> Iterator[Tensor]:
        """Yield the states of the batch's sequences, [B, ...], and store them again afterwards."""
        slots: slice | Tensor = batch.view(self)
        if batch.padding is not None and self.group.slots > 1:
            # through the index: a captured step is replayed for other sequences
            slots = batch.index.slots[:1]
        states = store[slots]
        yield states
        if not isinstance(slots, slice):
            store[slots] = states


class ChannelDeltaLayer(RecurrentLayer):
    """A delta state with a decay per channel; queries, keys and values have separate convolutions."""

    def __init__(self, group: StateGroup, channels: int, heads: int, key_width: int, value_width: int, dtype: torch.dtype):
        super().__init__(group, channels, heads, key_width, value_width, dtype)
        self.key_value_convs = [group.zeros(CONV_WIDTH - 1, channels, dtype=dtype) for _ in range(2)]

    def convolve_each(self, batch: Batch, qkv: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Run the queries, keys and values of the new tokens through their convolutions, each [T, C]."""
        stores = zip(qkv, weights, (self.conv, *self.key_value_convs), strict=True)
        return [self._convolve(batch, x, weight, store) for x, weight, store in stores]

    def update(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Update the delta state with the new tokens and read it, see `channel_delta`: [T, H, V]."""
        if batch.padding is not None:
            # decay 1 and write strength 0 on padding: the state stays bit-identical
            mask = batch.padding_mask
            decay, beta = decay.maximum(mask.unsqueeze(2)), torch.addcmul(beta, beta, mask, value=-1)
        with self._states(batch, self.delta) as state:
            return channel_delta(state, q, k, v, decay, beta, batch.starts)


class ConvLayer(RecurrentLayer):
    """The inputs of a short convolution without SiLU, and no other state."""

    def __init__(self, group: StateGroup, channels: int, dtype: torch.dtype):
        self.group, self.conv = group, group.zeros(CONV_WIDTH - 1, channels, dtype=dtype)

    def convolve(self, batch: Batch, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the new tokens through the short convolution: [T, C] -> [T, C]."""
        return self._run_conv(batch, self.conv, lambda state, starts: short_conv(x, state, weight, starts, bias, True))


class ScanLayer(RecurrentLayer):
    """A Mamba-2 state: updates do not depend on its contents."""

    def scan(self, batch: Batch, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor) -> Tensor:
        """Update the state with the new tokens and read it, see `selective_scan`: [T, H V]."""
        if batch.padding is not None:
            # decay 1 and write strength 0 on padding: the state stays bit-identical
            decay, step = decay.maximum(batch.padding_mask), torch.addcmul(step, step, batch.padding_mask, value=-1)
        with self._states(batch, self.delta) as state:
            return selective_scan(state, xbc, decay, step, skip, batch.starts)
