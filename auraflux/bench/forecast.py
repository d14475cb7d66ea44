"""What fits where when a model is divided among machines, and how fast a token would come, from sizes and speeds alone.

A token reads every weight it uses once, so that its time is the sum of what memory, disks and the network take for their
bytes. Nothing is computed for free here but arithmetic, which one token's weights keep waiting on any machine.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from auraflux.errors import SettingsError
from auraflux.models.config import experts_per_token, has_experts
from auraflux.run.ranks.parallel import EXPERTS, PIPELINE
from auraflux.run.ranks.split import LAYER, Sizes, split
from auraflux.run.ranks.wire import Wire
from auraflux.weights.expert_settings import parse_nbytes
from auraflux.weights.plan import KINDS
from auraflux.weights.stored import Checkpoint

USED = 0.8  # of a machine's memory, for weights; the rest is the system's and the cache's
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
class Weights:
    """Bytes of a model.

    dense    of each layer, without its experts
    experts  of each layer, all of them
    ends     of the embedding and the head
    head     of the head alone
    active   the share of a layer's experts that a token uses
    hidden   numbers of a row
    packed   experts may stay on disk
    """

    dense: list[int]
    experts: list[int]
    ends: int
    head: int
    active: float
    hidden: int
    packed: bool

    @property
    def sizes(self) -> Sizes:
        return Sizes([a + b for a, b in zip(self.dense, self.experts, strict=True)], self.ends)


def weights_of(checkpoint: Checkpoint, module: Any) -> Weights:
    """Read a checkpoint's sizes; none of its weights."""
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
    share = experts_per_token(checkpoint.config) / count if mixed else 1.0
    return Weights(dense, experts, ends, head, share, config.hidden, checkpoint.experts is not None)


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
    """

    way: str
    parts: list[int]
    terms: dict[str, float]
    reason: str | None = None

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
    found = [_pipeline(weights, hosts[:1], memory_rate, wire)]
    if len(hosts) > 1:
        found.append(_pipeline(weights, hosts, memory_rate, wire))
        if any(weights.experts):
            found.append(_experts(weights, hosts, memory_rate, wire))
    return found


def _missed(weights: Weights, host: Host, dense: int, experts: int) -> float:
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
        missed = _missed(weights, host, dense, experts)
        if (reason := _refused(weights, host, dense, missed)) is not None:
            return Forecast(way, [weights.sizes.of(each) for each in parts], {"memory": 0.0}, reason)
        read = dense - (weights.ends - weights.head if first else 0) + experts * weights.active
        memory += read / memory_rate
        disk += experts * weights.active * missed / host.disk_rate
    crossings = len(hosts) if len(hosts) > 1 else 0
    terms = {"memory": memory, "disk": disk, "network": crossings * wire.seconds(4 * weights.hidden)}
    return Forecast(way, [weights.sizes.of(held) for held in parts], terms)


def _experts(weights: Weights, hosts: Sequence[Host], memory_rate: float, wire: Wire) -> Forecast:
    way, count = f"{EXPERTS}={len(hosts)}", len(hosts)
    dense, experts = sum(weights.dense) + weights.ends, sum(weights.experts) // count
    parts, times = [dense + experts] * count, []
    for host in hosts:
        missed = _missed(weights, host, dense, experts)
        if (reason := _refused(weights, host, dense, missed)) is not None:
            return Forecast(way, parts, {"memory": 0.0}, reason)
        times.append(experts * weights.active * missed / host.disk_rate)
    read = dense - (weights.ends - weights.head) + experts * weights.active
    mixtures = sum(1 for nbytes in weights.experts if nbytes)
    each = wire.latency_s + (count - 1) * (wire.seconds(4 * weights.hidden) - wire.latency_s)
    return Forecast(way, parts, {"memory": read / memory_rate, "disk": max(times), "network": mixtures * each})
