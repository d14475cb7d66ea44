"""Capture and replay of engine steps, so that recurring steps skip their Python.

On a GPU a recording is a CUDA graph, on a CPU a list of kernel launches (`simd/replay/record.py`). It reads everything that
changes between steps through a `StepIndex`, so one recording serves all batches of the same size until a sequence outgrows the
index. Decode steps are captured, and on a GPU prefill steps too: the Python of a mixture's many kernels would keep the GPU
waiting.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from auraflux.adapters.linears import AdapterStep, active, adapters
from auraflux.adapters.loaded import LoadedAdapters
from auraflux.cache import Batch, Logits, MixedBatch
from auraflux.cache.step_index import EmbeddingBuffers, Embeddings, StepIndex
from auraflux.engine.capture import NO_MEMORY, CudaCapture, Replay, record_launches
from auraflux.engine.device import device_memory, to_device
from auraflux.engine.model_runner import ModelRunner

log = logging.getLogger("auraflux")

MAX_STEPS = 128  # recordings; the least recently used is evicted
MAX_CPU_VERIFY_STEPS = 8  # recordings of verify steps on a CPU, which hold the activations of all layers
SWITCHED_OFF = "graphs are switched off"
DIVIDED = "attention divides tokens into chunks on the host"
ADAPTED_EXPERTS = "an adapter of the step changes experts"
TOO_LONG = "the step streams its experts from host memory"
EMBEDDED_TOKENS = 2048  # for which there is room in buffers of image embeddings from the start


@dataclass(eq=False)
class Step:
    """Steps that share a step index, the slots of their recurrent states and the number of tokens.

    ids        [T]  tokens, or [T, H] hidden states of the previous pipeline stage
    positions  [T]  of a prefill chunk, with images [T, R/2]; those of decode steps are in the index
    embeddings      of a prefill chunk with images
    compiled        the step has run once, so its kernels are compiled
    result          output buffer of the recording
    batch           of the recording, which refers to its tensors
    adapters        the adapter of each row, see `AdapterStep`
    adapted         the adapters of the sequences and their new tokens, from which those of the rows follow
    """

    ids: Tensor
    positions: Tensor
    embeddings: EmbeddingBuffers | None = None
    compiled: bool = False
    recording: Replay | None = None
    result: Tensor | None = None
    batch: Batch | MixedBatch | None = None
    adapters: dict[int, Tensor] = field(default_factory=dict)
    adapted: tuple[list[int], list[int]] | None = None


# whether there are images, shape of a token's position
ImageKey = tuple[bool, torch.Size]
# index, slots of states, tokens that need logits, whether there are adapters, images, new tokens per sequence (empty if one)
Key = tuple[StepIndex, tuple[int, ...], Logits, bool, ImageKey, tuple[int, ...]]
# index and state slots of the decode part, index of the prefill part, its images, its tokens
MixedKey = tuple[StepIndex, tuple[int, ...], StepIndex, ImageKey, int]
KeyT = TypeVar("KeyT")


class GraphRunner:
    """Runs decode, verify, prefill and mixed steps, by replay where possible.

    enabled          whether steps are captured at all
    refused          reason why no step is replayed; None if decode steps are
    prefill_refused  reason why steps of several tokens are not; None if they are
    warming_up       whether the last step was slower than its successors will be: it compiled kernels or captured a graph
    max_tokens       tokens of the longest step that is captured; None for any length. Longer ones stream their experts
    adapters         of the model; None for none
    before_step      called with a step's number of tokens, and of the parts that each layer runs, before it runs or is replayed
    after_step       called after every step, which it may fail; the next step waits for it
    """

    def __init__(self, runner: ModelRunner, graphs: bool):
        self.runner, self.enabled = runner, graphs
        self.refused: str | None = runner.graph_refusal if graphs else SWITCHED_OFF
        self.prefill_refused: str | None = None
        self.warming_up = False
        self.max_tokens: int | None = None
        self.adapters: LoadedAdapters | None = None
        self.before_step: Callable[[int, int], None] | None = None
        self.after_step: Callable[[], None] | None = None
        self._steps: dict[Key, Step] = {}
        self._verify_steps: dict[Key, Step] = {}
        self._mixed: dict[MixedKey, Step] = {}
        # shared by all steps, of which one runs at a time
        self._embeddings: EmbeddingBuffers | None = None
        # token counts of steps that have run, with any index
        self._run_before: set[tuple[int, ...]] = set()
        self._capture = self._new_capture()
        runner.reset_graphs = self.reset

    def _new_capture(self) -> Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]:
        return CudaCapture(self.runner.agree_on_capture) if self.runner.device.type == "cuda" else record_launches

    @property
    def supports_prefill(self) -> bool:
        """Return whether prompts go through `prefill`; also with graphs switched off, so that the results stay the same."""
        return self.on_one_gpu and self.prefill_refused is None and self.refused in (None, SWITCHED_OFF)

    def captures(self, tokens: int) -> bool:
        """Return whether steps of so many tokens may be captured."""
        return self.max_tokens is None or tokens <= self.max_tokens

    def decode(self, batch: Batch, ids: list[int] | Tensor) -> Tensor:
        """Run one token of each sequence and return the next-token logits [B, V]; `ids` may be on the device."""
        return self._or_roll_back(batch, lambda: self._decode(batch, ids))

    def verify(self, batch: Batch, ids: list[list[int]]) -> Tensor:
        """Run several tokens of each sequence and return the logits after each, [T, V]; graphs are per longest draft."""
        return self._or_roll_back(batch, lambda: self._verify(batch, ids))

    def _or_roll_back(self, batch: Batch, work: Callable[[], Tensor]) -> Tensor:
        """Run a step; an error or interrupt leaves the sequences at their former length or shorter."""
        before = [sequence.length for sequence in batch.sequences]
        try:
            with device_memory():
                found = work()
                self.check_step()
                return found
        except BaseException:
            batch.roll_back(before)
            raise

    def check_step(self) -> None:
        """Raise if the step that has just been launched fails."""
        if self.after_step is not None:
            self.after_step()

    @property
    def on_one_gpu(self) -> bool:
        """Return whether this process runs whole steps on a GPU."""
        return self.runner.device.type == "cuda" and self.runner.single_rank

    @property
    def runs_ahead(self) -> bool:
        """Return whether a step may start before its tokens reach the host: a GPU computes while Python does other work."""
        # ranks synchronize within every step
        return self.on_one_gpu and self.after_step is None

    def _decode(self, batch: Batch, ids: list[int] | Tensor) -> Tensor:
        batch.extend([1] * len(batch.sequences))
        tokens = torch.as_tensor(ids)
        if batch.padding_sequences:
            tokens = torch.nn.functional.pad(tokens, (0, batch.padding_sequences))
        with self.runner.announce_step(tokens, batch):
            found = self.replay(batch, tokens)
            return self.runner.finish_step(found, batch)[: len(batch.sequences)]

    def replay(self, batch: Batch, inputs: Tensor) -> Tensor:
        """Return the output of the captured part of a step whose batch has been extended."""
        return self._run_step(batch, inputs, lambda step: self.runner.run_captured(step.ids, batch))

    def reset(self) -> None:
        """Drop all recordings and refusals: after a restart other ranks may take part."""
        self._steps.clear()
        self._verify_steps.clear()
        self._mixed.clear()
        self._run_before.clear()
        # torch refuses a memory pool without graphs while a result in it lives
        self._capture = self._new_capture()
        self.refused, self.prefill_refused = self.runner.graph_refusal if self.enabled else SWITCHED_OFF, None

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run steps inside the block without capturing them."""
        self.reset()
        self.refused = SWITCHED_OFF
        try:
            yield
        finally:
            self.reset()

    def _verify(self, batch: Batch, ids: list[list[int]]) -> Tensor:
        longest = max(map(len, ids))
        # shorter drafts are padded with their last token, so that graphs are reused
        padded = torch.tensor([each + each[-1:] * (longest - len(each)) for each in ids])
        batch.extend([longest] * len(ids))
        tokens = padded.flatten()
        with self.runner.announce_step(tokens, batch):
            found = self.replay(batch, tokens)
            if sum(map(len, ids)) < len(found):
                rows = [line * longest + at for line, each in enumerate(ids) for at in range(len(each))]
                found = found[to_device(rows, found.device)]
                for sequence, each in zip(batch.sequences, ids, strict=True):
                    sequence.truncate(sequence.length - longest + len(each))
            return self.runner.finish_step(found, batch)

    def prefill(self, batch: Batch, ids: Tensor) -> Tensor:
        """Run a prefill chunk whose batch has been extended and return the final hidden states [T, H]."""
        return self._run_step(batch, ids, lambda step: self.runner.forward(step.ids, batch))

    def run_uncaptured(self, batch: Batch, ids: Tensor) -> Tensor:
        """Run a step that is never captured and return the final hidden states of the tokens that need logits."""
        self._prepare(len(ids))
        with self._adapters(batch):
            return self.runner.forward(ids, batch)

    def prefill_by_layers(self, parts: Sequence[tuple[Tensor, Batch]]) -> None:
        """Run a step of several extended batches, all through a layer before the next one; it is never captured."""
        self._prepare(sum(len(ids) for ids, _ in parts), len(parts))
        self.runner.prefill_by_layers(parts)

    def _prepare(self, tokens: int, parts: int = 1) -> None:
        if self.before_step is not None:
            self.before_step(tokens, parts)

    def decode_mixed(self, batch: MixedBatch, ids: list[int] | Tensor, chunk: Tensor) -> Tensor:
        """Run a mixed batch that has been extended and return the logits of its decode part, [B, V]."""
        decode, prefill = batch.decode, batch.prefill
        key = decode.index, decode.slots, prefill.index, _image_key(prefill), len(chunk)
        step = self._find_step(self._mixed, key, MAX_STEPS, decode.tokens + len(chunk), chunk, prefill)
        decode_ids, prefill_ids = batch.split(step.ids)
        decode_ids[: len(ids)].copy_(torch.as_tensor(ids), non_blocking=True)
        prefill_ids.copy_(chunk, non_blocking=True)
        self._write_inputs(step, prefill)
        found = self._replay_or_run(step, batch, lambda: self.runner.run_captured(step.ids, batch))
        return found[: len(decode.sequences)]

    def has_graph(self, batch: Batch, count: int) -> bool:
        """Return whether a verify step of `count` tokens takes no time to capture: it is recorded, or will not be."""
        if self.runner.device.type != "cpu" or len(batch.sequences) > 1 or self.refused or self.prefill_refused:
            return True
        index = batch.index_for(count)
        return any(key[0] is index and key[-1] == (count,) and step.recording for key, step in self._verify_steps.items())

    def _run_step(self, batch: Batch, ids: Tensor, work: Callable[[Step], Tensor]) -> Tensor:
        step = self._step(batch, ids)
        step.ids.copy_(ids, non_blocking=True)
        if not batch.single:
            self._write_inputs(step, batch)
        with self._adapters(batch, step):
            return self._replay_or_run(step, batch, lambda: work(step))

    def _write_inputs(self, step: Step, batch: Batch) -> None:
        """Copy the positions and embeddings of a batch to those of a step, which the batch then refers to."""
        positions = step.positions[: len(batch.positions)]
        positions.copy_(batch.positions, non_blocking=True)
        batch.positions = positions
        if step.embeddings is not None:
            assert isinstance(batch.embeddings, Embeddings)
            step.embeddings.write(batch.embeddings)
            batch.embeddings = step.embeddings

    @contextmanager
    def _adapters(self, batch: Batch, step: Step | None = None) -> Iterator[None]:
        """Run a step inside the block with the adapters of its sequences; a recording reads them from the step's tensors."""
        each = batch.adapters
        if each is None or self.adapters is None:
            yield
            return
        slots = {} if step is None else step.adapters
        counts = [*batch.counts, *[1] * batch.padding_sequences]
        if step is None or step.adapted != (each, counts):
            for rows in _adapters_of_rows(each, counts, batch.logits):
                if len(rows) in slots:
                    slots[len(rows)].copy_(rows, non_blocking=True)
                else:
                    slots[len(rows)] = rows.to(self.runner.device)
            if step is not None:
                step.adapted = list(each), counts
        with adapters(AdapterStep(self.adapters.layers, slots)):
            yield

    def _replay_or_run(self, step: Step, batch: Batch | MixedBatch, work: Callable[[], Tensor]) -> Tensor:
        """Replay a step, or run it if it is not captured yet."""
        self._prepare(len(step.ids))
        if step.recording is None:
            return self._run(step, batch, work)
        self.warming_up = False
        step.recording.replay()
        assert step.result is not None
        return _copy(step.result)

    def _step(self, batch: Batch, inputs: Tensor) -> Step:
        # prefill steps find states through the index too
        slots = batch.slots if batch.padding is None else ()
        adapted, counts = batch.adapters is not None, () if batch.single else tuple(batch.counts)
        key = batch.index, slots, batch.logits, adapted, _image_key(batch), counts
        steps, limit = self._steps, MAX_STEPS
        if not batch.single and batch.padding is None:
            steps, limit = self._verify_steps, MAX_CPU_VERIFY_STEPS if self.runner.device.type == "cpu" else MAX_STEPS
        return self._find_step(steps, key, limit, len(inputs), inputs, batch)

    def _find_step(self, steps: dict[KeyT, Step], key: KeyT, limit: int, tokens: int, like: Tensor, prefill: Batch) -> Step:
        """Return the step of a key, made if necessary, as the most recently used; evict the least recently used."""
        step = steps.pop(key, None)
        if step is None:
            ids = like.new_zeros(tokens, *like.shape[1:], device=self.runner.device)
            positions = torch.zeros(tokens, *prefill.positions.shape[1:], dtype=torch.int32, device=self.runner.device)
            step = Step(ids, positions, self._embedding_buffers(prefill))
            if len(steps) == limit:
                del steps[next(iter(steps))]
        steps[key] = step
        return step

    def _embedding_buffers(self, batch: Batch) -> EmbeddingBuffers | None:
        """Return buffers for the embeddings of a batch's images; None for a batch without."""
        if not isinstance(batch.embeddings, Embeddings):
            return None
        tokens = len(batch.positions)
        if self._embeddings is None or tokens > len(self._embeddings.values):
            room = max(tokens, min(self.runner.cache.chunk, EMBEDDED_TOKENS))
            self._embeddings = EmbeddingBuffers.empty(room, batch.embeddings, self.runner.device)
        return self._embeddings.first(tokens)

    def _run(self, step: Step, batch: Batch | MixedBatch, work: Callable[[], Tensor]) -> Tensor:
        """Run a step, and capture it from its second run on."""
        refused = self.refused if batch.single else self.refused or self.prefill_refused
        if not self.captures(len(step.ids)):
            refused = TOO_LONG
        if not batch.single and self.runner.cache.divides(batch.length_bucket):
            refused = DIVIDED
        if self.adapters is not None and not self.adapters.captures and active.get() is not None:
            refused = ADAPTED_EXPERTS
        self.warming_up = refused is None
        if refused is not None or not (step.compiled or self._ran_before(batch)):
            step.compiled = True
            return work()
        try:
            recording, result = self._capture(work)
        except torch.OutOfMemoryError:
            # a graph needs separate memory; a prefill chunk can run without
            if batch.single:
                raise
            self._refuse(NO_MEMORY, batch.single)
            return work()
        if recording.rejected is not None:
            if step.compiled:
                self._refuse(recording.rejected, batch.single)
            step.compiled = True
            return result
        step.recording, step.result, step.batch = recording, result, batch
        return result.clone()

    def _ran_before(self, batch: Batch | MixedBatch) -> bool:
        """Return whether a step of these token counts has run, so that its kernels are compiled.

        False on a GPU, whose kernels also depend on the length bucket of the index.
        """
        counts, on_cpu = tuple(batch.counts), self.runner.device.type == "cpu"
        if counts in self._run_before:
            return on_cpu
        self._run_before.add(counts)
        return False

    def _refuse(self, why: str, single: bool) -> None:
        if single:
            self.refused = why
        else:
            self.prefill_refused = why
        log.warning("%s steps run without graphs: %s", "decode" if single else "prefill and verify", why)


def _adapters_of_rows(each: Sequence[int], counts: Sequence[int], logits: Logits) -> Iterator[Tensor]:
    """Yield the adapter of every token, and of those for which the last layer may run alone."""
    of_sequences = torch.tensor(each, dtype=torch.int32)
    of_tokens = torch.repeat_interleave(of_sequences, torch.tensor(counts))
    if logits is not Logits.ALL and len(of_tokens) != len(of_sequences):
        yield of_sequences
    yield of_tokens


def _image_key(batch: Batch) -> ImageKey:
    return batch.embeddings is not None, batch.positions.shape[1:]


def _copy(result: Tensor) -> Tensor:
    """Copy a result, on a CPU without torch's threads, which would spin for a while on cores that the next kernels need."""
    if not result.is_cpu or not result.is_contiguous():
        return result.clone()
    found = torch.empty_like(result)
    ctypes.memmove(found.data_ptr(), result.data_ptr(), result.nbytes)
    return found
