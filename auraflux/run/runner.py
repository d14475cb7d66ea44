"""Tokens through a model and its cache, one step after the other: what an engine and its replays both run."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.cache import Batch, Beside, Cache
from auraflux.cache.deal import Deal
from auraflux.ops import exact, invariant
from auraflux.weights.placement import Dealt


class Model(Protocol):
    """What every family's model can do."""

    config: Any
    again: bool
    beside: bool

    def __call__(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor: ...
    def remember(self, ids: Tensor, batch: Batch, cache: Cache) -> None: ...
    def at_ends(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor: ...
    def write_beside(self, ids: Tensor, both: Beside, cache: Cache) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Ranks(Protocol):
    """What rank 0 has of the ranks that run a model with it.

    here  the layers it has itself
    deal  the pages of every sequence that it has
    """

    @property
    def here(self) -> range: ...

    @property
    def deal(self) -> Deal: ...

    def runner(self, model: Model, cache: Cache, exact: bool) -> "Runner":
        """What runs the whole model."""

    def check(self) -> None:
        """Raise if a rank is gone."""

    def deal_experts(self) -> Dealt:
        """Deal experts out by how often each was chosen."""

    def restart(self, unless: Callable[[], bool]) -> None:
        """Bring the others back, with empty caches, unless something is so meanwhile."""


class Runner:
    """A model with its cache.

    exact      multiply float32 activations; otherwise CPU kernels round them to int8 per group
    invariant  have CUDA kernels give a token the same bits in any company; those of a CPU always do
    hidden     what the last scores were made of, [N, H]; None where it is not kept
    alone      nobody else takes part in its steps
    forget     gives up what was recorded of its steps
    """

    invariant = False
    hidden: Tensor | None = None
    alone = True

    def __init__(self, model: Model, cache: Cache, exact: bool):
        self.model, self.cache, self.exact = model, cache, exact
        self.device = cache.device
        self.forget: Callable[[], None] = lambda: None

    @property
    def unrecorded(self) -> str | None:
        """Why its steps cannot be recorded; None where they can."""
        return None

    def telling(self, ids: Tensor, batch: Batch) -> AbstractContextManager[None]:
        """Let others know of a step that is repeated inside the block."""
        return nullcontext()

    def agreed(self, spoiled: str | None) -> str | None:
        """Why a step was not recorded by all who take part in it; None where it was. `spoiled` is the reason here."""
        return spoiled

    @contextmanager
    def contract(self) -> Iterator[None]:
        """Compute as it is wanted, inside the block."""
        with exact(self.exact), invariant(self.invariant):
            yield

    def forward(self, flat: Tensor, batch: Batch) -> Tensor:
        """Run tokens for which there is room: the final hidden states [T, H]; of ends alone [B, H], of a silent batch none."""
        with self.contract():
            if batch.ends:
                return self.model.at_ends(flat, batch, self.cache)
            if not batch.silent:
                return self.model(flat, batch, self.cache)
            self.model.remember(flat, batch, self.cache)
            return torch.empty(0, device=self.device)

    def score(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32."""
        with self.contract():
            return self.model.logits(hidden)

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """The part of a step of decoding that can be recorded: here all of it, the scores [B, V]."""
        return self.score(self.forward(given, batch))

    def repeated_beside(self, given: Tensor, both: Beside) -> Tensor:
        """The same of a step that reads a piece of a prompt, too: the scores of what is written, [B, V]."""
        with self.contract():
            return self.score(self.model.write_beside(given, both, self.cache))

    def after(self, found: Tensor, batch: Batch) -> Tensor:
        """Make scores of what was recorded."""
        return found


class HiddenRunner(Runner):
    """One that keeps what scores are made of. They are not part of what is recorded, which gives that instead."""

    def score(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32."""
        self.hidden = hidden
        return super().score(hidden)

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """The final hidden states, [T, H]."""
        return self.forward(given, batch)

    def after(self, found: Tensor, batch: Batch) -> Tensor:
        """[T, H] -> [T, V] float32."""
        return self.score(found)
