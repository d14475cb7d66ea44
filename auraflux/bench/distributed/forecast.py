"""Forecast of decode throughput on several machines, from sizes and bandwidths alone.

Decode is memory-bound: a token reads every weight it uses once. Its time is the sum of the bytes over the bandwidths of memory,
disks and network; arithmetic costs nothing.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from auraflux.cache import AttentionShape, Cache, CacheSettings
from auraflux.distributed.layer_split import LAYER, LayerSizes
from auraflux.errors import SettingsError
from auraflux.models.config import experts_per_token, has_experts
from auraflux.weights.experts.settings import parse_nbytes
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.memory_plan import KINDS

USED = 0.8  # share of a machine's memory for weights; the system and the KV cache take the rest
MAX_HEADS = 1 << 16  # where heads share their KV, tensor parallelism has no limit
# bytes per second where nothing was measured: of an SSD, and of two channels of DDR4
DEFAULT_DISK = 2e9
DEFAULT_MEMORY = 20e9


@dataclass(frozen=True)
class Host:
    """A machine: its memory, and the bandwidths of its disk and memory in bytes per second."""

    memory_nbytes: int
    disk_rate: float = DEFAULT_DISK
    memory_rate: float = DEFAULT_MEMORY

    @property
    def room(self) -> int:
        return int(self.memory_nbytes * USED)


def is_figure(text: str) -> bool:
    """Return True for a size of memory, with or without a disk bandwidth."""
    try:
        for each in text.split("/", 1):
            parse_nbytes(each)
    except SettingsError:
        return False
    return True


def parse_hosts(text: str) -> list[Host]:
    """Parse machines: in "16GB,32GB/3GB" the second has a disk of 3 GB/s."""
    hosts = []
    for each in text.split(","):
        memory, _, disk = each.strip().partition("/")
        try:
            hosts.append(Host(parse_nbytes(memory), float(parse_nbytes(disk)) if disk else DEFAULT_DISK))
        except SettingsError as err:
            raise SettingsError(
                f"{each.strip()!r:.80} is not a size, like 16GB or 16GB/3GB, nor an address, like 10.0.0.1."
            ) from err
        if hosts[-1].memory_nbytes <= 0 or hosts[-1].disk_rate <= 0:
            raise SettingsError(
                f"{each.strip()!r} is no machine. Write it like 16GB, or 16GB/3GB with what its disk reads a second."
            )
    return hosts


@dataclass(frozen=True)
class LayerKV:
    """The KV cache of a layer at the context length, which every token reads.

    full     full attention: its pages can be sharded by context parallelism
    by_head  each head has its own keys and values
    sums     bytes of a rank's partial attention output for a token, all heads
    """

    nbytes: int
    full: bool
    by_head: bool
    sums: int


@dataclass(frozen=True)
class Weights:
    """Bytes of a model.

    dense    of each layer, without its experts
    experts  of each layer, all of them
    ends     of the embedding and the LM head
    head     of the LM head alone
    active   share of a layer's experts that a token uses
    hidden   size of the hidden state
    packed   experts may stay on disk
    chosen   experts per token
    heads    KV heads, of the layer that has fewest
    unsliced the reason why tensor parallelism is impossible; None where it is possible
    kv       the KV cache of each layer; empty without a context length
    """

    dense: list[int]
    experts: list[int]
    ends: int
    head: int
    active: float
    hidden: int
    packed: bool
    chosen: int = 1
    heads: int = 1
    unsliced: str | None = None
    kv: tuple[LayerKV, ...] = ()

    @property
    def sizes(self) -> LayerSizes:
        return LayerSizes([a + b for a, b in zip(self.dense, self.experts, strict=True)], self.ends)

    def with_cache(self) -> "Weights":
        """Add each layer's KV cache to its dense weights: a token reads both."""
        cached = [each.nbytes for each in self.kv] + [0] * (len(self.dense) - len(self.kv))
        return replace(self, dense=[a + b for a, b in zip(self.dense, cached, strict=True)])

    def stage(self, held: range) -> "Weights":
        """Return the weights of a pipeline stage; the first has the embedding and the LM head too."""
        some = slice(held.start, held.stop)
        ends = (self.ends, self.head) if held.start == 0 else (0, 0)
        return replace(self, dense=self.dense[some], experts=self.experts[some], ends=ends[0], head=ends[1], kv=self.kv[some])


def weights_of(
    checkpoint: Checkpoint,
    module: Any,
    context: int | None = None,
    settings: CacheSettings = CacheSettings("none"),  # noqa: B008
) -> Weights:
    """Read a checkpoint's sizes without its weights; with the KV cache of `context` tokens if that is given."""
    config = module.Config.from_hf(checkpoint.config)
    dense, experts, ends, head = [0] * config.layers, [0] * config.layers, 0, 0
    expert = re.compile(KINDS["experts"])
    count = 1
    for name, nbytes in checkpoint.sizes().items():
        ours = module.rename(name)
        layer = LAYER.match(ours or "")
        if layer is None:
            ends += nbytes if ours else 0
            head += nbytes if ours and ("lm_head" in ours or (config.tied and "embed_tokens" in ours)) else 0
        elif int(layer[1]) < config.layers:
            chosen = experts if expert.search(ours) and "shared" not in ours else dense
            chosen[int(layer[1])] += nbytes
    if checkpoint.experts is not None:
        for file in checkpoint.experts.files:
            if file.layer is not None and file.layer < config.layers:
                experts[file.layer] += file.file_nbytes
    mixed = has_experts(checkpoint.config) and any(experts)
    if mixed:
        count = _experts_of(config)
    used = experts_per_token(checkpoint.config) if mixed else 1
    share = used / count
    shapes = module.make_caches(config)
    heads, reason = _least_heads(shapes), module.Model.no_tensor_parallel(config)
    found = Weights(dense, experts, ends, head, share, config.hidden, checkpoint.experts is not None, used, heads, reason)
    return found if context is None else replace(found, kv=_layer_kv(config, shapes, context, settings))


def _least_heads(shapes: list[Any]) -> int:
    """Return the fewest KV heads of any layer; layers whose heads share their KV do not count."""
    found = [MAX_HEADS]

    def all_of(count: int) -> range:
        found.append(count)
        return range(count)

    for shape in shapes:
        shape.sliced(all_of)
    return min(found)


def _layer_kv(config: Any, shapes: list[Any], context: int, settings: CacheSettings) -> tuple[LayerKV, ...]:
    """Return the KV cache of each layer at `context` tokens."""
    # the meta device makes stores without their memory
    layers = Cache(shapes, settings, context=1, device="meta").layers
    found = []
    for number, (shape, layer) in enumerate(zip(shapes, layers, strict=True)):
        if not shape.attends:
            found.append(LayerKV(0, False, True, 0))
            continue
        seen = context if shape.span is None else min(context, shape.span)
        by_head = isinstance(shape, AttentionShape)
        width = (shape.value_width or shape.width) if by_head else shape.width
        found.append(
            LayerKV(layer.token_nbytes * seen, shape.span is None, by_head, 4 * _queries(config, number) * (width + 2))
        )
    return tuple(found)


def _queries(config: Any, layer: int) -> int:
    """Return the query heads of a layer; families name them differently."""
    heads = config.heads[layer] if isinstance(config.heads, list | tuple) else config.heads
    return heads if isinstance(heads, int) else heads.count


def _experts_of(config: Any) -> int:
    """Return the number of experts of a layer; families name it differently."""
    mixture = getattr(config, "mixture", None)
    return mixture.count if mixture is not None else config.experts


@dataclass(frozen=True)
class Forecast:
    """The forecast of one parallel layout.

    way     as in --parallel
    parts   bytes that each machine holds or streams
    terms   seconds of a token by resource: memory, disk, network
    reason  why the layout is impossible; None if it is possible
    options that it needs in addition to --parallel
    """

    way: str
    parts: list[int]
    terms: dict[str, float]
    reason: str | None = None
    options: str = ""

    @property
    def rate(self) -> float:
        """Return tokens per second of one sequence."""
        return 1 / sum(self.terms.values()) if self.reason is None else 0.0

    @property
    def bound(self) -> str:
        """Return the resource that takes most of the time."""
        return max(self.terms, key=lambda term: self.terms[term])
