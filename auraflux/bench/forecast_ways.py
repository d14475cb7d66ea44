"""How every way to divide a model would do, and those that are combined: bytes over speeds."""

from collections.abc import Sequence
from dataclasses import replace
from math import comb, factorial

from auraflux.bench.forecast import USED, Forecast, Host, Weights
from auraflux.run.ranks.parallel import CONTEXT, EXPERTS, PIPELINE, TENSOR
from auraflux.run.ranks.split import split
from auraflux.run.ranks.wire import Wire


def forecasts(weights: Weights, hosts: Sequence[Host], wire: Wire) -> list[Forecast]:
    """The first machine alone, and every way to use all."""
    cached = weights.with_cache()
    found = [_pipeline(cached, hosts[:1], wire)]
    if len(hosts) > 1:
        found.append(_pipeline(cached, hosts, wire))
        if any(weights.experts):
            found.append(_experts(cached, hosts, wire))
        if any(kept.full for kept in weights.kept):
            found.append(_context(weights, hosts, wire))
        found.append(_tensor(weights, hosts, wire))
        found += _combinations(weights, hosts, wire)
    return found


def _combinations(weights: Weights, hosts: Sequence[Host], wire: Wire) -> list[Forecast]:
    """Experts and context of the same ranks, and each beside a pipeline with the number of stages that is fastest."""
    mixed, long = any(weights.experts), any(kept.full for kept in weights.kept)
    speeds = hosts, wire
    found = [_both(weights, *speeds)] if mixed and long else []
    stages = [n for n in range(2, len(hosts)) if len(hosts) % n == 0 and n <= len(weights.dense)]
    for inner in [EXPERTS] * mixed + [CONTEXT] * long:
        ways = [_staged(inner, count, weights, *speeds) for count in stages]
        found += [max(ways, key=lambda each: each.rate)] if ways else []
    return found


def _both(weights: Weights, hosts: Sequence[Host], wire: Wire) -> Forecast:
    """Each rank has some experts, and some pages of every text."""
    count = len(hosts)
    kept = [replace(each, nbytes=-(-each.nbytes // count)) if each.full else each for each in weights.kept]
    found = _experts(replace(weights, kept=tuple(kept)).with_cache(), hosts, wire)
    if found.reason is None:
        found.terms["network"] += sum(_meeting(wire, count, each.sums) for each in weights.kept if each.full)
    return replace(found, way=f"{found.way},{CONTEXT}={count}")


def _staged(inner: str, count: int, weights: Weights, hosts: Sequence[Host], wire: Wire) -> Forecast:
    """So many stages of a pipeline, whose machines divide their layers further."""
    width = len(hosts) // count
    way = f"{PIPELINE}={count},{inner}={width}"
    groups = [hosts[at : at + width] for at in range(0, len(hosts), width)]
    held = split(weights.with_cache().sizes, [min(host.room for host in group) for group in groups])
    found = []
    for some, group in zip(held, groups, strict=True):
        part = weights.stage(some)
        if inner == EXPERTS:
            found.append(_experts(part.with_cache(), group, wire))
        else:
            found.append(_context(part, group, wire))
    parts = [nbytes for each in found for nbytes in each.parts]
    if (reason := next((each.reason for each in found if each.reason is not None), None)) is not None:
        return Forecast(way, parts, {"memory": 0.0}, reason)
    terms = {term: sum(each.terms[term] for each in found) for term in found[0].terms}
    terms["network"] += count * wire.seconds(4 * weights.hidden)
    return Forecast(way, parts, terms, options=next((each.options for each in found if each.options), ""))


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


def _pipeline(weights: Weights, hosts: Sequence[Host], wire: Wire) -> Forecast:
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
        memory += read / host.memory_rate
        disk += experts * weights.active * missed / host.disk_rate
    crossings = len(hosts) if len(hosts) > 1 else 0
    terms = {"memory": memory, "disk": disk, "network": crossings * wire.seconds(4 * weights.hidden)}
    return Forecast(way, [weights.sizes.of(held) for held in parts], terms)


def _experts(weights: Weights, hosts: Sequence[Host], wire: Wire) -> Forecast:
    """The faster of two: each disk has its own experts, or those that nobody holds are dealt out evenly."""
    count, k = len(hosts), weights.chosen
    dense, experts = sum(weights.dense) + weights.ends, sum(weights.experts) // count
    mixtures, row = sum(1 for nbytes in weights.experts if nbytes), 4 * weights.hidden
    missed = max(_missed(host, dense, experts) for host in hosts)
    found = []
    for even in (True, False):
        network = mixtures * _meeting(wire, count, row * -(-k // count) if even else row)
        each = _alike(EXPERTS, weights, hosts, dense, experts, network)
        _wait_for_slowest(each, k, missed, count, even)
        found.append(each if even or not missed else replace(each, options="--expert-balance off"))
    # where nothing is read there is nothing to balance
    return max(found, key=lambda each: each.rate) if missed else found[1]


def _wait_for_slowest(found: Forecast, k: int, missed: float, count: int, even: bool) -> None:
    """Count what the disk takes that has most to read."""
    if found.reason is None and missed:
        found.terms["disk"] *= slowest(k, missed, count, even) * count / (k * missed)


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


def _context(weights: Weights, hosts: Sequence[Host], wire: Wire) -> Forecast:
    count = len(hosts)
    kept = sum(-(-each.nbytes // count) if each.full else each.nbytes for each in weights.kept)
    network = sum(_meeting(wire, count, each.sums) for each in weights.kept if each.full)
    dense = sum(weights.dense) + weights.ends + kept
    return _alike(CONTEXT, weights, hosts, dense, sum(weights.experts), network)


def _tensor(weights: Weights, hosts: Sequence[Host], wire: Wire) -> Forecast:
    count = len(hosts)
    few = f"a layer has {weights.heads} heads of keys" if weights.heads < count else None
    if (reason := weights.unsliced or few) is not None:
        return Forecast(f"{TENSOR}={count}", [], {"memory": 0.0}, reason)
    kept = sum(-(-each.nbytes // count) if each.by_head else each.nbytes for each in weights.kept)
    dense = sum(weights.dense) // count + weights.ends + kept
    network = 2 * len(weights.dense) * _meeting(wire, count, 4 * weights.hidden)
    experts = sum(weights.experts) // count
    found = _alike(TENSOR, weights, hosts, dense, experts, network)
    # a file has whole experts, of which each rank reads its own
    missed = max(_missed(host, dense, experts) for host in hosts)
    _wait_for_slowest(found, weights.chosen, missed, count, even=False)
    return found


def _meeting(wire: Wire, count: int, nbytes: int) -> float:
    """How long it takes until all ranks have what each has found: they send at the same time, one row after the other."""
    return wire.latency_s + (count - 1) * (wire.seconds(nbytes) - wire.latency_s)


def _alike(mode: str, weights: Weights, hosts: Sequence[Host], dense: int, experts: int, network: float) -> Forecast:
    """How ranks do that all have as much, and take every step together; the first scores tokens too."""
    way, parts, times = f"{mode}={len(hosts)}", [dense + experts] * len(hosts), []
    for host in hosts:
        missed = _missed(host, dense, experts)
        if (reason := _refused(weights, host, dense, missed)) is not None:
            return Forecast(way, parts, {"memory": 0.0}, reason)
        times.append(experts * weights.active * missed / host.disk_rate)
    read = dense - (weights.ends - weights.head) + experts * weights.active
    return Forecast(
        way, parts, {"memory": read / min(host.memory_rate for host in hosts), "disk": max(times), "network": network}
    )
