"""Key calibration: the per-channel mean and scale of a model's keys, measured on one uncompressed run of random tokens.

The mean of a key head is taken before RoPE and rotated with the position. Keys are quantized after the mean is subtracted and
the scale divided out; queries are multiplied by the scale, so that quantization errors are small in channels where queries are
large. The scale (K2 / Q2)^(1/4), with second moments of keys and queries, minimizes the error of the scores; a smaller exponent
is used, since the few keys that all queries attend to (attention sinks) are outliers and would lose precision. An error of the
score of query i and key j changes the layer's output by p_ij W_o (v_j - o_i), so pairs are weighted by its square.

Recording layers in the KV cache measure this during the forward pass: model families need no code for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch, Cache, CacheSettings
from auraflux.cache.batch import AttentionLayer, Rotation
from auraflux.cache.key_calibration import KeyCalibration, ModelCalibration
from auraflux.cache.layer_shapes import LayerContext
from auraflux.engine.compile_ahead import compile_ahead
from auraflux.engine.device import to_device
from auraflux.engine.model_runner import ModelRunner
from auraflux.ops.turboquant.calibration import BLOCK

RECIPE = 3  # version of this algorithm; calibrations of another version are measured again
DEFAULT_TOKENS, FEW_TOKENS = 512, 128  # random tokens to run; the second where weights are slow to read
SEED = 0
# tokens between key and query from which on errors count: the recent window and the first token stay in full precision
MIN_DISTANCE = 32
# KL divergence over two windows of 1024 tokens, Gemma 3 270M: 0.0031 at k4v4 and 0.0125 at k3v3; with 1/8, 0.0033 and 0.0142.
# Four windows of SmolLM2 at k4v4: 0.0025; with 1/8, 0.0023. With 1/4 some windows of both models are worse by a third.
EXPONENT = 3 / 16
QUERY_BLOCK = 64  # queries whose scores are computed together: they fit the CPU cache, and masked keys are skipped
FLOOR = 1e-4  # share of the mean moment that is added to each: some models have channels that are always 0


def random_tokens(count: int, vocab: int, excluded: Sequence[int] = ()) -> list[int]:
    """Return random tokens, the same in every run, without the excluded special tokens."""
    usable = torch.ones(vocab, dtype=torch.bool)
    usable[[token for token in excluded if token < vocab]] = False
    candidates = usable.nonzero().flatten() if usable.any() else torch.arange(vocab)
    return candidates[torch.randint(len(candidates), (count,), generator=torch.Generator().manual_seed(SEED))].tolist()


def calibrate_keys(
    model: Any,
    shapes: Sequence[Any],
    tokens: list[int],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    ahead: bool = False,
) -> ModelCalibration:
    """Run tokens through a model and return the key calibration of its attention layers.

    model     or the local layers of it; then all ranks call this at the same time
    progress  called with the number of calibrated layers and the total
    ahead     compile a GPU's kernels before, by a run that launches none: one process has the whole model on the device
    """
    # layers after the last shape share the KV of earlier layers
    numbers = [number for number in model.span[: len(shapes)] if type(shapes[number]) is AttentionShape]
    found: dict[int, KeyCalibration] = {}

    def done(number: int, layer: KeyCalibration) -> None:
        found[number] = layer
        progress(len(found), len(numbers))

    if any(type(shape) is AttentionShape for shape in shapes):
        recorded = [
            _recorded(shape, model.layers[number - model.span.start].mixer, done) if number in numbers else shape
            for number, shape in enumerate(shapes)
        ]

        def run() -> None:
            _run(model, recorded, tokens, dtype, device)

        if ahead:
            compile_ahead(run, torch.device(device))
        run()
    return ModelCalibration(found)


def _run(model: Any, shapes: list[Any], tokens: list[int], dtype: torch.dtype, device: torch.device | str) -> None:
    """Run tokens through a model once, with an uncompressed cache."""
    count = len(tokens)
    sizes: dict[str, Any] = {"context": count, "chunk": count, "local_layers": model.span}
    cache = Cache(shapes, CacheSettings("none"), **sizes, dtype=dtype, device=device)
    batch = cache.batch([cache.open()])
    batch.extend([count])
    # int8 activations give the same calibration in a third of the time, with kernels that are compiled already
    ModelRunner(model, cache, exact=cache.device.type != "cpu").forward(to_device(tokens, cache.device), batch)


@dataclass(frozen=True)
class RecordingShape(AttentionShape):
    """Attention whose keys are calibrated.

    mixer  whose `output_gram` weighs the outputs of heads by their effect on the layer's output
    done   called with the layer's number and calibration
    """

    mixer: Any = None
    done: Callable[[int, KeyCalibration], None] = lambda number, calibration: None

    def build(self, cache: LayerContext, bits: Any, number: int) -> Any:
        return RecordingLayer(self, cache, number)


def _recorded(shape: AttentionShape, mixer: Any, done: Callable[[int, KeyCalibration], None]) -> RecordingShape:
    return RecordingShape(shape.heads, shape.width, shape.value_width, shape.window, mixer=mixer, done=done)


class RecordingLayer(AttentionLayer):
    """Attends to the tokens of a single step and calibrates their keys."""

    token_nbytes = 0

    def __init__(self, shape: RecordingShape, cache: LayerContext, number: int):
        self.shape, self.number, self.group = shape, number, cache.group(shape.window)
        self.found = False

    def view(self, batch: Batch) -> None:
        """Do nothing: no op of the cache reads this layer."""

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
            return self._attend_shared(q, scale, sinks, softcap)
        pairs = RotaryPairs(self.rotation.frequencies.double().cpu(), self.shape.width, self.rotation.interleaved)
        mean = pairs.mean_of(self.k[1:], batch.positions[1:])
        means = mean.prepare(mean.angles(len(q)).to(q.device)).centres(batch.positions).float()
        queries = q.float().unflatten(1, (self.shape.heads, -1))
        # [H, D, D] -> [Hkv, g, D, D]
        gram = self.shape.mixer.output_gram().to(q.device).unflatten(0, (self.shape.heads, -1))
        out, scales = torch.empty_like(queries), []
        for head in range(self.shape.heads):
            error_weights = ErrorWeights(self.v[:, head], gram[head])
            for rows, block in self._blocks(queries, head, scale, sinks, softcap):
                out[rows, head] = block.weighted_sum(self.v[:, head])
                error_weights.add(block, out[rows, head])
            centred = self.k[:, head] - means[:, head]
            scales.append(pairs.scales(centred, queries[:, head], error_weights.key_weights, error_weights.query_weights))
        calibration = KeyCalibration(torch.stack(scales), mean.along, mean.across, mean.frequencies, mean.interleaved)
        self.shape.done(self.number, calibration)
        self.found = True
        if not self.shape.mixer.shares_kv:
            del self.k, self.v
        return out.flatten(1, 2).to(q.dtype)

    def _attend_shared(self, q: Tensor, scale: float, sinks: Tensor | None, softcap: float | None) -> Tensor:
        """Attend from a layer that shares this KV; its queries do not affect the calibration."""
        queries = q.float().unflatten(1, (self.shape.heads, -1))
        out = torch.empty_like(queries)
        for head in range(self.shape.heads):
            for rows, block in self._blocks(queries, head, scale, sinks, softcap):
                out[rows, head] = block.weighted_sum(self.v[:, head])
        return out.flatten(1, 2).to(q.dtype)

    def _blocks(
        self, queries: Tensor, head: int, scale: float, sinks: Tensor | None, softcap: float | None
    ) -> Iterator[tuple[slice, "AttentionBlock"]]:
        """Yield the attention of a key head by blocks of queries, without the keys that a whole block masks."""
        count, window, keys = len(queries), self.shape.window or len(queries), _transposed(self.k[:, head])
        head_sinks = None if sinks is None else sinks.unflatten(0, (self.shape.heads, -1))[head]
        for begin in range(0, count, QUERY_BLOCK):
            rows = slice(begin, min(begin + QUERY_BLOCK, count))
            seen = range(max(0, begin - window + 1), rows.stop)
            yield rows, AttentionBlock(queries[rows, head], keys, seen, window, scale, softcap, head_sinks)


class AttentionBlock:
    """Attention weights of a block of queries over the keys of their head.

    q          [R, g, D]  the last one at the last position of `seen`
    keys       [D, T]
    seen       positions of keys that at least one of the queries attends to
    window     positions that a query attends to
    sinks      [g] or None
    distances  [R, 1, S]  from key to query, in tokens
    weights    [R, g, S]  softmax of the scores
    slopes     [R, g, S]  derivative of the logit softcap; None without softcap
    """

    def __init__(
        self, q: Tensor, keys: Tensor, seen: range, window: int, scale: float, softcap: float | None, sinks: Tensor | None
    ):
        self.seen = slice(seen.start, seen.stop)
        scores = _products(q, keys[:, self.seen]).mul_(scale)
        self.slopes: Tensor | None = None
        if softcap is not None:
            capped = torch.tanh(scores / softcap)
            scores, self.slopes = softcap * capped, 1 - capped.square()
        positions = torch.arange(seen.start, seen.stop, device=q.device)
        self.distances = (positions[-len(q) :, None] - positions).unsqueeze(1)
        scores.masked_fill_((self.distances < 0) | (self.distances >= window), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None].expand(len(q), -1, 1)], -1)
        self.weights = torch.softmax(scores, -1)[..., : len(seen)]

    def weighted_sum(self, v: Tensor) -> Tensor:
        """Return the attention output: [T, D] -> [R, g, D]."""
        return _products(self.weights, v[self.seen])


class ErrorWeights:
    """Squared effect of score errors on the layer's output; 0 where keys stay in full precision, see `MIN_DISTANCE`.

    v              [T, D]
    gram           [g, D, D]  of the output projection
    key_weights    [T]        summed over the queries that attend to a key
    query_weights  [T, g]     summed over the keys that a query attends to
    """

    def __init__(self, v: Tensor, gram: Tensor):
        self.values, self.gram = _transposed(v), gram
        self.lengths = (v @ gram * v).sum(-1)
        self.key_weights = torch.zeros(len(v), dtype=torch.float64, device=v.device)
        self.query_weights = torch.zeros(len(v), len(gram), device=v.device)

    def add(self, block: AttentionBlock, out: Tensor) -> None:
        """Add a block of queries, with its attention output [R, g, D]."""
        seen, projected = block.seen, torch.einsum("rgd,gde->rge", out, self.gram)
        # |W_o (v_j - o_i)|^2, in place: allocating takes longer than filling
        effect = _products(projected, self.values[:, seen]).mul_(-2).add_(self.lengths[:, seen])
        effect.add_((projected * out).sum(-1, keepdim=True)).clamp_(min=0)
        error_weights = (block.weights if block.slopes is None else block.weights * block.slopes).square().mul_(effect)
        error_weights.mul_(block.distances >= MIN_DISTANCE)
        if seen.start == 0:
            error_weights[..., 0] = 0
        self.key_weights[seen] += error_weights.sum((0, 1))
        self.query_weights[seen.stop - len(out) : seen.stop] = error_weights.sum(2)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Return [R, g, M] @ [M, N] -> [R, g, N] as one matrix product."""
    return (x.flatten(0, 1) @ y).unflatten(0, x.shape[:2])


def _transposed(x: Tensor) -> Tensor:
    """Return a contiguous transpose [T, D] -> [D, T]: on ARM torch multiplies by a strided one up to five times slower."""
    return x.T.contiguous()


class RotaryPairs:
    """The channel pairs that RoPE rotates; channels without RoPE are pairs of one.

    frequencies  [R/2]  float64
    partner      [D]    the other channel of the pair
    sign         [D]    1 for the first of a pair, -1 for the second, 0 without RoPE
    number       [D]    of the pair
    """

    def __init__(self, frequencies: Tensor, width: int, interleaved: bool):
        half, channel = len(frequencies), torch.arange(width)
        self.frequencies, self.interleaved, rotary = frequencies, interleaved, channel < 2 * half
        first = channel % 2 == 0 if interleaved else channel < half
        step = 1 if interleaved else half
        self.partner = torch.where(rotary, torch.where(first, channel + step, channel - step), channel)
        self.sign = torch.where(rotary, torch.where(first, 1.0, -1.0), 0.0).double()
        self.number = torch.where(rotary, channel // 2 if interleaved else channel % max(half, 1), channel - half)
        # per token, by channel; 0 without RoPE
        self.angles = torch.cat([frequencies, frequencies.new_zeros(width - 2 * half)])[self.number]

    def mean_of(self, k: Tensor, positions: Tensor) -> KeyCalibration:
        """Return a calibration with the mean of keys [T, Hkv, D] at positions [T] before RoPE, and scales of 1."""
        keys, angles = k.double().cpu(), positions.double().cpu()[:, None] * self.angles
        unrotated = keys * angles.cos().unsqueeze(1) + self._partners(keys) * angles.sin().unsqueeze(1)
        # one mean serves a block of positions; averaging its rotation over the block shortens it
        half = self.angles / 2
        shrink = torch.where(self.angles == 0, 1.0, torch.sin(BLOCK * half) / (BLOCK * torch.sin(half)))
        along = unrotated.mean(0) * shrink
        mean = along.float(), -self._partners(along).float(), self.frequencies.float()
        return KeyCalibration(torch.ones_like(mean[0]), *mean, self.interleaved)

    def _partners(self, x: Tensor) -> Tensor:
        return x[..., self.partner] * self.sign

    def scales(self, k: Tensor, q: Tensor, key_weights: Tensor, query_weights: Tensor) -> Tensor:
        """Return the scales [D] for keys without their mean [T, D], queries [T, g, D], and their weights [T] and [T, g]."""
        keys = self._moments(k.square().T.double() @ key_weights)
        queries = self._moments(torch.einsum("tgd,tg->d", q.square().double(), query_weights.double()))
        scales = (keys / queries) ** EXPONENT
        # a common factor has no effect
        return (scales / scales.log().mean().exp()).float().cpu()

    def _moments(self, sums: Tensor) -> Tensor:
        """Return the means over pairs, floored above 0."""
        sums = sums.cpu()
        count = torch.zeros(int(self.number.max()) + 1, dtype=torch.float64)
        means = count.index_add(0, self.number, sums) / count.index_add(0, self.number, torch.ones_like(sums))
        each = means[self.number]
        floor = FLOOR * each.mean()
        return each + floor if floor > 0 else torch.ones_like(each)
