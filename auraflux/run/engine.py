"""A model with its cache: tokens go in, scores of the next token come out."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Beside, Cache, CacheSettings, Sequence
from auraflux.cache.calibration import ModelVectors
from auraflux.cache.deal import ALONE
from auraflux.errors import CacheFull
from auraflux.quant import QTensor
from auraflux.run.device import device_memory, sent
from auraflux.run.graph import Replayer
from auraflux.run.runner import HiddenRunner, Model, Ranks, Runner

# tokens of steps in which prompts are read on a GPU: few sizes, so that they recur, and wide apart below 256, where a step
# takes as long as reading the weights does
SIZES = (32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
# sequences of steps of writing there; weights are read once whatever the number
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
REACHES = (1024, 4096, 16384)  # of their indexes, as few for the same reason; then every power of two
# tokens of a step of writing that takes a piece of a prompt along: few, as each is recorded for every number of texts, and
# whole tiles of the products
BESIDE = (128, 256, 512, 1024)
LEAST_BESIDE = 32  # of them that are the prompt's


class Engine:
    """Runs the tokens of sequences through a model, long prompts in pieces.

    context    most tokens of a sequence
    sequences  that can be open at once
    tokens     of all of them together; by default as many as they have when each fills its context
    kept       parked sequences more for which windows have room
    chunk      tokens that go through the model together, over all sequences
    vectors    of the model's keys; None to code keys as they are
    exact      multiply float32 activations, see `Runner`
    invariant  have a GPU give a token the same bits in any company, see `Runner`
    graphs     replay steps of decoding, on a GPU also of prompts, instead of running their Python every time
    ranks      that have the rest of the model; None where all of it is here
    hidden     keep what the model makes of tokens, of prompts too, for whoever guesses from it
    """

    def __init__(
        self,
        model: Model,
        shapes: list[Any],
        settings: CacheSettings,
        *,
        context: int,
        sequences: int = 1,
        tokens: int | None = None,
        kept: int = 0,
        chunk: int = 512,
        vectors: ModelVectors | None = None,
        exact: bool = False,
        invariant: bool = False,
        graphs: bool = True,
        ranks: Ranks | None = None,
        hidden: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.model, self.chunk, self.ranks = model, chunk, ranks
        here, deal = (None, ALONE) if ranks is None else (ranks.here, ranks.deal)
        with device_memory():
            sizes: dict[str, Any] = {"sequences": sequences, "tokens": tokens, "kept": kept, "chunk": chunk}
            known: dict[str, Any] = {"vectors": vectors, "held": here, "deal": deal, "dtype": dtype, "device": device}
            self.cache = Cache(shapes, settings, context=context, **sizes, **known)
        self.device, self.graphs = torch.device(device), graphs
        self.keeps_hidden = hidden
        alone = HiddenRunner if hidden else Runner
        self.runner = (alone if ranks is None else ranks.runner)(model, self.cache, exact)
        self.runner.invariant = invariant
        self.replayer = Replayer(self.runner, graphs)

    @property
    def alike(self) -> bool:
        """Whether kernels are chosen so that results do not depend on company: a CPU has no others."""
        return self.runner.invariant and self.device.type == "cuda"

    def try_token(self) -> None:
        """Run a token and forget it, so that what no kernel serves is refused now."""
        sequence = self.cache.open()
        try:
            self.score(self.step(self.cache.batch([sequence]), [[0]]))
        finally:
            sequence.close()

    def check(self) -> None:
        """Raise if a rank that has some of the model is gone."""
        if self.ranks is not None:
            self.ranks.check()

    def restart(self, unless: Callable[[], bool]) -> None:
        """Bring ranks back, unless something is so meanwhile. All sequences must be closed: what ranks held of them is gone."""
        assert self.ranks is not None
        self.cache.forget_steps()
        self.replayer.forget()
        self.ranks.restart(unless)

    def step(self, batch: Batch, ids: list[list[int]]) -> Tensor:
        """Give each sequence of a batch its next tokens: the final hidden states [T, H].

        Whatever stops it on the way, an interrupt too, the sequences are then as they were, or shorter.
        """
        before = [sequence.length for sequence in batch.sequences]
        try:
            with device_memory():
                replays = self._make_room(batch, [len(each) for each in ids])
                tokens = [token for each in ids for token in each]
                flat = sent(tokens + tokens[-1:] * (batch.extra or 0), self.device)
                hidden = self.replayer.read(batch, flat) if replays else self.runner.forward(flat, batch)
                batch.drop_extra()
                return hidden[: len(tokens)]
        except BaseException:
            batch.cut_back(before)
            raise

    def _make_room(self, batch: Batch, counts: list[int]) -> bool:
        """Make room for a step's tokens, and for others that fill it up if it can be replayed; tell whether it can."""
        size = self._size_of(batch, counts)
        if size is not None:
            try:
                batch.extend([size], extra=size - counts[0])
            except CacheFull:
                # there may be room for the tokens alone
                pass
            else:
                return True
        batch.extend(counts)
        return False

    def _size_of(self, batch: Batch, counts: list[int]) -> int | None:
        """Of what size a prompt's step is that can be replayed, its tokens or more; None for other steps."""
        # more than the largest size takes a GPU longer than its Python
        if batch.ends or len(counts) > 1 or not 1 < counts[0] <= min(self.chunk, SIZES[-1]) or not self.replayer.reads:
            return None
        size = self._size(counts[0])
        return size if batch.sequences[0].length + size <= batch.context else None

    def _size(self, tokens: int) -> int:
        return next((size for size in SIZES if tokens <= size < self.chunk), min(self.chunk, SIZES[-1]))

    def score(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32."""
        return self.runner.score(hidden)

    def decode(self, batch: Batch, ids: list[int] | Tensor) -> Tensor:
        """One token of each sequence: the scores of the next, [B, V]."""
        return self.replayer.decode(batch, ids)

    def sizes_beside(self, texts: int) -> list[int]:
        """How many tokens of a prompt can be read with a step of writing of so many texts; none where that is not served."""
        # the index of one text that is written would be that of the prompt, too
        if not self.model.beside or not self.replayer.reads or self.keeps_hidden or texts < 2:
            return []
        width = steps_of(texts) if self.cache.fills else texts
        return [total - width for total in BESIDE if total <= self.chunk and total - width >= LEAST_BESIDE]

    def fit_beside(self, texts: int, tokens: int, more: bool) -> int:
        """How many of a prompt's next tokens to read with a step of writing of so many texts; 0 where they fit into none.

        more  whether others of the prompt follow: then a step is filled, so that none is nearly empty
        """
        sizes = self.sizes_beside(texts)
        if more:
            tokens = max((size for size in sizes if size <= tokens), default=tokens)
        return tokens if any(size >= tokens for size in sizes) else 0

    def decode_beside(self, batch: Batch, ids: list[int] | Tensor, sequence: Sequence, piece: list[int]) -> Tensor | None:
        """One token of each sequence, and a piece of another's prompt: the scores of what follows the first, [B, V].

        None, and nothing is changed, where there is no room for the piece, or no size that it fits into.
        """
        size = next((size for size in self.sizes_beside(len(batch.sequences)) if size >= len(piece)), None)
        if size is None or sequence.length + size > self.cache.context:
            return None
        longest = max(each.length for each in batch.sequences) + 1
        writing = self.cache.batch(batch.sequences, _reach(longest, REACHES[1:]), fillers=batch.fillers)
        reading = self.cache.batch([sequence], _reach(sequence.length + size, REACHES[1:]), silent=True)
        both = Beside(writing, reading)
        before = both.lengths
        try:
            both.extend(size, extra=size - len(piece))
        except CacheFull:
            return None
        try:
            with device_memory():
                flat = sent(piece + piece[-1:] * (size - len(piece)), self.device)
                scores = self.replayer.decode_beside(both, ids, flat)
                reading.drop_extra()
                return scores
        except BaseException:
            both.cut_back(before)
            raise

    def counts_beside(self, parallel: int) -> list[int]:
        """Numbers of texts that are written together, beside one that is read, of which each has recordings of its own."""
        # one of them is read
        texts = {min(count, parallel - 1) for count in COUNTS if count <= steps_of(parallel - 1)}
        return sorted(count for count in texts if self.sizes_beside(count))

    def rehearse_beside(self, texts: int, times: int = 2) -> None:
        """Take all such steps of so many texts. The first time compiles what they need, the second records them."""
        *written, read = sequences = [self.cache.open() for _ in range(texts + 1)]
        try:
            batch = self.writing(written)
            for size in (size for size in self.sizes_beside(texts) for _ in range(times)):
                self.decode_beside(batch, [0] * texts, read, [0] * size)
        finally:
            for sequence in sequences:
                sequence.close()

    def verify(self, batch: Batch, ids: list[list[int]]) -> Tensor:
        """Several tokens of each sequence: the scores after every one, [T, V]."""
        if self._recurs(batch, list(map(len, ids))):
            return self.replayer.verify(batch, ids)
        # others like it will take as long
        self.replayer.settling = False
        return self.score(self.step(batch, ids))

    def _recurs(self, batch: Batch, counts: list[int]) -> bool:
        """Whether a step that checks guesses is replayed. Sequences get as many tokens as the one with most: a GPU has time."""
        if len(set(counts)) == 1:
            return len(counts) == 1 or self.device.type == "cuda"
        longest = max(sequence.length for sequence in batch.sequences) + max(counts)
        return self.device.type == "cuda" and self.ranks is None and not self.cache.moves and longest <= batch.context

    @property
    def hidden(self) -> Tensor | None:
        """What the last scores were made of, [N, H]; None where it is not kept."""
        return self.runner.hidden

    def read(self, sequences: list[Sequence], pieces: list[list[int]]) -> Tensor:
        """Take in the next tokens of prompts, no more than `chunk` together: the final hidden states, where these are kept."""
        one, silent = len(sequences) == 1, not self.keeps_hidden
        batch = self._batch_for(sequences[0], pieces[0], silent) if one else self.cache.batch(sequences, silent=silent)
        return self.step(batch, pieces)

    def reads_ends(self, count: int) -> bool:
        """Whether `read_ends` serves so many prompts: a GPU has kernels for as many as take steps of writing together."""
        # states cannot go back to before a prompt's last token
        serves = self.replayer.ahead and self.model.again and not self.cache.moves and not self.keeps_hidden
        return serves and steps_of(count) == count

    def read_ends(self, sequences: list[Sequence], pieces: list[list[int]]) -> Tensor:
        """Take in all that is left of prompts, no more than `chunk` tokens together: the scores of what follows, [B, V]."""
        return self.score(self.step(self.cache.batch(sequences, ends=True), pieces))

    def sooner_apart(self, tokens: int) -> bool:
        """Whether prompts with so many tokens are read sooner one by one: steps of one are replayed, those of several not."""
        return self.replayer.reads and tokens <= SIZES[-1]

    def writing(self, sequences: list[Sequence]) -> Batch:
        """Make a batch for steps of one token each. On a GPU it is filled up to one of few sizes, so that steps recur."""
        fillers = 0
        if self.cache.moves:
            rows: list[Any] = [sequence.rows[self.cache.states] for sequence in sequences]
            self.cache.states.arrange(rows)
        elif self.device.type == "cuda" and self.cache.fills:
            fillers = steps_of(len(sequences)) - len(sequences)
        return self.cache.batch(sequences, fillers=fillers)

    def _batch_for(self, sequence: Sequence, ids: list[int], silent: bool = False) -> Batch:
        """Make a batch for a prompt. Where its pieces are replayed, they and those of others of its kind read one index."""
        if not self.replayer.reads:
            return self.cache.batch([sequence], silent=silent)
        rest = len(ids) % self.chunk
        longest = sequence.length + len(ids) - rest + (self._size(rest) if rest else 0)
        return self.cache.batch([sequence], _reach(longest, REACHES), silent=silent)

    def scores(self, sequence: Sequence, ids: list[int]) -> Iterator[Tensor]:
        """The scores after every token of a text, [T, V] in pieces of `chunk`, read through the cache as in generation."""
        batch = self._batch_for(sequence, ids)
        for start in range(0, len(ids), self.chunk):
            yield self.score(self.step(batch, [ids[start : start + self.chunk]]))

    def all_scores(self, sequence: Sequence, ids: list[int]) -> Tensor:
        """All of them together."""
        return torch.cat(list(self.scores(sequence, ids)))


def _reach(longest: int, reaches: tuple[int, ...]) -> int:
    """The length to expect of sequences, so that as few indexes recur as there are of these reaches."""
    return next((reach - 1 for reach in reaches if longest < reach), longest)


def steps_of(count: int) -> int:
    """With how many sequences a GPU takes steps of writing for `count`: few numbers, so that steps recur."""
    return next((size for size in COUNTS if size >= count), count)


def nbytes(model: Any) -> int:
    """Bytes of all tensors a model holds, each counted once."""
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            seen[value.data_ptr()] = value.nbytes
        elif isinstance(value, QTensor):
            seen[value.packed.data_ptr()] = value.nbytes
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each)
        elif type(value).__module__.startswith("auraflux."):
            visit(vars(value))

    visit(model)
    return sum(seen.values())
