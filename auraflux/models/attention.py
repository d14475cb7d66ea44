"""Grouped-query attention (GQA) over the KV cache, for most families."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import Batch, MixedBatch
from auraflux.models.layer import LayerInput, Mixer
from auraflux.models.rotation import Growth, Rotation
from auraflux.ops import gate_heads, rms_norm, sigmoid_gate, split_q_gate
from auraflux.quant import QTensor
from auraflux.weights.formats.stored import Stored, dense
from auraflux.weights.loader import Weights, sampled
from auraflux.weights.parallel.tensor_slices import span

SAMPLED = 4  # rows
GRAM_ROWS = 1024  # of a weight that are dequantized at a time


@dataclass(frozen=True)
class Heads:
    """The numbers of query heads (`count`) and of key and value heads (`kv`), and the width of each.

    value  the width of a value, where it is not `width`
    """

    count: int
    kv: int
    width: int
    value: int | None = None

    @property
    def value_width(self) -> int:
        return self.width if self.value is None else self.value


@dataclass(frozen=True)
class OutputGate:
    """A projection of gates over the output of attention.

    per_head  one gate for all channels of a head, not one for each
    soft      outputs are multiplied by softplus(gate), not by sigmoid(gate)
    """

    name: str
    per_head: bool = False
    soft: bool = False


class Attention(Mixer):
    """Grouped-query attention over the cache.

    shares_kv  later layers read its keys and values too

    eps     of the norms over queries and keys; None where there are none
    across  norms are over all heads at once, not per head
    scale   of the attention scores; by default 1/sqrt(width)
    sinks   each head has an attention sink
    gated   q_proj holds an output gate next to each head's query
    gate    output gates of their own projection
    growth  scales queries by their positions
    parts   the projections: "qkv"; "qk" where values are made of keys; "q" where both are another layer's
    shift   added to the norms' weights: 1 where checkpoints store w of a (1 + w) norm
    """

    shares_kv = False

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
        gate: OutputGate | None = None,
    ):
        self.output_gate = gate
        self.rotation, self.eps, self.softcap, self.gated = rotation, eps or 0.0, softcap, gated
        self.by_context = rotation.by_context is not None
        self.scale, self.growth = heads.width**-0.5 if scale is None else scale, growth
        # a rank has all query heads of its key heads
        mine, shared = weights.slices.heads(heads.kv), heads.count // heads.kv
        self.heads, self.join = Heads(shared * len(mine), len(mine), heads.width, heads.value), weights.slices.all_reduce
        rows = {"q": shared * (2 if gated else 1) * heads.width, **dict.fromkeys(parts[1:], heads.width)}
        if "v" in rows:
            rows["v"] = heads.value_width
        each = [(f"{name}.{kind}_proj", n * heads.kv, span(mine, n)) for kind, n in rows.items()]
        self.qkv = self.load_qkv(weights, hidden, each)
        self.qkv_bias = [weights.bias(*which) for which in each]
        self.gate: tuple[Stored, ...] = ()
        if gate is not None:
            width = 1 if gate.per_head else heads.width
            rows_of_gate = heads.count * width, hidden, span(mine, shared * width)
            self.gate = (weights.row_shard(f"{name}.{gate.name}", *rows_of_gate),)
        columns = span(mine, shared * heads.value_width)
        self.out = weights.column_shard(f"{name}.o_proj", hidden, heads.count * heads.value_width, columns)
        self.out_bias = weights.bias_on_first_rank(f"{name}.o_proj", hidden)
        self._sample: list[Tensor] | None = None
        if not weights.slices.unsliced:
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

    def load_qkv(self, weights: Weights, hidden: int, each: list[tuple[str, int, range]]) -> list[Stored]:
        """Load the projections of which names, numbers of rows and this rank's rows are given."""
        return [weights.row_shard(projection, n, hidden, some) for projection, n, some in each]

    def __call__(self, inputs: LayerInput, batch: Batch | MixedBatch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, rows, gate = self.project(inputs)
        out = batch.map_parts(lambda part, *rows: self._attend(part, store, *rows), *rows)
        return total, self.projected(out if gate is None else self._gated(out, gate))

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Multiply the output by its gates: [T, Hq, D] -> [T, Hq, D]."""
        kind = self.output_gate
        if kind is None or not (kind.per_head or kind.soft):
            return sigmoid_gate(out, gate.view(out.shape) if gate.is_contiguous() else gate)
        # a gate for each channel is one for each head of one channel
        return gate_heads(out if kind.per_head else out.view(*gate.shape, 1), gate, kind.soft).view(out.shape)

    def _attend(self, batch: Batch, store: Any, *rows: Tensor) -> Tensor:
        if self.appends_and_attends:
            rotating = self.rotation.at(batch.context), self.norms, self.eps
            return store.rope_append_attend(batch, rows, *rotating, self.scale, self.sinks, self.softcap)
        q = self.append(batch, store, *rows)
        if self.growth is not None:
            q = self.growth(q, batch.positions)
        return store.attend(batch, q, self.scale, self.sinks, self.softcap)

    @property
    def appends_and_attends(self) -> bool:
        """Return whether nothing happens to queries between RoPE and attention."""
        return self.growth is None and type(self).append is Attention.append

    def projected(self, out: Tensor) -> Tensor:
        """Project the output of all heads: [T, Hq, D] -> [T, H]."""
        return self.join(linear(out.view(len(out), -1), self.out, self.out_bias))

    def sample(self) -> Iterator[Tensor]:
        """Yield a few rows of each projection, the same on every device, to identify the weights."""
        if self._sample is not None:
            yield from self._sample
            return
        for weight in (*self.qkv, self.out):
            rows = torch.arange(0, weight.shape[0], max(1, weight.shape[0] // SAMPLED), device=weight.device)
            yield from sampled(weight.take(rows) if isinstance(weight, QTensor) else weight[rows])

    def output_gram(self) -> Tensor:
        """Return the Gram matrix of the output projection's columns per query head: [Hq, D, D] float32."""
        heads, width = self.heads.count, self.heads.value_width
        total = torch.zeros(heads, width, width, device=self.out.device)
        for rows in torch.arange(self.out.shape[0], device=self.out.device).split(GRAM_ROWS):
            piece = dense(self.out.take(rows) if isinstance(self.out, QTensor) else self.out[rows])
            columns = piece.float().unflatten(1, (heads, width)).transpose(0, 1)
            total += columns.transpose(1, 2) @ columns
        return total

    def update_cache(self, inputs: LayerInput, batch: Batch, store: Any) -> None:
        """Append keys and values of new tokens to the cache."""
        self.append(batch, store, *self.project(inputs)[1])

    def project(self, inputs: LayerInput) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Return the residual stream with its delta added, the queries, keys and values, and output gates or None."""
        heads, tokens = self.heads, len(inputs.x)
        biases = [*self.qkv_bias, *(None for _ in self.gate)]
        total, (q, k, v, *gates) = inputs.linears([*self.qkv, *self.gate], biases)
        gate = gates[0] if gates else None
        if self.across is not None:
            q, k = rms_norm(q, self.across[0], self.eps), rms_norm(k, self.across[1], self.eps)
        if self.gated:
            q, gate = split_q_gate(q, heads.count)
        else:
            q = q.view(tokens, -1, heads.width)
        k, v = k.view(tokens, -1, heads.width), v.view(tokens, -1, heads.value_width)
        return total, (q, k, v), gate

    def append(self, batch: Batch, store: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append keys and values of new tokens to the cache; return the rotated queries, [T, Hq, D]."""
        return store.rope_append(batch, q, k, v, self.rotation.at(batch.context), self.norms, self.eps)
