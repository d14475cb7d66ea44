"""The experts of a layer as a model calls them: all in memory, or some of them and the others read as they are chosen.

Which experts are held never changes a result: each runs once over all its tokens, its results wait in their places, and every
token's are summed in the order of its slots (`expert_parts`, `sum_parts`).
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from auraflux.ops import (
    Activation,
    Experts,
    Routing,
    SharedExpert,
    combine,
    expert_mlp,
    expert_parts,
    mixture,
    route,
    sum_parts,
)
from auraflux.ops._recording import recorder
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.bank import Bank
from auraflux.weights.expert_files import ExpertFile
from auraflux.weights.reader import Reader
from auraflux.weights.traffic import Meter, guesses

FEW = 64  # pairs whose places are looked up in Python
GUESSED = 8  # tokens; a longer prompt asks for most experts anyway


Guess = Callable[[Tensor], Tensor]  # residual stream [T, H] -> ids [T, k]


@dataclass(frozen=True, eq=False)
class Mix:
    """Tokens on their way through a mixture.

    x         [T, H]
    scores    [T, E]  of the router
    bias      [E]     or None, see `route`
    residual  [T, H]  the stream that the result is added to
    shared    an MLP that all tokens go to, or None; `gate` [T] weighs it
    """

    x: Tensor
    scores: Tensor
    routing: Routing
    bias: Tensor | None
    residual: Tensor
    shared: SharedExpert | None
    gate: Tensor | None


class LayerExperts(Protocol):
    """What a mixture calls."""

    def announce(self, guess: Guess | None) -> None:
        """Say how to guess what the next mixture will ask for; None if there is none."""

    def mix(self, tokens: Mix) -> Tensor:
        """Choose every token's experts and add what they give to the residual stream: [T, H]."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""


@dataclass(frozen=True, eq=False)
class Resident:
    """Experts that are all in memory, or in a mapped file."""

    experts: Experts

    def announce(self, guess: Guess | None) -> None:
        """Do nothing: the experts are there."""

    def mix(self, tokens: Mix) -> Tensor:
        beside = tokens.shared, tokens.gate
        return mixture(tokens.x, tokens.scores, tokens.routing, self.experts, tokens.residual, tokens.bias, *beside)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return expert_mlp(x, ids, weights, self.experts)

    def fetch(self, ids: Tensor) -> None:
        """Do nothing: the experts are there."""

    def some(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum the experts of each token that are not negative: [T, H] float32."""
        parts = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
        expert_parts(x, ids, self.experts, parts)
        return sum_parts(parts, weights, torch.float32)


@dataclass(frozen=True)
class Overlap:
    """What is done while experts are being read.

    hits_first  run experts that are there before those that are not have come
    ahead       read what the next layer asked for last time, where it no longer has it
    guess       run the next layer's router early, and read what it chooses
    """

    hits_first: bool = True
    ahead: bool = True
    guess: bool = False


@dataclass(frozen=True, eq=False)
class Asked:
    """What a call asks for.

    ids     [T, k]  where they are computed
    flat    the same in Python
    wanted  each expert once, those of the last token last
    """

    ids: Tensor
    flat: list[int]
    wanted: list[int]


class Streamed:
    """Experts of which a bank holds some.

    biases     of all experts, by the names `Experts` has for them
    following  the next layer of the same kind
    """

    def __init__(
        self,
        file: ExpertFile,
        bank: Bank,
        reader: Reader,
        meter: Meter,
        overlap: Overlap = Overlap(),  # noqa: B008
        biases: Mapping[str, Tensor] | None = None,
        activation: Activation | None = None,
    ):
        self.file, self.bank, self.reader, self.meter, self.overlap = file, bank, reader, meter, overlap
        self.biases, slots = dict(biases or {}), len(bank.slots.memory)
        beside = {name: value.new_zeros(slots, value.shape[1]) for name, value in self.biases.items()}
        self.stacks = replace(Experts.from_blobs(bank.slots.memory, file.like), activation=activation, **beside)
        self.following: Streamed | None = None
        self._guess: Guess | None = None
        self._last: list[int] = []
        self._asked: Asked | None = None
        # whose biases stand in each slot
        self._owners: list[int | None] = [None] * slots
        self._lock = threading.RLock()

    def announce(self, guess: Guess | None) -> None:
        """Say how to guess what the next mixture will ask for; None if there is none."""
        self._guess = guess

    def look_ahead(self, residual: Tensor) -> None:
        """Have the next mixture read what it is likely to ask for: [T, H]."""
        if not self.overlap.guess or self._guess is None or self.following is None or len(residual) > GUESSED:
            return
        self.following.expect(_each(self._guess(residual).flatten().tolist()))

    def mix(self, tokens: Mix) -> Tensor:
        """Choose every token's experts and add what they give to the residual stream: [T, H]."""
        ids, weights = route(tokens.scores, tokens.routing, tokens.bias)
        # what has to be read is read while the shared MLP runs
        self.fetch(ids)
        self.look_ahead(tokens.residual)
        shared = shared_result(tokens.x, tokens.shared)
        return combine(tokens.residual, self(tokens.x, ids, weights), shared, tokens.gate)

    def fetch(self, ids: Tensor) -> None:
        """Begin to read what the next call will ask for: [T, k]."""
        with self._lock:
            self._asked = self._ask(ids)
            self._request(dict.fromkeys(self._asked.wanted))

    def expect(self, experts: Iterable[int]) -> None:
        """Read experts that are likely to be asked for, when nobody waits for others."""
        with self._lock:
            likely = list(experts)
            for expert in likely:
                self.bank.request(expert, likely, ahead=True)

    def held(self) -> list[int]:
        """Experts that are in memory or on their way there."""
        with self._lock:
            return self.bank.held()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        parts = x.new_empty(*ids.shape, x.shape[1], dtype=torch.float32)
        self.fill(x, ids, parts)
        return sum_parts(parts, weights, x.dtype)

    def some(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum the experts of each token that are not negative: [T, H] float32."""
        parts = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
        self.fill(x, ids, parts)
        return sum_parts(parts, weights, torch.float32)

    def fill(self, x: Tensor, ids: Tensor, parts: Tensor) -> None:
        """Write what experts give to their places, but for those that are negative: parts [T, k, H] float32."""
        with self._lock:
            asked, self._asked = self._asked, None
            if asked is None or asked.ids is not ids:
                asked = self._ask(ids)
            left = dict.fromkeys(asked.wanted)
            self._request(left)
            if self.overlap.ahead and self.following is not None:
                self.following.expect(self.following._last)
            while left:
                ready = self._ready(left, at_once=len(left) == len(asked.wanted))
                if ready:
                    self._run(x, asked, ready, parts)
                for expert in ready:
                    del left[expert]
                self._request(left)

    def _ask(self, ids: Tensor) -> Asked:
        """Look at the experts of all tokens, and count those that are here."""
        if (recording := recorder.recording) is not None:
            recording.spoil("experts are read from disk as they are chosen")
        flat = ids.flatten().tolist()
        wanted = list(_each(reversed(flat)))[::-1]
        self._last = list(_each(flat[-ids.shape[1] :]))
        certain = _certain(flat, ids.shape[1])
        for expert in wanted:
            held = self.bank.get(expert)
            if held is None:
                self.meter.misses += 1
                self.meter.guessed += expert not in certain
            elif held.ahead:
                self.meter.ahead += 1
            else:
                self.meter.hits += 1
        self.bank.note(Counter(expert for expert in flat if expert >= 0), len(ids))
        return Asked(ids, flat, wanted)

    def _request(self, left: dict[int, None]) -> None:
        """Have as many of some experts brought as there are slots for."""
        for expert in left:
            held = self.bank.request(expert, left)
            if held is None:
                return
            held.ahead = False

    def _ready(self, left: dict[int, None], at_once: bool) -> list[int]:
        """Those of the experts left that are there, none if a slot has become free instead.

        at_once  do not wait if there are any; otherwise half of those on their way are waited for, as every run has its cost
        """
        ready, coming = self.bank.arrived(left), self.bank.coming(left)
        missing = (len(ready) + len(coming) + 1) // 2 - len(ready)
        if not self.overlap.hits_first:
            missing = len(coming)
        elif at_once and ready:
            missing = 0
        if coming and missing > 0:
            began = time.perf_counter()
            self.reader.wait(lambda: sum(load.poll() for load in coming) >= missing)
            self.meter.stall_s += time.perf_counter() - began
            ready = self.bank.arrived(left)
        elif not ready:
            # what was read ahead has taken all slots
            others = self.bank.coming()
            self.reader.wait(lambda: any(load.poll() for load in others))
        return ready

    def _run(self, x: Tensor, asked: Asked, ready: list[int], parts: Tensor) -> None:
        """Write the results of experts that are there to their places."""
        slots = [self.bank[expert].slot for expert in ready]
        self.bank.slots.before(slots)
        for name, value in self.biases.items():
            for expert, slot in zip(ready, slots, strict=True):
                if self._owners[slot] != expert:
                    getattr(self.stacks, name)[slot] = value[expert]
        expert_parts(x, self._places(asked, dict(zip(ready, slots, strict=True))), self.stacks, parts)
        self.bank.slots.after(slots)
        for expert, slot in zip(ready, slots, strict=True):
            self._owners[slot] = expert

    def _places(self, asked: Asked, slots: dict[int, int]) -> Tensor:
        """The slots of experts in the places of their ids, and -1 for all others."""
        ids = asked.ids
        if len(asked.flat) <= FEW:
            found = torch.tensor([slots.get(expert, -1) for expert in asked.flat], dtype=torch.int32)
            return found.to(ids.device, non_blocking=True).view(ids.shape)
        # the last is for what is run elsewhere, whose number is -1
        table = torch.full((self.file.count + 1,), -1, dtype=torch.int32)
        table[list(slots)] = torch.tensor(list(slots.values()), dtype=torch.int32)
        return table.to(ids.device)[ids.view(-1).long()].view(ids.shape)


def _certain(flat: list[int], k: int) -> set[int]:
    """Those of a step's experts, k of each row, that rows ask for which are no guesses."""
    rows = guesses()
    return set(flat) if not rows else {expert for at, expert in enumerate(flat) if at // k not in rows}


def _each(experts: Iterable[int]) -> dict[int, None]:
    """Every expert once, in order; those that are run elsewhere have negative numbers and are left out."""
    return dict.fromkeys(expert for expert in experts if expert >= 0)
