"""`ModelRunner`: the forward pass of a model with its KV cache, which the engine runs directly or through graphs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from auraflux.cache import Batch, Cache, Logits, MixedBatch
from auraflux.cache.page_shards import PageShard
from auraflux.ops import invariant
from auraflux.ops._dispatch import activation_bits, fp8_products
from auraflux.weights.parallel.expert_placement import PlacementResult

NARROW = 1024  # hidden width below which int8 activations often change an answer, and int16 ones take little time


def rounded_bits(hidden: int) -> int:
    """Return the bits to which CPU kernels round the activations of a model of this width, unless `exact`."""
    return 16 if hidden < NARROW else 8


class Model(Protocol):
    """Interface of every model family."""

    config: Any
    idempotent_append: bool
    supports_mixed_batch: bool
    by_context: bool

    def forward(self, ids: Tensor, batch: Batch | MixedBatch, cache: Cache) -> Tensor: ...
    def prefill_by_layers(self, parts: Sequence[tuple[Tensor, Batch]], cache: Cache) -> None: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Ranks(Protocol):
    """The ranks that run a model together, as rank 0 sees them.

    local_layers  of rank 0
    page_shard    pages of every sequence that rank 0 stores
    """

    @property
    def local_layers(self) -> range: ...

    @property
    def page_shard(self) -> PageShard: ...

    def runner(self, model: Model, cache: Cache, exact: bool) -> "ModelRunner":
        """Return the runner of the complete model."""

    def check(self) -> None:
        """Raise if a rank is lost."""

    def place_experts(self) -> PlacementResult:
        """Deal experts out by how often each was chosen."""

    def restart(self, unless: Callable[[], bool]) -> None:
        """Restart the other ranks with empty caches, unless `unless` becomes true."""


class ModelRunner:
    """A model with its KV cache.

    exact         multiply float32 activations; otherwise CPU kernels round them to int8 per group, to int16 in a narrow model
    invariant     use batch-invariant CUDA kernels; CPU kernels always are
    fp8_prefill   linear layers of long prefill chunks may round their operands to FP8; not those of mixed batches
    hidden        hidden states behind the last logits, [N, H]; None unless `HiddenRunner`
    single_rank   no other rank takes part in its steps
    reset_graphs  drops the recordings of its steps
    """

    invariant = False
    fp8_prefill = False
    hidden: Tensor | None = None
    single_rank = True

    def __init__(self, model: Model, cache: Cache, exact: bool):
        self.model, self.cache, self.exact = model, cache, exact
        self.device = cache.device
        self.reset_graphs: Callable[[], None] = lambda: None

    @property
    def graph_refusal(self) -> str | None:
        """Reason why its steps cannot be captured; None if they can."""
        return "attention is bidirectional" if self.cache.bidirectional else None

    def announce_step(self, ids: Tensor, batch: Batch) -> AbstractContextManager[None]:
        """Announce a step to other ranks; it runs inside the block."""
        return nullcontext()

    def agree_on_capture(self, rejected: str | None) -> str | None:
        """Return why a rank failed to capture a step, None if all succeeded; `spoiled` is this rank's reason."""
        return rejected

    @contextmanager
    def numerics(self, batch: Batch | MixedBatch | None = None) -> Iterator[None]:
        """Select the kernels of `exact`, `invariant` and, for the tokens of a batch, `fp8_prefill` inside the block."""
        bits = 32 if self.exact else rounded_bits(self.model.config.hidden)
        fp8 = self.fp8_prefill and batch is not None and batch.logits is not Logits.DECODE
        with activation_bits(bits), invariant(self.invariant), fp8_products(fp8):
            yield

    def forward(self, ids: Tensor, batch: Any) -> Tensor:
        """Run the tokens of an extended batch and return the final hidden states of those that need logits, [N, H]."""
        with self.numerics(batch):
            return self.model.forward(ids, batch, self.cache)

    def prefill_by_layers(self, parts: Sequence[tuple[Tensor, Batch]]) -> None:
        """Run the tokens of extended batches that need no logits, all through a layer before the next one."""
        with self.numerics(parts[0][1]):
            self.model.prefill_by_layers(parts, self.cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of hidden states: [N, H] -> [N, V]."""
        with self.numerics():
            return self.model.logits(hidden)

    def run_captured(self, inputs: Tensor, batch: Any) -> Tensor:
        """Run the part of a step that graphs capture, here all of it, and return the logits [T, V]."""
        return self.compute_logits(self.forward(inputs, batch))

    def finish_step(self, found: Tensor, batch: Batch) -> Tensor:
        """Return the logits of a step, given the output of its captured part."""
        return found


class HiddenRunner(ModelRunner):
    """A runner that stores the hidden states behind the logits; graphs capture up to them."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of hidden states, which are stored: [N, H] -> [N, V]."""
        self.hidden = hidden
        return super().compute_logits(hidden)

    def run_captured(self, inputs: Tensor, batch: Any) -> Tensor:
        """Return the final hidden states, [T, H]."""
        return self.forward(inputs, batch)

    def finish_step(self, found: Tensor, batch: Batch) -> Tensor:
        """Return the logits of the final hidden states: [T, H] -> [T, V]."""
        return self.compute_logits(found)
