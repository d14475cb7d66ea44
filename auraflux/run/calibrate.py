"""Vectors of a model's keys, found by running random tokens through it once, uncompressed.

Two vectors of every key head are wanted: the mean around which its keys turn with their positions, and a scale for every
channel. Keys are coded without the mean and divided by the scale, queries are multiplied by it, so that the codes' errors are
small where queries are large. The scale that makes the error of scores least is (K2 / Q2)^(1/4), with second moments of keys
and queries; a smaller power is taken, since a few keys of a text, those that all queries rest on, are like no others and lose
by what the others gain. Not all scores matter: what an error of the score of query i and key j does to the layer's result is
p_ij W_o (v_j - o_i), so pairs are weighed by its square.

The layers of the cache record this while the model runs: no family has to know.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch, Cache, CacheSettings
from auraflux.cache.batch import AttentionLayer, Rotation
from auraflux.cache.calibration import LayerVectors, ModelVectors
from auraflux.cache.shapes import Room
from auraflux.ops.turboquant.calibration import BLOCK
from auraflux.run.device import sent
from auraflux.run.runner import Runner

RECIPE = 3  # counts what is changed here, so that vectors made otherwise are made again
TOKENS, FEW = 256, 128  # random ones that are run; the second where reading weights takes long
SEED = 0
# positions before a query, and the first of all, are usually read as they are: there keys may be as they like
NEAR = 32
# two windows of 1024 tokens of Gemma 3 270M have so a KL of 0.0031 at k4v4 and 0.0125 at k3v3, with 1/8 of 0.0033 and 0.0142;
# four of SmolLM2 have at k4v4 0.0025, and 0.0023 with 1/8; with 1/4 both have some windows that are worse by a third
EXPONENT = 3 / 16
ROWS = 64  # queries whose scores are found together: they stay in a cache, and half of all pairs are seen
FLOOR = 1e-4  # of the mean moment, added to each: some models have channels that are always 0


def random_tokens(count: int, vocab: int, left_out: Sequence[int] = ()) -> list[int]:
    """Tokens by chance, the same for every run; those that mark turns or ends are left out."""
    usable = torch.ones(vocab, dtype=torch.bool)
    usable[[token for token in left_out if token < vocab]] = False
    candidates = usable.nonzero().flatten() if usable.any() else torch.arange(vocab)
    return candidates[torch.randint(len(candidates), (count,), generator=torch.Generator().manual_seed(SEED))].tolist()


def find_vectors(
    model: Any,
    shapes: Sequence[Any],
    tokens: list[int],
    dtype: torch.dtype,
    device: torch.device | str,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> ModelVectors:
    """Run tokens through a model and give the vectors of its layers with keys; `tell` hears how many layers of how many.

    model  or those of its layers that are here; then all ranks call this at the same time
    """
    # layers after the last shape keep nothing of their own
    numbers = [number for number in model.span[: len(shapes)] if type(shapes[number]) is AttentionShape]
    found: dict[int, LayerVectors] = {}

    def done(number: int, vectors: LayerVectors) -> None:
        found[number] = vectors
        tell(len(found), len(numbers))

    if any(type(shape) is AttentionShape for shape in shapes):
        recorded = [
            _recorded(shape, model.layers[number - model.span.start].mixer, done) if number in numbers else shape
            for number, shape in enumerate(shapes)
        ]
        count = len(tokens)
        sizes: dict[str, Any] = {"context": count, "chunk": count, "held": model.span}
        cache = Cache(recorded, CacheSettings("none"), **sizes, dtype=dtype, device=device)
        batch = cache.batch([cache.open()])
        batch.extend([count])
        # rounded activations tell as much, in a third of the time, by kernels that are there already
        Runner(model, cache, exact=cache.device.type != "cpu").forward(sent(tokens, cache.device), batch)
    return ModelVectors(found)


@dataclass(frozen=True)
class RecordingShape(AttentionShape):
    """Attention that is recorded.

    mixer  whose `output_gram` says how much of what heads give reaches the model
    done   called with the layer's number and vectors
    """

    mixer: Any = None
    done: Callable[[int, LayerVectors], None] = lambda number, vectors: None

    def build(self, room: Room, bits: Any, number: int) -> Any:
        return RecordingLayer(self, room, number)


def _recorded(shape: AttentionShape, mixer: Any, done: Callable[[int, LayerVectors], None]) -> RecordingShape:
    return RecordingShape(shape.heads, shape.width, shape.value_width, shape.window, mixer, done)


class RecordingLayer(AttentionLayer):
    """Attends to the tokens of one step, which is all there is, and finds the vectors of their keys meanwhile."""

    token_nbytes = 0

    def __init__(self, shape: RecordingShape, room: Room, number: int):
        self.shape, self.number, self.group = shape, number, room.group(shape.window)
        self.found = False

    def view(self, batch: Batch) -> None:
        """No op of the cache reads it."""

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k.float(), v.float()

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        self.rotation = rotation
        return super().rope_append(batch, q, k, v, rotation, norms, eps)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        if self.found:
            return self._again(q, scale, sinks, softcap)
        pairs = Pairs(self.rotation.frequencies.double().cpu(), self.shape.width, self.rotation.interleaved)
        around = pairs.centred(self.k[1:], batch.positions[1:])
        centres = around.made_ready(around.angles(len(q)).to(q.device)).centres(batch.positions).float()
        queries = q.float().unflatten(1, (self.shape.heads, -1))
        # heads are the first of two: those of keys, and of queries for each
        gram = self.shape.mixer.output_gram().to(q.device).unflatten(0, (self.shape.heads, -1))
        out, scales = torch.empty_like(queries), []
        for head in range(self.shape.heads):
            worth = Worth(self.v[:, head], gram[head])
            for rows, scores in self._blocks(queries, head, scale, sinks, softcap):
                out[rows, head] = scores.summed(self.v[:, head])
                worth.add(scores, out[rows, head])
            scales.append(pairs.scales(self.k[:, head] - centres[:, head], queries[:, head], worth.of_keys, worth.of_queries))
        vectors = LayerVectors(torch.stack(scales), around.along, around.across, around.frequencies, around.interleaved)
        self.shape.done(self.number, vectors)
        self.found = True
        if not self.shape.mixer.read_again:
            del self.k, self.v
        return out.flatten(1, 2).to(q.dtype)

    def _again(self, q: Tensor, scale: float, sinks: Tensor | None, softcap: float | None) -> Tensor:
        """Attend from another layer: its queries have no say in the vectors."""
        queries = q.float().unflatten(1, (self.shape.heads, -1))
        out = torch.empty_like(queries)
        for head in range(self.shape.heads):
            for rows, scores in self._blocks(queries, head, scale, sinks, softcap):
                out[rows, head] = scores.summed(self.v[:, head])
        return out.flatten(1, 2).to(q.dtype)

    def _blocks(
        self, queries: Tensor, head: int, scale: float, sinks: Tensor | None, softcap: float | None
    ) -> Iterator[tuple[slice, "Scores"]]:
        """The scores of a key head, some queries at a time: with the keys that none of them sees left out."""
        count, window, keys = len(queries), self.shape.window or len(queries), _turned(self.k[:, head])
        apart = None if sinks is None else sinks.unflatten(0, (self.shape.heads, -1))[head]
        for begin in range(0, count, ROWS):
            rows = slice(begin, min(begin + ROWS, count))
            seen = range(max(0, begin - window + 1), rows.stop)
            yield rows, Scores(queries[rows, head], keys, seen, window, scale, softcap, apart)


class Scores:
    """What some queries make of the keys of their head.

    q        [R, g, D]  the last of them at the last position that is seen
    keys     [D, T]
    seen     positions of keys that any of the queries sees
    window   how many positions a query sees
    sinks    [g] or None
    back     [R, 1, S]  how far keys lie before queries
    weights  [R, g, S]  of the values
    slopes   how weights would follow scores that are not capped: [R, g, S], or None where they do
    """

    def __init__(
        self, q: Tensor, keys: Tensor, seen: range, window: int, scale: float, softcap: float | None, sinks: Tensor | None
    ):
        self.seen = slice(seen.start, seen.stop)
        scores = _products(q, keys[:, self.seen]).mul_(scale)
        self.slopes: Tensor | None = None
        if softcap is not None:
            bent = torch.tanh(scores / softcap)
            scores, self.slopes = softcap * bent, 1 - bent.square()
        positions = torch.arange(seen.start, seen.stop, device=q.device)
        self.back = (positions[-len(q) :, None] - positions).unsqueeze(1)
        scores.masked_fill_((self.back < 0) | (self.back >= window), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None].expand(len(q), -1, 1)], -1)
        self.weights = torch.softmax(scores, -1)[..., : len(seen)]

    def summed(self, v: Tensor) -> Tensor:
        """[T, D] -> [R, g, D]."""
        return _products(self.weights, v[self.seen])


class Worth:
    """How much errors of scores matter: not at all where keys are not read as codes, see `NEAR`.

    v           [T, D]
    gram        [g, D, D]  of the output projection
    of_keys     [T]        summed over the queries that see a key
    of_queries  [T, g]     summed over the keys that a query sees
    """

    def __init__(self, v: Tensor, gram: Tensor):
        self.values, self.gram = _turned(v), gram
        self.lengths = (v @ gram * v).sum(-1)
        self.of_keys = torch.zeros(len(v), dtype=torch.float64, device=v.device)
        self.of_queries = torch.zeros(len(v), len(gram), device=v.device)

    def add(self, scores: Scores, out: Tensor) -> None:
        """Take in the scores of some queries, and what they sum up to: [R, g, D]."""
        seen, reached = scores.seen, torch.einsum("rgd,gde->rge", out, self.gram)
        # in place: memory takes longer to get than to fill
        far = _products(reached, self.values[:, seen]).mul_(-2).add_(self.lengths[:, seen])
        far.add_((reached * out).sum(-1, keepdim=True)).clamp_(min=0)
        worth = (scores.weights if scores.slopes is None else scores.weights * scores.slopes).square().mul_(far)
        worth.mul_(scores.back >= NEAR)
        if seen.start == 0:
            worth[..., 0] = 0
        self.of_keys[seen] += worth.sum((0, 1))
        self.of_queries[seen.stop - len(out) : seen.stop] = worth.sum(2)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """[R, g, M] and [M, N] -> [R, g, N], as one product of matrices."""
    return (x.flatten(0, 1) @ y).unflatten(0, x.shape[:2])


def _turned(x: Tensor) -> Tensor:
    """[T, D] -> [D, T], moved: on ARM torch takes up to five times as long for a product with a matrix that only seems so."""
    return x.T.contiguous()


class Pairs:
    """The channels of a key by how they turn: two of a pair by one angle, those that do not turn each by itself.

    frequencies  [R/2]  float64
    partner      [D]    the other channel of a pair
    sign         [D]    1 for the first of a pair, -1 for the second, 0 for neither
    number       [D]    of its pair, or its own
    """

    def __init__(self, frequencies: Tensor, width: int, interleaved: bool):
        half, channel = len(frequencies), torch.arange(width)
        self.frequencies, self.interleaved, turns = frequencies, interleaved, channel < 2 * half
        first = channel % 2 == 0 if interleaved else channel < half
        step = 1 if interleaved else half
        self.partner = torch.where(turns, torch.where(first, channel + step, channel - step), channel)
        self.sign = torch.where(turns, torch.where(first, 1.0, -1.0), 0.0).double()
        self.number = torch.where(turns, channel // 2 if interleaved else channel % max(half, 1), channel - half)
        # of every channel, 0 where it does not turn
        self.angles = torch.cat([frequencies, frequencies.new_zeros(width - 2 * half)])[self.number]

    def centred(self, k: Tensor, positions: Tensor) -> LayerVectors:
        """The mean of keys [T, Hkv, D] at positions [T], turned back, as blocks of positions have it; scales are 1."""
        keys, turned = k.double().cpu(), positions.double().cpu()[:, None] * self.angles
        back = keys * turned.cos().unsqueeze(1) + self._across(keys) * turned.sin().unsqueeze(1)
        # over a block a mean turns, which makes the mean of the block shorter
        half = self.angles / 2
        shrink = torch.where(self.angles == 0, 1.0, torch.sin(BLOCK * half) / (BLOCK * torch.sin(half)))
        along = back.mean(0) * shrink
        around = along.float(), -self._across(along).float(), self.frequencies.float()
        return LayerVectors(torch.ones_like(around[0]), *around, self.interleaved)

    def _across(self, x: Tensor) -> Tensor:
        return x[..., self.partner] * self.sign

    def scales(self, k: Tensor, q: Tensor, of_keys: Tensor, of_queries: Tensor) -> Tensor:
        """[D] for keys without their mean [T, D], queries [T, g, D] and how much each of them matters: [T] and [T, g]."""
        keys = self._moments(k.square().T.double() @ of_keys)
        queries = self._moments(torch.einsum("tgd,tg->d", q.square().double(), of_queries.double()))
        scales = (keys / queries) ** EXPONENT
        # their common size changes nothing
        return (scales / scales.log().mean().exp()).float().cpu()

    def _moments(self, sums: Tensor) -> Tensor:
        """Means over pairs, none of them 0."""
        sums = sums.cpu()
        count = torch.zeros(int(self.number.max()) + 1, dtype=torch.float64)
        means = count.index_add(0, self.number, sums) / count.index_add(0, self.number, torch.ones_like(sums))
        each = means[self.number]
        floor = FLOOR * each.mean()
        return each + floor if floor > 0 else torch.ones_like(each)
