"""Steps as replays: one is recorded and then repeated without its Python.

On a GPU a recording is a CUDA graph, on a CPU a list of kernel launches (`simd/record.py`). It reads all that changes from step
to step through a `StepIndex`, so one serves all batches of as many sequences until one outgrows the index. Steps of decoding
are recorded, and on a GPU, which would wait for the Python of a mixture's many kernels, those of prompts too.
"""

import ctypes
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from auraflux.cache import Batch, Beside
from auraflux.cache.index import StepIndex
from auraflux.run.device import device_memory, sent
from auraflux.run.runner import Runner

log = logging.getLogger("auraflux")

KEPT = 128  # recordings; the one that was used longest ago goes first
SEVERAL = 8  # of them that check guesses on a CPU: they hold the activations of all layers
SWITCHED_OFF = "it is switched off"
NO_MEMORY = "the GPU has no memory for it"


class Replay(Protocol):
    """A recorded step; `spoiled` says why it cannot be repeated."""

    @property
    def spoiled(self) -> str | None: ...
    def replay(self) -> None: ...


@dataclass(eq=False)
class Step:
    """What is known of steps that read one index, hold their states at the same places and have as many tokens.

    ids        [T]  tokens of the step; where its layers are not the first, what came before them [T, H]
    positions  [T]  of a piece of a prompt; those of decoding are in the index
    result          after each replay
    batch           of the recording: what it refers to must live as long
    """

    ids: Tensor
    positions: Tensor
    compiled: bool = False
    recording: Replay | None = None
    result: Tensor | None = None
    batch: Batch | Beside | None = None


# index, places of states, whether nobody asks what follows, new tokens of each sequence unless they are one each
Key = tuple[StepIndex, tuple[int, ...], bool, tuple[int, ...]]
# index and places of what is written, index of what is read, its tokens
BesideKey = tuple[StepIndex, tuple[int, ...], StepIndex, int]


KeyT = TypeVar("KeyT")


class Replayer:
    """Gives each sequence of a batch one token, or one sequence a piece of a prompt, by replay where that can be."""

    def __init__(self, runner: Runner, graphs: bool):
        self.runner = runner
        self._graphs = graphs
        # why steps of decoding, and those of prompts, are not replayed; None if they are
        self.refused: str | None = runner.unrecorded if graphs else SWITCHED_OFF
        self.unread: str | None = None
        # whether the last step took longer than others like it will: it was run or recorded to be replayed later
        self.settling = False
        self._steps: dict[Key, Step] = {}
        self._several: dict[Key, Step] = {}
        self._beside: dict[BesideKey, Step] = {}
        # numbers of tokens with which steps have run through one index or another
        self._run_before: set[tuple[int, ...]] = set()
        self._capture = CudaCapture(runner.agreed) if runner.device.type == "cuda" else _record
        runner.forget = self.forget

    @property
    def reads(self) -> bool:
        """Whether prompts go through `read`: where they are replayed, and where they would be, so that results are the same."""
        on_gpu = self.runner.device.type == "cuda" and self.runner.alone
        return on_gpu and self.unread is None and self.refused in (None, SWITCHED_OFF)

    def decode(self, batch: Batch, ids: list[int] | Tensor) -> Tensor:
        """Scores of the next token, [B, V]; tokens may be on the device still."""
        return self._or_cut_back(batch, lambda: self._decode(batch, ids))

    def verify(self, batch: Batch, ids: list[list[int]]) -> Tensor:
        """Scores after each of several tokens of every sequence, [T, V]; the largest number of a sequence's should recur."""
        return self._or_cut_back(batch, lambda: self._verify(batch, ids))

    def _or_cut_back(self, batch: Batch, work: Callable[[], Tensor]) -> Tensor:
        """Take a step; whatever stops it, an interrupt too, the sequences are then as they were, or shorter."""
        before = [sequence.length for sequence in batch.sequences]
        try:
            with device_memory():
                return work()
        except BaseException:
            batch.cut_back(before)
            raise

    @property
    def ahead(self) -> bool:
        """Whether a step may begin before its tokens are known here: a GPU goes on while Python does other things."""
        # ranks wait for each other in every step, and read prompts in pieces as they come
        return self.runner.device.type == "cuda" and self.runner.alone

    def _decode(self, batch: Batch, ids: list[int] | Tensor) -> Tensor:
        batch.extend([1] * len(batch.sequences))
        tokens = torch.as_tensor(ids)
        if batch.fillers:
            tokens = torch.nn.functional.pad(tokens, (0, batch.fillers))
        with self.runner.telling(tokens, batch):
            found = self._replayed(batch, tokens, lambda step: self.runner.repeated(step.ids, batch))
            return self.runner.after(found, batch)[: len(batch.sequences)]

    def repeat(self, batch: Batch, given: Tensor) -> Tensor:
        """What a runner repeats for a batch whose numbers are written already."""
        return self._replayed(batch, given, lambda step: self.runner.repeated(step.ids, batch))

    def forget(self) -> None:
        """Give all recordings up, and what is known of steps that cannot be recorded: who takes part then may be others."""
        self._steps.clear()
        self._several.clear()
        self._beside.clear()
        self._run_before.clear()
        self.refused, self.unread = self.runner.unrecorded if self._graphs else SWITCHED_OFF, None

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Take steps inside the block without recording them, and forget them afterwards."""
        self.forget()
        self.refused = SWITCHED_OFF
        try:
            yield
        finally:
            self.forget()

    def _verify(self, batch: Batch, ids: list[list[int]]) -> Tensor:
        longest = max(map(len, ids))
        # sequences with fewer tokens are given their last again, so that steps recur
        filled = torch.tensor([each + each[-1:] * (longest - len(each)) for each in ids])
        batch.extend([longest] * len(ids))
        tokens = filled.flatten()
        with self.runner.telling(tokens, batch):
            found = self._replayed(batch, tokens, lambda step: self.runner.repeated(step.ids, batch))
            if sum(map(len, ids)) < len(found):
                wanted = [line * longest + at for line, each in enumerate(ids) for at in range(len(each))]
                found = found[sent(wanted, found.device)]
                for sequence, each in zip(batch.sequences, ids, strict=True):
                    sequence.truncate(sequence.length - longest + len(each))
            return self.runner.after(found, batch)

    def read(self, batch: Batch, ids: Tensor) -> Tensor:
        """Run a piece of a prompt for which there is room: the final hidden states [T, H]."""
        return self._replayed(batch, ids, lambda step: self.runner.forward(step.ids, batch))

    def decode_beside(self, both: Beside, ids: list[int] | Tensor, piece: Tensor) -> Tensor:
        """Scores of the next token of what is written, [B, V], where there is room for these tokens and a prompt's."""
        writing, reading = both.writing, both.reading
        key = writing.index, writing.places, reading.index, len(piece)
        step = self._known(self._beside, key, KEPT, writing.tokens + len(piece), piece)
        written, read = both.split(step.ids)
        written[: len(ids)].copy_(torch.as_tensor(ids), non_blocking=True)
        read.copy_(piece, non_blocking=True)
        places = step.positions[: len(piece)]
        places.copy_(reading.positions, non_blocking=True)
        reading.positions = places
        found = self._repeated(step, both, lambda: self.runner.repeated_beside(step.ids, both))
        return found[: len(writing.sequences)]

    def is_known(self, batch: Batch, count: int) -> bool:
        """Whether a step that gives a single sequence so many tokens has been recorded on a CPU, or need not be."""
        if self.runner.device.type != "cpu" or len(batch.sequences) > 1 or self.refused or self.unread:
            return True
        index = batch.index_for(count)
        return any(key[0] is index and key[-1] == (count,) and step.recording for key, step in self._several.items())

    def _replayed(self, batch: Batch, ids: Tensor, work: Callable[[Step], Tensor]) -> Tensor:
        step = self._step(batch, ids)
        step.ids.copy_(ids, non_blocking=True)
        if not batch.single:
            step.positions.copy_(batch.positions, non_blocking=True)
            batch.positions = step.positions
        return self._repeated(step, batch, lambda: work(step))

    def _repeated(self, step: Step, batch: Batch | Beside, work: Callable[[], Tensor]) -> Tensor:
        """Replay a step, or run it if it is not recorded yet."""
        if step.recording is None:
            return self._run(step, batch, work)
        self.settling = False
        step.recording.replay()
        assert step.result is not None
        return _copy(step.result)

    def _step(self, batch: Batch, given: Tensor) -> Step:
        # steps of prompts find states through the index too
        places = batch.places if batch.extra is None else ()
        key = batch.index, places, batch.silent, () if batch.single else tuple(batch.counts)
        steps, most = self._steps, KEPT
        if not batch.single and batch.extra is None:
            steps, most = self._several, SEVERAL if self.runner.device.type == "cpu" else KEPT
        return self._known(steps, key, most, len(given), given)

    def _known(self, steps: dict[KeyT, Step], key: KeyT, most: int, tokens: int, like: Tensor) -> Step:
        """What is known of a step, now the one that was used last; others are forgotten where they are too many."""
        step = steps.pop(key, None)
        if step is None:
            ids = like.new_zeros(tokens, *like.shape[1:], device=self.runner.device)
            step = Step(ids, torch.zeros(tokens, dtype=torch.int32, device=self.runner.device))
            if len(steps) == most:
                del steps[next(iter(steps))]
        steps[key] = step
        return step

    def _run(self, step: Step, batch: Batch | Beside, work: Callable[[], Tensor]) -> Tensor:
        """Run a step, and record it if it is time to."""
        refused = self.refused if batch.single else self.refused or self.unread
        self.settling = refused is None
        if refused is not None or not (step.compiled or self._ran_alike(batch)):
            step.compiled = True
            return work()
        try:
            recording, result = self._capture(work)
        except torch.OutOfMemoryError:
            # a recording has memory of its own, which a piece of a prompt can do without
            if batch.single:
                raise
            self._refuse(NO_MEMORY, batch.single)
            return work()
        if recording.spoiled is not None:
            if step.compiled:
                self._refuse(recording.spoiled, batch.single)
            step.compiled = True
            return result
        step.recording, step.result, step.batch = recording, result, batch
        return result.clone()

    def _ran_alike(self, batch: Batch | Beside) -> bool:
        """Whether such a step has run before: what is compiled or made once does not belong in a recording.

        Kernels of a GPU are chosen by how far an index reaches, so there it says nothing.
        """
        alike, known = tuple(batch.counts), self.runner.device.type == "cpu"
        if alike in self._run_before:
            return known
        self._run_before.add(alike)
        return False

    def _refuse(self, why: str, single: bool) -> None:
        if single:
            self.refused = why
        else:
            self.unread = why
        log.warning("%s are not replayed: %s", "steps of decoding" if single else "steps of several tokens", why)


def _copy(result: Tensor) -> Tensor:
    """Copy a result, on a CPU without torch's threads: these stay awake for a while, on cores that the next kernels need."""
    if not result.is_cpu or not result.is_contiguous():
        return result.clone()
    found = torch.empty_like(result)
    ctypes.memmove(found.data_ptr(), result.data_ptr(), result.nbytes)
    return found


def _record(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Run a step on the CPU and record it."""
    from auraflux.ops.simd.record import record

    with record() as recording:
        scores = work()
    return recording, scores


@dataclass(frozen=True)
class CudaGraph:
    """A step as one launch."""

    graph: torch.cuda.CUDAGraph
    spoiled: str | None = None

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: a capture fails when the graphs of an engine that is gone give back what they hold."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # of a step that says at once why it cannot be captured
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            # of calls before the capture, until the watchdog has seen their end
            warnings.filterwarnings("ignore", "Waiting for pending NCCL work")
            yield
    finally:
        if collects:
            gc.enable()


class CudaCapture:
    """Captures steps. Their graphs share memory: no result of one is needed any more when another runs.

    What ranks give each other through NCCL is captured with the rest, and NCCL wants a call captured by all ranks or by none:
    so a graph is replayed only when all have agreed that they have one.
    """

    def __init__(self, agreed: Callable[[str | None], str | None]) -> None:
        self._pool, self._agreed = torch.cuda.graph_pool_handle(), agreed

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        graph, spoiled = torch.cuda.CUDAGraph(), None
        try:
            # other threads may copy to the device meanwhile, and NCCL's watchdog asks how far earlier calls are
            with _uncollected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                scores = work()
        except torch.OutOfMemoryError:
            self._agreed(NO_MEMORY)
            raise
        except RuntimeError as err:
            spoiled = str(err).partition("\n")[0]
        spoiled = self._agreed(spoiled)
        if spoiled is not None:
            return CudaGraph(graph, spoiled), work()
        # capturing does not run anything
        graph.replay()
        return CudaGraph(graph), scores
