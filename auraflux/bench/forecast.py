"""What fits where when a model is divided among machines, and how fast a token would come, from sizes and speeds alone.

A token reads every weight it uses once, so that its time is the sum of what memory, disks and the network take for their
bytes. Nothing is computed for free here but arithmetic, which one token's weights keep waiting on any machine.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb, factorial
from typing import Any

from auraflux.cache import AttentionShape, Cache, CacheSettings
from auraflux.errors import SettingsError
from auraflux.models.config import experts_per_token, has_experts
from auraflux.run.ranks.parallel import CONTEXT, EXPERTS, PIPELINE, TENSOR
from auraflux.run.ranks.split import LAYER, Sizes, split
from auraflux.run.ranks.wire import Wire
from auraflux.weights.expert_settings import parse_nbytes
from auraflux.weights.plan import KINDS
from auraflux.weights.stored import Checkpoint

USED = 0.8  # of a machine's memory, for weights; the rest is the system's and the cache's
MOST = 1 << 16  # ranks among which heads that share what they keep may be split
USUAL_DISK = 2e9  # bytes a second, of an SSD that nobody has measured


@dataclass(frozen=True)
class Host:
    """A machine: its memory, and how many bytes a second its disk gives."""

    memory_nbytes: int
    disk_rate: float = USUAL_DISK

    @property
    def room(self) -> int:
        return int(self.memory_nbytes * USED)


def parse_hosts(text: str) -> list[Host]:
    """Machines as users write them: "16GB,32GB/3GB" has a disk of 3 GB/s in the second."""
    hosts = []
    for each in text.split(","):
        memory, _, disk = each.strip().partition("/")
        hosts.append(Host(parse_nbytes(memory), float(parse_nbytes(disk)) if disk else USUAL_DISK))
        if hosts[-1].memory_nbytes <= 0 or hosts[-1].disk_rate <= 0:
            raise SettingsError(
                f"{each.strip()!r} is no machine. Write it like 16GB, or 16GB/3GB with what its disk reads a second."
            )
    return hosts


@dataclass(frozen=True)
class Kept:
    """What a layer keeps of a text so long, which every token reads: bytes.

    full     it sees everything, so that its pages can be dealt out
    by_head  each head has keys and values of its own
    sums     bytes of what a rank finds for a token in its pages, all heads of it
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
    ends     of the embedding and the head
    head     of the head alone
    active   the share of a layer's experts that a token uses; chosen  how many these are
    hidden   numbers of a row
    packed   experts may stay on disk
    heads    of keys in the layer that has fewest
    unsliced why heads cannot be split; None where they can
    kept     what layers keep of a text; none where no context was asked for
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
    kept: tuple[Kept, ...] = ()

    @property
    def sizes(self) -> Sizes:
        return Sizes([a + b for a, b in zip(self.dense, self.experts, strict=True)], self.ends)

    def with_cache(self) -> "Weights":
        """The same where each layer has what it keeps beside its weights: a token reads both."""
        kept = [each.nbytes for each in self.kept] + [0] * (len(self.dense) - len(self.kept))
        return replace(self, dense=[a + b for a, b in zip(self.dense, kept, strict=True)])


def weights_of(
    checkpoint: Checkpoint,
    module: Any,
    context: int | None = None,
    settings: CacheSettings = CacheSettings("none"),  # noqa: B008
) -> Weights:
    """Read a checkpoint's sizes, none of its weights; with what a text of `context` tokens takes if that is given."""
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
    heads, reason = _least_heads(shapes), module.Model.unsliced(config)
    found = Weights(dense, experts, ends, head, share, config.hidden, checkpoint.experts is not None, used, heads, reason)
    return found if context is None else replace(found, kept=_kept(config, shapes, context, settings))


def _least_heads(shapes: list[Any]) -> int:
    """Heads of keys in the layer that has fewest; layers whose heads share all that is kept have no say."""
    found = [MOST]

    def all_of(count: int) -> range:
        found.append(count)
        return range(count)

    for shape in shapes:
        shape.sliced(all_of)
    return min(found)


def _kept(config: Any, shapes: list[Any], context: int, settings: CacheSettings) -> tuple[Kept, ...]:
    """What layers keep of a text of so many tokens."""
    # the meta device makes stores without their memory
    layers = Cache(shapes, settings, context=1, device="meta").layers
    found = []
    for number, (shape, layer) in enumerate(zip(shapes, layers, strict=True)):
        if not shape.attends:
            found.append(Kept(0, False, True, 0))
            continue
        seen = context if shape.span is None else min(context, shape.span)
        by_head = isinstance(shape, AttentionShape)
        width = (shape.value_width or shape.width) if by_head else shape.width
        found.append(Kept(layer.token_nbytes * seen, shape.span is None, by_head, 4 * _queries(config, number) * (width + 2)))
    return tuple(found)


def _queries(config: Any, layer: int) -> int:
    """Heads of queries in a layer, as families call it."""
    heads = config.heads[layer] if isinstance(config.heads, list | tuple) else config.heads
    return heads if isinstance(heads, int) else heads.count


def _experts_of(config: Any) -> int:
    """How many a layer has, as families call it."""
    mixture = getattr(config, "mixture", None)
    return mixture.count if mixture is not None else config.experts


@dataclass(frozen=True)
class Forecast:
    """How one way would do.

    parts   bytes that each machine holds or streams
    terms   seconds of a token by what takes them
    reason  why it cannot be; None if it can
    options that it takes beside --parallel
    """

    way: str
    parts: list[int]
    terms: dict[str, float]
    reason: str | None = None
    options: str = ""

    @property
    def rate(self) -> float:
        """Tokens a second of one text."""
        return 1 / sum(self.terms.values()) if self.reason is None else 0.0

    @property
    def bound(self) -> str:
        """What most of the time goes to."""
        return max(self.terms, key=lambda term: self.terms[term])


def forecasts(weights: Weights, hosts: Sequence[Host], memory_rate: float, wire: Wire) -> list[Forecast]:
    """The first machine alone, and every way to use all."""
    cached = weights.with_cache()
    found = [_pipeline(cached, hosts[:1], memory_rate, wire)]
    if len(hosts) > 1:
        found.append(_pipeline(cached, hosts, memory_rate, wire))
        if any(weights.experts):
            found.append(_experts(cached, hosts, memory_rate, wire))
        if any(kept.full for kept in weights.kept):
            found.append(_context(weights, hosts, memory_rate, wire))
        found.append(_tensor(weights, hosts, memory_rate, wire))
    return found


def _missed(host: Host, dense: int, experts: int) -> float:
    """The share of some experts that a machine has no memory for beside its dense weights."""
    return 0.0 if not experts else max(0.0, 1 - max(0, host.room - dense) / experts)


def _refused(weights: Weights, host: Host, dense: int, missed: float) -> str | None:
    if dense > host.room:
        return f"{dense / 1e9:.1f} GB that every token reads do not fit into {USED:.0%} of {host.memory_nbytes / 1e9:.1f} GB"
    return (
        "its experts do not fit, and are not packed: 'auraflux pack' lets them stay on disk"
        if missed and not weights.packed
        else None
    )


def _pipeline(weights: Weights, hosts: Sequence[Host], memory_rate: float, wire: Wire) -> Forecast:
    way = "one machine" if len(hosts) == 1 else f"{PIPELINE}={len(hosts)}"
    if len(hosts) > len(weights.dense):
        return Forecast(way, [], {"memory": 0.0}, f"the model has {len(weights.dense)} layers")
    parts = split(weights.sizes, [host.room for host in hosts])
    memory = disk = 0.0
    for host, held in zip(hosts, parts, strict=True):
        first = held.start == 0
        dense = sum(weights.dense[n] for n in held) + (weights.ends if first else 0)
        experts = sum(weights.experts[n] for n in held)
        missed = _missed(host, dense, experts)
        if (reason := _refused(weights, host, dense, missed)) is not None:
            return Forecast(way, [weights.sizes.of(each) for each in parts], {"memory": 0.0}, reason)
        read = dense - (weights.ends - weights.head if first else 0) + experts * weights.active
        memory += read / memory_rate
        disk += experts * weights.active * missed / host.disk_rate
    crossings = len(hosts) if len(hosts) > 1 else 0
    terms = {"memory": memory, "disk": disk, "network": crossings * wire.seconds(4 * weights.hidden)}
    return Forecast(way, [weights.sizes.of(held) for held in parts], terms)


def _experts(weights: Weights, hosts: Sequence[Host], memory_rate: float, wire: Wire) -> Forecast:
    """The faster of two: each disk has its own experts, or those that nobody holds are dealt out evenly."""
    count, k = len(hosts), weights.chosen
    dense, experts = sum(weights.dense) + weights.ends, sum(weights.experts) // count
    mixtures, row = sum(1 for nbytes in weights.experts if nbytes), 4 * weights.hidden
    missed = max(_missed(host, dense, experts) for host in hosts)
    found = []
    for even in (True, False):
        network = mixtures * _meeting(wire, count, row * -(-k // count) if even else row)
        each = _alike(EXPERTS, weights, hosts, memory_rate, dense, experts, network)
        if each.reason is None and missed:
            each.terms["disk"] *= slowest(k, missed, count, even) * count / (k * missed)
            each = replace(each, options="" if even else "--expert-balance off")
        found.append(each)
    # where nothing is read there is nothing to balance
    return max(found, key=lambda each: each.rate) if missed else found[1]


def slowest(k: int, missed: float, count: int, even: bool) -> float:
    """How many of a token's k experts the disk reads that reads most, where each is missed with such a probability.

    even  they are dealt out evenly to so many disks; otherwise each belongs to one of them
    """
    total = 0.0
    for reads in range(k + 1):
        most = -(-reads // count) if even else _largest_share(reads, count)
        total += comb(k, reads) * missed**reads * (1 - missed) ** (k - reads) * most
    return total


def _largest_share(things: int, count: int) -> float:
    """The mean of the largest share where chance deals things out to so many."""
    mean = 0.0
    for most in range(things):
        # ways to deal, over all that there are, in which nobody has more than `most`: by the generating function of shares
        ways = [1.0] + [0.0] * things
        for _ in range(count):
            ways = [sum(ways[n - i] / factorial(i) for i in range(min(n, most) + 1)) for n in range(things + 1)]
        mean += 1 - ways[things] * factorial(things) / count**things
    return mean


def _context(weights: Weights, hosts: Sequence[Host], memory_rate: float, wire: Wire) -> Forecast:
    count = len(hosts)
    kept = sum(-(-each.nbytes // count) if each.full else each.nbytes for each in weights.kept)
    network = sum(_meeting(wire, count, each.sums) for each in weights.kept if each.full)
    dense = sum(weights.dense) + weights.ends + kept
    return _alike(CONTEXT, weights, hosts, memory_rate, dense, sum(weights.experts), network)


def _tensor(weights: Weights, hosts: Sequence[Host], memory_rate: float, wire: Wire) -> Forecast:
    count = len(hosts)
    few = f"a layer has {weights.heads} heads of keys" if weights.heads < count else None
    if (reason := weights.unsliced or few) is not None:
        return Forecast(f"{TENSOR}={count}", [], {"memory": 0.0}, reason)
    kept = sum(-(-each.nbytes // count) if each.by_head else each.nbytes for each in weights.kept)
    dense = sum(weights.dense) // count + weights.ends + kept
    network = 2 * len(weights.dense) * _meeting(wire, count, 4 * weights.hidden)
    return _alike(TENSOR, weights, hosts, memory_rate, dense, sum(weights.experts) // count, network)


def _meeting(wire: Wire, count: int, nbytes: int) -> float:
    """How long it takes until all ranks have what each has found: they send at the same time, one row after the other."""
    return wire.latency_s + (count - 1) * (wire.seconds(nbytes) - wire.latency_s)


def _alike(
    mode: str, weights: Weights, hosts: Sequence[Host], memory_rate: float, dense: int, experts: int, network: float
) -> Forecast:
    """How ranks do that all have as much, and take every step together; the first scores tokens too."""
    way, parts, times = f"{mode}={len(hosts)}", [dense + experts] * len(hosts), []
    for host in hosts:
        missed = _missed(host, dense, experts)
        if (reason := _refused(weights, host, dense, missed)) is not None:
            return Forecast(way, parts, {"memory": 0.0}, reason)
        times.append(experts * weights.active * missed / host.disk_rate)
    read = dense - (weights.ends - weights.head) + experts * weights.active
    return Forecast(way, parts, {"memory": read / memory_rate, "disk": max(times), "network": network})
