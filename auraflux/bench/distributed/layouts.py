"""The parallel layouts of a forecast, single and combined: bytes over bandwidths."""

from collections.abc import Sequence
from dataclasses import replace
from math import comb, factorial

from auraflux.bench.distributed.forecast import USED, Forecast, Host, Weights
from auraflux.distributed.comm.slow_link import SimulatedLink
from auraflux.distributed.layer_split import split_layers
from auraflux.distributed.parallel import CONTEXT, EXPERTS, PIPELINE, TENSOR


def forecasts(weights: Weights, hosts: Sequence[Host], link: SimulatedLink) -> list[Forecast]:
    """Forecast the first machine alone, and every layout that uses all machines."""
    cached = weights.with_cache()
    found = [_pipeline(cached, hosts[:1], link)]
    if len(hosts) > 1:
        found.append(_pipeline(cached, hosts, link))
        if any(weights.experts):
            found.append(_experts(cached, hosts, link))
        if any(each.full for each in weights.kv):
            found.append(_context(weights, hosts, link))
        found.append(_tensor(weights, hosts, link))
        found += _combinations(weights, hosts, link)
    return found


def _combinations(weights: Weights, hosts: Sequence[Host], link: SimulatedLink) -> list[Forecast]:
    """Forecast expert with context parallelism, and each within a pipeline of the fastest number of stages."""
    mixed, long = any(weights.experts), any(each.full for each in weights.kv)
    speeds = hosts, link
    found = [_experts_and_context(weights, *speeds)] if mixed and long else []
    stages = [n for n in range(2, len(hosts)) if len(hosts) % n == 0 and n <= len(weights.dense)]
    for inner in [EXPERTS] * mixed + [CONTEXT] * long:
        ways = [_staged(inner, count, weights, *speeds) for count in stages]
        found += [max(ways, key=lambda each: each.rate)] if ways else []
    return found


def _experts_and_context(weights: Weights, hosts: Sequence[Host], link: SimulatedLink) -> Forecast:
    """Forecast ranks that each hold some experts and some pages of every sequence."""
    count = len(hosts)
    cached = [replace(each, nbytes=-(-each.nbytes // count)) if each.full else each for each in weights.kv]
    found = _experts(replace(weights, kv=tuple(cached)).with_cache(), hosts, link)
    if found.reason is None:
        found.terms["network"] += sum(_all_gather(link, count, each.sums) for each in weights.kv if each.full)
    return replace(found, way=f"{found.way},{CONTEXT}={count}")


def _staged(inner: str, count: int, weights: Weights, hosts: Sequence[Host], link: SimulatedLink) -> Forecast:
    """Forecast a pipeline of `count` stages, each of which is expert or context parallel."""
    width = len(hosts) // count
    way = f"{PIPELINE}={count},{inner}={width}"
    groups = [hosts[at : at + width] for at in range(0, len(hosts), width)]
    held = split_layers(weights.with_cache().sizes, [min(host.room for host in group) for group in groups])
    found = []
    for some, group in zip(held, groups, strict=True):
        part = weights.stage(some)
        if inner == EXPERTS:
            found.append(_experts(part.with_cache(), group, link))
        else:
            found.append(_context(part, group, link))
    parts = [nbytes for each in found for nbytes in each.parts]
    if (reason := next((each.reason for each in found if each.reason is not None), None)) is not None:
        return Forecast(way, parts, {"memory": 0.0}, reason)
    terms = {term: sum(each.terms[term] for each in found) for term in found[0].terms}
    terms["network"] += count * link.seconds(4 * weights.hidden)
    return Forecast(way, parts, terms, options=next((each.options for each in found if each.options), ""))


def _miss_rate(host: Host, dense: int, experts: int) -> float:
    """Return the share of expert reads that miss the expert cache, after dense weights have taken their memory."""
    return 0.0 if not experts else max(0.0, 1 - max(0, host.room - dense) / experts)


def _refused(weights: Weights, host: Host, dense: int, missed: float) -> str | None:
    if dense > host.room:
        return f"{dense / 1e9:.1f} GB that every token reads do not fit into {USED:.0%} of {host.memory_nbytes / 1e9:.1f} GB"
    return (
        "its experts do not fit, and are not packed: 'auraflux pack' lets them stay on disk"
        if missed and not weights.packed
        else None
    )


def _pipeline(weights: Weights, hosts: Sequence[Host], link: SimulatedLink) -> Forecast:
    way = "one machine" if len(hosts) == 1 else f"{PIPELINE}={len(hosts)}"
    if len(hosts) > len(weights.dense):
        return Forecast(way, [], {"memory": 0.0}, f"the model has {len(weights.dense)} layers")
    parts = split_layers(weights.sizes, [host.room for host in hosts])
    memory = disk = 0.0
    for host, held in zip(hosts, parts, strict=True):
        first = held.start == 0
        dense = sum(weights.dense[n] for n in held) + (weights.ends if first else 0)
        experts = sum(weights.experts[n] for n in held)
        missed = _miss_rate(host, dense, experts)
        if (reason := _refused(weights, host, dense, missed)) is not None:
            return Forecast(way, [weights.sizes.of(each) for each in parts], {"memory": 0.0}, reason)
        read = dense - (weights.ends - weights.head if first else 0) + experts * weights.active
        memory += read / host.memory_rate
        disk += experts * weights.active * missed / host.disk_rate
    crossings = len(hosts) if len(hosts) > 1 else 0
    terms = {"memory": memory, "disk": disk, "network": crossings * link.seconds(4 * weights.hidden)}
    return Forecast(way, [weights.sizes.of(held) for held in parts], terms)


def _experts(weights: Weights, hosts: Sequence[Host], link: SimulatedLink) -> Forecast:
    """Forecast the faster of two: each disk serves its own experts, or cache misses are balanced evenly."""
    count, k = len(hosts), weights.chosen
    dense, experts = sum(weights.dense) + weights.ends, sum(weights.experts) // count
    mixtures, row = sum(1 for nbytes in weights.experts if nbytes), 4 * weights.hidden
    missed = max(_miss_rate(host, dense, experts) for host in hosts)
    found = []
    for even in (True, False):
        network = mixtures * _all_gather(link, count, row * -(-k // count) if even else row)
        each = _symmetric(EXPERTS, weights, hosts, dense, experts, network)
        _scale_to_slowest_disk(each, k, missed, count, even)
        found.append(each if even or not missed else replace(each, options="--expert-balance off"))
    # without cache misses there is nothing to balance
    return max(found, key=lambda each: each.rate) if missed else found[1]


def _scale_to_slowest_disk(found: Forecast, k: int, missed: float, count: int, even: bool) -> None:
    """Scale the disk time to the disk that reads most."""
    if found.reason is None and missed:
        found.terms["disk"] *= slowest_disk_reads(k, missed, count, even) * count / (k * missed)


def slowest_disk_reads(k: int, missed: float, count: int, even: bool) -> float:
    """Return the expected reads of the busiest of `count` disks for a token's k experts with miss rate `missed`.

    even  reads are balanced over the disks; otherwise each expert belongs to one disk
    """
    total = 0.0
    for reads in range(k + 1):
        most = -(-reads // count) if even else _mean_largest_share(reads, count)
        total += comb(k, reads) * missed**reads * (1 - missed) ** (k - reads) * most
    return total


def _mean_largest_share(things: int, count: int) -> float:
    """Return the mean of the largest bin where `things` fall into `count` bins at random."""
    mean = 0.0
    for most in range(things):
        # probability that no bin has more than `most`, by the exponential generating function
        ways = [1.0] + [0.0] * things
        for _ in range(count):
            ways = [sum(ways[n - i] / factorial(i) for i in range(min(n, most) + 1)) for n in range(things + 1)]
        mean += 1 - ways[things] * factorial(things) / count**things
    return mean


def _context(weights: Weights, hosts: Sequence[Host], link: SimulatedLink) -> Forecast:
    count = len(hosts)
    cached = sum(-(-each.nbytes // count) if each.full else each.nbytes for each in weights.kv)
    network = sum(_all_gather(link, count, each.sums) for each in weights.kv if each.full)
    dense = sum(weights.dense) + weights.ends + cached
    return _symmetric(CONTEXT, weights, hosts, dense, sum(weights.experts), network)


def _tensor(weights: Weights, hosts: Sequence[Host], link: SimulatedLink) -> Forecast:
    count = len(hosts)
    few = f"a layer has {weights.heads} heads of keys" if weights.heads < count else None
    if (reason := weights.unsliced or few) is not None:
        return Forecast(f"{TENSOR}={count}", [], {"memory": 0.0}, reason)
    cached = sum(-(-each.nbytes // count) if each.by_head else each.nbytes for each in weights.kv)
    dense = sum(weights.dense) // count + weights.ends + cached
    network = 2 * len(weights.dense) * _all_gather(link, count, 4 * weights.hidden)
    experts = sum(weights.experts) // count
    found = _symmetric(TENSOR, weights, hosts, dense, experts, network)
    # a file holds whole experts, of which each rank reads its own
    missed = max(_miss_rate(host, dense, experts) for host in hosts)
    _scale_to_slowest_disk(found, weights.chosen, missed, count, even=False)
    return found


def _all_gather(link: SimulatedLink, count: int, nbytes: int) -> float:
    """Return the seconds of an all-gather: ranks send at the same time, one row after another."""
    return link.latency_s + (count - 1) * (link.seconds(nbytes) - link.latency_s)


def _symmetric(mode: str, weights: Weights, hosts: Sequence[Host], dense: int, experts: int, network: float) -> Forecast:
    """Forecast ranks with equal shards that run every step together; the first computes logits too."""
    way, parts, times = f"{mode}={len(hosts)}", [dense + experts] * len(hosts), []
    for host in hosts:
        missed = _miss_rate(host, dense, experts)
        if (reason := _refused(weights, host, dense, missed)) is not None:
            return Forecast(way, parts, {"memory": 0.0}, reason)
        times.append(experts * weights.active * missed / host.disk_rate)
    read = dense - (weights.ends - weights.head) + experts * weights.active
    return Forecast(
        way, parts, {"memory": read / min(host.memory_rate for host in hosts), "disk": max(times), "network": network}
    )
