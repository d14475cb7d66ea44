"""Grouped-query attention, as most families have it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Beside
from auraflux.models.decoder import Mixer, Stream
from auraflux.models.rotation import Growth, Rotation
from auraflux.ops import linear, rms_norm, sigmoid_gate, split_q_gate
from auraflux.quant import QTensor
from auraflux.weights.loader import Weights, sampled
from auraflux.weights.slices import span
from auraflux.weights.stored import dense

SAMPLED = 4  # rows
GRAM_ROWS = 1024  # of a weight that are in memory in plain numbers at a time


@dataclass(frozen=True)
class Heads:
    """count of queries, kv of keys and values, all `width` wide."""

    count: int
    kv: int
    width: int


class Attention(Mixer):
    """Grouped-query attention over the cache.

    read_again  whether later layers read its keys and values too

    eps    of norms over queries and keys; None where there are none
    across whether a norm is over all heads at once, instead of each by itself
    scale  of the scores; by default 1/sqrt(width)
    sinks  whether each head has one
    gated  whether q_proj holds, beside each head's query, a gate for its output
    growth of queries with their positions
    parts  the projections there are: "qk" where values are made of keys, "q" where both are another layer's
    shift  what is missing in the checkpoint's weights of the norms: 1 where they are those of a (1 + w) norm
    """

    read_again = False
    tells_apart = True

    def __init__(
        self,
        weights: Weights,
        name: str,
        hidden: int,
        heads: Heads,
        rotation: Rotation,
        eps: float | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gated: bool = False,
        shift: float = 0.0,
        across: bool = False,
        growth: Growth | None = None,
        parts: str = "qkv",
    ):
        self.rotation, self.eps, self.softcap, self.gated = rotation, eps or 0.0, softcap, gated
        self.scale, self.growth = heads.width**-0.5 if scale is None else scale, growth
        # a rank has all queries of its heads of keys
        mine, shared = weights.slices.heads(heads.kv), heads.count // heads.kv
        self.heads, self.join = Heads(shared * len(mine), len(mine), heads.width), weights.slices.join
        rows = {"q": shared * (2 if gated else 1) * heads.width, **dict.fromkeys(parts[1:], heads.width)}
        each = [(f"{name}.{kind}_proj", n * heads.kv, span(mine, n)) for kind, n in rows.items()]
        self.qkv = [weights.some_rows(projection, n, hidden, some) for projection, n, some in each]
        self.qkv_bias = [weights.bias(*which) for which in each]
        columns = span(mine, shared * heads.width)
        self.out = weights.some_columns(f"{name}.o_proj", hidden, heads.count * heads.width, columns)
        self.out_bias = weights.bias_once(f"{name}.o_proj", hidden)
        self._sample: list[Tensor] | None = None
        if not weights.slices.whole:
            named = [*(projection for projection, _, _ in each), f"{name}.o_proj"]
            self._sample = [tensor for matrix in named for tensor in weights.sample(matrix, SAMPLED)]
        self.norms: tuple[Tensor, Tensor] | None = None
        self.across: tuple[Tensor, Tensor] | None = None
        if eps is not None:
            counts = {"q": heads.count, "k": heads.kv} if across else {"q": 1, "k": 1}
            # keys of another layer are normalised there
            kinds = "qk" if "k" in parts else "qq"
            names = [f"{name}.{kind}_norm.weight" for kind in kinds]
            widths = [counts[kind] * heads.width for kind in kinds]
            q_norm, k_norm = (weights.vector(each, n, shift=shift) for each, n in zip(names, widths, strict=True))
            if across:
                self.across = q_norm, k_norm
            else:
                self.norms = q_norm, k_norm
        sunk = span(mine, shared)
        self.sinks = weights.vector(f"{name}.sinks", heads.count)[sunk.start : sunk.stop] if sinks else None

    def __call__(self, stream: Stream, batch: Batch | Beside, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, rows, gate = self.products(stream)
        out = batch.apart(lambda part, *rows: self._attended(part, store, *rows), *rows)
        if gate is not None:
            out = sigmoid_gate(out, gate)
        return total, self.projected(out)

    def _attended(self, batch: Batch, store: Any, *rows: Tensor) -> Tensor:
        q = self.stored(batch, store, *rows)
        if self.growth is not None:
            q = self.growth(q, batch.positions)
        return store.attend(batch, q, self.scale, self.sinks, self.softcap)

    def projected(self, out: Tensor) -> Tensor:
        """What all heads give, [T, Hq, D], as the stream takes it: [T, H]."""
        return self.join(linear(out.view(len(out), -1), self.out, self.out_bias))

    def sample(self) -> Iterator[Tensor]:
        """A few rows of each projection as they are held, whatever the device: they tell these weights from others."""
        if self._sample is not None:
            yield from self._sample
            return
        for weight in (*self.qkv, self.out):
            rows = torch.arange(0, weight.shape[0], max(1, weight.shape[0] // SAMPLED), device=weight.device)
            yield from sampled(weight.take(rows) if isinstance(weight, QTensor) else weight[rows])

    def output_gram(self) -> Tensor:
        """The products of the columns by which each query head's result is projected: [Hq, D, D] float32."""
        heads, width = self.heads.count, self.heads.width
        total = torch.zeros(heads, width, width, device=self.out.device)
        for rows in torch.arange(self.out.shape[0], device=self.out.device).split(GRAM_ROWS):
            piece = dense(self.out.take(rows) if isinstance(self.out, QTensor) else self.out[rows])
            columns = piece.float().unflatten(1, (heads, width)).transpose(0, 1)
            total += columns.transpose(1, 2) @ columns
        return total

    def remember(self, stream: Stream, batch: Batch, store: Any) -> None:
        """Store keys and values."""
        self.stored(batch, store, *self.products(stream)[1])

    def products(self, stream: Stream) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Give the stream with all that was to be added to it, what `stored` takes, and gates if there are any."""
        heads, tokens = self.heads, len(stream.x)
        total, (q, k, v) = stream.linears(self.qkv, self.qkv_bias)
        gate = None
        if self.across is not None:
            q, k = rms_norm(q, self.across[0], self.eps), rms_norm(k, self.across[1], self.eps)
        if self.gated:
            q, gate = split_q_gate(q, heads.count)
        else:
            q = q.view(tokens, -1, heads.width)
        k, v = (t.view(tokens, -1, heads.width) for t in (k, v))
        return total, (q, k, v), gate

    def stored(self, batch: Batch, store: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store keys and values of a batch's new tokens: gives the queries as they attend, [T, Hq, D]."""
        return store.rope_append(batch, q, k, v, self.rotation, self.norms, self.eps)
