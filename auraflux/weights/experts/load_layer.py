"""Loader of a mixture layer's experts from any checkpoint layout.

per expert     experts.7.gate_proj.weight [I, H]                Hugging Face until 4.x, DeepSeek
fused        experts.gate_up_proj [E, 2I, H]                  Hugging Face 5.x
interleaved  experts.gate_up_proj [E, H, 2I], gate and up alternate; as MXFP4 [E, 2I, H]      gpt-oss
transposed   experts.gate_up_proj [E, H, 2I], gate first                                      Llama 4
stacked      switch_mlp.gate_proj.weight [E, I, H]            mlx-lm; `experts` for its gpt-oss, `switch_glu` for Gemma 4

Experts without a gate have only up and down; fused ones are experts.up_proj [E, I, H].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.ops.moe.experts import Activation, Clamp, Experts, Gelu, ReluSquare, blob_nbytes
from auraflux.quant import QTensor
from auraflux.weights.experts.offloaded import OffloadedExperts
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.pool.load_pool import read_blobs
from auraflux.weights.experts.resident import LayerExperts, ResidentExperts
from auraflux.weights.experts.stacks import ExpertSource
from auraflux.weights.experts.store import ExpertStore
from auraflux.weights.formats.stored import Stored, dense, is_placeholder
from auraflux.weights.loader import Weights
from auraflux.weights.parallel.balanced_experts import BalancedExperts
from auraflux.weights.parallel.expert_parallel import ExpertParallelExperts, TensorParallelExperts, whole_expert_sharding
from auraflux.weights.parallel.tensor_slices import Slices

EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def load_experts(
    weights: Weights,
    name: str,
    count: int,
    hidden: int,
    inner: int,
    activation: Activation | None = None,
    transposed: bool = False,
) -> LayerExperts:
    """Load the experts under `name` from a checkpoint of any layout, or from packed files.

    activation  gpt-oss's implies biases
    transposed  fused experts are transposed
    """
    found = _load(weights, name, count, hidden, inner, activation, transposed)
    weights.named.experts[name] = found
    return found


def _load(
    weights: Weights, name: str, count: int, hidden: int, inner: int, activation: Activation | None, transposed: bool
) -> LayerExperts:
    sharding, slices = weights.expert_sharding, weights.slices
    if weights.experts is not None:
        return _load_packed(weights, weights.experts, name, count, hidden, inner, activation)
    layer = _CheckpointExperts(weights, name, count, hidden, inner, activation, transposed)
    if weights.expert_pool is not None:
        files = weights.checkpoint.experts
        return layer.pooled(weights.expert_pool) if files is None else layer.pooled_from(files, weights.expert_pool)
    columns: range | None = None
    if not slices.unsliced:
        columns = layer.columns()
        sharding = whole_expert_sharding(slices) if columns is None else sharding
    if sharding is None:
        resident = ResidentExperts(layer.select(range(count), columns))
        return resident if slices.unsliced else TensorParallelExperts(resident, slices.all_reduce)
    made = layer.select(sharding.placement.local_experts(name, count), columns)
    # the other experts are loaded by other ranks
    weights.skip_prefix(f"{name}.experts.")

    def load_into(experts: Sequence[int], slots: Sequence[int]) -> Sequence[int]:
        _overwrite(layer.select(experts, columns), made, slots)
        return slots

    found = ExpertParallelExperts(ResidentExperts(made), sharding, name, count, weights.device, load_into)
    return found if slices.unsliced else TensorParallelExperts(found, slices.all_reduce)


def _load_packed(
    weights: Weights,
    store: ExpertStore,
    name: str,
    count: int,
    hidden: int,
    inner: int,
    activation: Activation | None,
) -> LayerExperts:
    sharding, slices = weights.expert_sharding, weights.slices
    stacks = f"{name}.{stack_name(activation)}"
    biases = _biases(weights, name, stacks, count, hidden, inner) if _like_gpt_oss(activation) else {}
    experts = store.layer(name, count, hidden, inner, biases, activation)
    if not slices.unsliced:
        # expert files cannot be sliced by columns: ranks get whole experts
        sharded = ExpertParallelExperts(experts, whole_expert_sharding(slices), name, count, weights.device)
        return TensorParallelExperts(sharded, slices.all_reduce)
    if sharding is None:
        return experts
    if sharding.balancer is not None and isinstance(experts, OffloadedExperts):
        return BalancedExperts(experts, sharding.balancer)
    return ExpertParallelExperts(experts, sharding, name, count, weights.device)


@dataclass(frozen=True)
class _CheckpointExperts:
    """Experts under a name in a checkpoint of any layout."""

    weights: Weights
    name: str
    count: int
    hidden: int
    inner: int
    activation: Activation | None
    transposed: bool

    @property
    def stacks(self) -> str:
        return f"{self.name}.{stack_name(self.activation)}"

    def sources(self) -> dict[str, ExpertSource]:
        """Return the source of each projection."""
        weights, stacks, prefix = self.weights, self.stacks, f"{self.name}.experts"
        sizes = self.count, self.hidden, self.inner
        gated = not isinstance(self.activation, ReluSquare)
        if weights.has(f"{stacks}.{'gate' if gated else 'up'}_proj.weight"):
            return _stacked(weights, stacks, *sizes, gated)
        if not gated and weights.has(f"{prefix}.up_proj"):
            return _fused_ungated(weights, prefix, *sizes)
        if gated and weights.has(f"{prefix}.w1"):
            return _in_rows(weights, prefix, *sizes)
        if not weights.has(f"{prefix}.gate_up_proj"):
            return _per_expert(weights, prefix, self.hidden, self.inner, gated)
        if _like_gpt_oss(self.activation):
            return _transposed(weights, prefix, *sizes, EVEN, ODD)
        if self.transposed:
            return _transposed(weights, prefix, *sizes, slice(self.inner), slice(self.inner, None))
        return _fused(weights, prefix, *sizes)

    def columns(self) -> range | None:
        """Return the columns of every expert on this rank; None if they do not divide evenly."""
        slices = self.weights.slices
        group = slices.group(self.sources()["down"].matrix(0), self.weights.quantization_group)
        return slices.columns(self.inner, group, f"{self.stacks}.down_proj") if slices.even(self.inner, group) else None

    def select(self, share: Sequence[int], columns: range | None) -> Experts:
        """Load some experts, or some columns of them."""
        weights, prefix, stacks = self.weights, f"{self.name}.experts", self.stacks
        sources = self.sources()
        if columns is not None:
            sources = {
                kind: source.cut(None, columns) if kind == "down" else source.cut(columns, None)
                for kind, source in sources.items()
            }
        made = {
            kind: weights.stack(f"{stacks}.{kind}_proj.weight", len(share), source.select(share))
            for kind, source in sources.items()
        }
        weights.release(f"{prefix}.gate_up_proj", f"{prefix}.up_proj", f"{prefix}.down_proj")
        biases = {kind: value[list(share)].contiguous() for kind, value in self.biases().items()}
        if columns is not None:
            biases = {kind: _slice_bias(kind, value, columns, weights.slices) for kind, value in biases.items()}
        return Experts(made.get("gate"), made["up"], made["down"], **biases, activation=self.activation)

    def biases(self) -> dict[str, Tensor]:
        """Load the biases of all experts."""
        if not _like_gpt_oss(self.activation):
            return {}
        return _biases(self.weights, self.name, self.stacks, self.count, self.hidden, self.inner)

    def pooled(self, pool: GpuExpertPool) -> LayerExperts:
        """Load all experts into a pool."""
        weights, sources = self.weights, self.sources()
        biases = {kind: value.cpu() for kind, value in self.biases().items()}

        def stored(expert: int) -> dict[str, Stored]:
            return {
                **{kind: source.matrix(expert) for kind, source in sources.items()},
                **{kind: value[expert] for kind, value in biases.items()},
            }

        def convert(found: Mapping[str, Stored]) -> dict[str, Stored]:
            return {
                kind: weights.host_expert(f"{self.stacks}.{kind}_proj.weight", each) if kind in sources else each
                for kind, each in found.items()
            }

        like = convert(stored(0))
        if any(is_placeholder(each) for each in like.values()):
            # records all that is missing
            return ResidentExperts(self.select(range(self.count), None))
        made = pool.add_layer(like, self.activation, lambda rows: weights.load_blobs(self.stacks, rows, stored, convert, like))
        for source in sources.values():
            for expert in range(self.count):
                source.release(expert)
        return made

    def pooled_from(self, files: ExpertFiles, pool: GpuExpertPool) -> LayerExperts:
        """Read all experts of a packed model into a pool, or leave them on disk below it."""
        file = files.file_of(self.name, self.count, self.hidden, self.inner)
        file.check()
        if blob_nbytes(file.like) != file.nbytes:
            raise FormatError(f"{file.path} holds arrays that are not aligned. Pack the model again.")
        biases = {kind: value.cpu() for kind, value in self.biases().items()}
        like: dict[str, Stored] = {**file.like, **{kind: value[0] for kind, value in biases.items()}}
        if pool.tier is not None:
            self.weights.advance(file.file_nbytes)
            return pool.add_disk_layer(file, like, self.activation, biases)

        def load(rows: Tensor) -> None:
            read_blobs(file, rows, pool.plan.verify)
            views = Experts.from_blobs(rows, like)
            for kind, value in biases.items():
                getattr(views, kind).copy_(value)
            self.weights.advance(file.file_nbytes)

        return pool.add_layer(like, self.activation, load)


def _overwrite(source: Experts, target: Experts, slots: Sequence[int]) -> None:
    """Copy experts into slots of others in place, as CUDA graphs hold their addresses."""
    for new, old in zip(_arrays(source), _arrays(target), strict=True):
        old[list(slots)] = new


def _arrays(experts: Experts) -> list[Tensor]:
    stacks = [(s.packed, s.scales, s.biases) if isinstance(s, QTensor) else (s,) for s in experts.stacks]
    biases = (experts.gate_bias, experts.up_bias, experts.down_bias)
    return [array for arrays in (*stacks, biases) for array in arrays if array is not None]


def _slice_bias(kind: str, value: Tensor, columns: range, slices: Slices) -> Tensor:
    """Return the bias of some columns; the output bias belongs to the first rank."""
    if kind == "down_bias":
        return value if slices.first else torch.zeros_like(value)
    return value[:, columns.start : columns.stop].contiguous()


def stack_name(activation: Activation | None) -> str:
    """Return mlx-lm's name for stacked experts, which depends on the activation."""
    if _like_gpt_oss(activation):
        return "experts"
    return "switch_glu" if isinstance(activation, Gelu) else "switch_mlp"


def _like_gpt_oss(activation: Activation | None) -> bool:
    """Return whether experts have biases, and gate and up alternate."""
    return isinstance(activation, Clamp) and not activation.bare


def _stacked(weights: Weights, stacks: str, count: int, hidden: int, inner: int, gated: bool) -> dict[str, ExpertSource]:
    def source(kind: str, rows: int, width: int) -> ExpertSource:
        name = f"{stacks}.{kind}_proj.weight"
        return ExpertSource(lambda e: weights.stack_entry(name, e, count, rows, width), lambda e: weights.release(name))

    return _projections(source, hidden, inner, gated)


def _projections(
    source: Callable[[str, int, int], ExpertSource], hidden: int, inner: int, gated: bool
) -> dict[str, ExpertSource]:
    first = {kind: source(kind, inner, hidden) for kind in (("gate", "up") if gated else ("up",))}
    return {**first, "down": source("down", hidden, inner)}


def _per_expert(weights: Weights, prefix: str, hidden: int, inner: int, gated: bool) -> dict[str, ExpertSource]:
    def source(kind: str, rows: int, width: int) -> ExpertSource:
        def name(expert: int) -> str:
            return f"{prefix}.{expert}.{kind}_proj.weight"

        return ExpertSource(lambda e: weights.stored(name(e), rows, width), lambda e: weights.release(name(e)))

    return _projections(source, hidden, inner, gated)


def _fused_ungated(weights: Weights, prefix: str, count: int, hidden: int, inner: int) -> dict[str, ExpertSource]:
    def source(kind: str, rows: int, width: int) -> ExpertSource:
        name = f"{prefix}.{kind}_proj"
        return ExpertSource(lambda e: weights.stack_entry(name, e, count, rows, width), lambda e: weights.release(name))

    return _projections(source, hidden, inner, gated=False)


def _in_rows(weights: Weights, prefix: str, count: int, hidden: int, inner: int) -> dict[str, ExpertSource]:
    """Return sources in DBRX's layout: the rows of all experts in one matrix, of down transposed ones."""

    def source(name: str, transposed: bool = False) -> ExpertSource:
        rows = dense(weights.stored(f"{prefix}.{name}", count * inner, hidden)).unflatten(0, (count, inner))
        stack = rows.transpose(1, 2) if transposed else rows
        return ExpertSource(lambda e: stack[e], lambda e: weights.release(f"{prefix}.{name}"))

    return {"gate": source("w1"), "up": source("v1"), "down": source("w2", transposed=True)}


def _fused(weights: Weights, prefix: str, count: int, hidden: int, inner: int) -> dict[str, ExpertSource]:
    both = weights.stored(f"{prefix}.gate_up_proj", count, 2 * inner, hidden)
    down = weights.stored(f"{prefix}.down_proj", count, hidden, inner)
    return _halves(weights, prefix, both, down, slice(inner), slice(inner, None))


def _halves(weights: Weights, prefix: str, both: Stored, down: Stored, gate: slice, up: slice) -> dict[str, ExpertSource]:
    """Return sources in a fused stack of gate and up, and a stack of down."""

    def source(stack: Stored, kind: str) -> ExpertSource:
        return ExpertSource(lambda e: stack[e], lambda e: weights.release(f"{prefix}.{kind}"))

    halves = {"gate": source(_rows(both, gate), "gate_up_proj"), "up": source(_rows(both, up), "gate_up_proj")}
    return {**halves, "down": source(down, "down_proj")}


def _rows(stack: Stored, rows: slice) -> Stored:
    return stack.part(rows) if isinstance(stack, QTensor) else stack[:, rows]


def _transposed(
    weights: Weights, prefix: str, count: int, hidden: int, inner: int, gate: slice, up: slice
) -> dict[str, ExpertSource]:
    def stored(kind: str, rows: int, width: int) -> Stored:
        # the shape is ambiguous: gpt-oss has as many inner channels as hidden ones
        name = f"{prefix}.{kind}"
        if weights.is_quantized(name):
            return weights.stored(name, count, rows, width)
        return dense(weights.stored(name, count, width, rows)).transpose(1, 2)

    both, down = stored("gate_up_proj", 2 * inner, hidden), stored("down_proj", hidden, inner)
    return _halves(weights, prefix, both, down, gate, up)


def _biases(weights: Weights, name: str, stacks: str, count: int, hidden: int, inner: int) -> dict[str, Tensor]:
    if weights.has(f"{stacks}.gate_proj.bias"):
        shapes = {"gate": inner, "up": inner, "down": hidden}
        return {f"{kind}_bias": weights.vector(f"{stacks}.{kind}_proj.bias", count, n) for kind, n in shapes.items()}
    both = dense(weights.stored(f"{name}.experts.gate_up_proj_bias", count, 2 * inner))
    down = dense(weights.stored(f"{name}.experts.down_proj_bias", count, hidden))
    found = {"gate": both[:, EVEN], "up": both[:, ODD], "down": down}
    return {
        f"{kind}_bias": weights.complete(f"{stacks}.{kind}_proj.bias", value.contiguous().to(weights.device, torch.float32))
        for kind, value in found.items()
    }
