"""Prometheus metrics: the names of vLLM, so that its dashboards work, after the prefix `auraflux:`.

Tokens are counted in plain lists and integers; the metric families are built when /metrics is scraped.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from auraflux.engine.request import RequestStats
from auraflux.serve.transport.link import Gauges

PREFIX = "auraflux:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
E2E_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class Histogram:
    """Counts of observed values per bucket."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative count at each bound, and the sum of all values."""
        found, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found, self._sum


class Tally:
    """Counters and histograms of finished and running answers. Only the event loop's thread updates them."""

    def __init__(self) -> None:
        self.ttft, self.inter_token = Histogram(TTFT_S), Histogram(INTER_TOKEN_S)
        self.e2e, self.queue = Histogram(E2E_S), Histogram(E2E_S)
        self.prompt_tokens = self.generation_tokens = 0
        # vLLM's reasons start at 0, so that dashboards can compute their rates
        self.reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    def ended(self, reason: str, total_s: float, stats: RequestStats | None) -> None:
        """Count an answer that has ended; a cancelled one has no statistics."""
        known = {"cancelled": "abort", "tool_calls": "stop"}.get(reason, reason)
        self.reasons[known] = self.reasons.get(known, 0) + 1
        self.e2e.observe(total_s)
        if stats is not None:
            self.queue.observe(stats.queue_s)


@dataclass(frozen=True)
class ModelMetrics:
    """Metrics of one model: its name, which is their label, the counts of its answers, and the state of its scheduler."""

    name: str
    tally: Tally
    gauges: Gauges


class Metrics(Collector):
    """The text that Prometheus scrapes.

    models  counts of each model
    more    returns metrics of the server
    """

    def __init__(self, models: Callable[[], Iterable[ModelMetrics]], more: Callable[[], Iterable[Metric]] = lambda: ()):
        self._models, self._more = models, more
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for model in self._models():
            for metric in _metrics_of(model):
                if metric.name in merged:
                    merged[metric.name].samples += metric.samples
                else:
                    merged[metric.name] = metric
        yield from merged.values()
        yield from self._more()


def _metrics_of(model: ModelMetrics) -> Iterator[Metric]:
    label, tally, now = [model.name], model.tally, model.gauges
    usage = now.pages_used / now.pages if now.pages else 0.0
    yield _gauge("num_requests_running", "Requests in the running batch.", now.running, label)
    yield _gauge("num_requests_waiting", "Requests in the queue.", now.waiting, label)
    yield _gauge("kv_cache_usage_perc", "Share of KV cache pages in use, from 0 to 1.", usage, label)
    yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prefix_queries, label)
    yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.prefix_hits, label)
    yield _counter("num_preemptions", "Requests preempted and computed again.", now.preemptions, label)
    yield _counter("prompt_tokens", "Prompt tokens.", tally.prompt_tokens, label)
    yield _counter("generation_tokens", "Generated tokens.", tally.generation_tokens, label)
    yield _reasons(tally, label)
    yield _histogram("time_to_first_token_seconds", "Time to first token (TTFT).", tally.ttft, label)
    yield _histogram("inter_token_latency_seconds", "Time between two tokens of a request (ITL).", tally.inter_token, label)
    yield _histogram("e2e_request_latency_seconds", "Time from arrival to the last token.", tally.e2e, label)
    yield _histogram("request_queue_time_seconds", "Time in the queue.", tally.queue, label)
    for name, about, value in (
        ("spec_decode_num_draft_tokens", "Draft tokens.", now.drafted),
        ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", now.accepted),
        ("expert_cache_hits", "Expert cache hits.", now.expert_hits),
        ("expert_reads", "Experts read from disk.", now.expert_reads),
        ("expert_read_bytes", "Bytes of experts read from disk.", now.expert_nbytes),
    ):
        if value is not None:
            yield _counter(name, about, value, label)


def _reasons(tally: Tally, label: list[str]) -> Metric:
    made = CounterMetricFamily(f"{PREFIX}request_success", "Finished requests.", labels=["model_name", "finished_reason"])
    for reason, count in tally.reasons.items():
        made.add_metric([*label, reason], count)
    return made


def merge_replicas(bodies: Mapping[str, bytes]) -> bytes:
    """Merge the metrics of several replicas; a label names each sample's replica."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in bodies.items():
        for line in text.decode().splitlines():
            if line.startswith("# HELP"):
                heads, samples = families.setdefault(line.split()[2], ([], []))
                fresh = not heads
            if not line.startswith("#"):
                samples.append(line.replace("{", f'{{replica="{replica}",', 1))
            elif fresh:
                heads.append(line)
    lines = [line for heads, samples in families.values() for line in (*heads, *samples)]
    return "".join(f"{line}\n" for line in lines).encode()


def _gauge(name: str, about: str, value: float, label: list[str]) -> Metric:
    made = GaugeMetricFamily(f"{PREFIX}{name}", about, labels=["model_name"])
    made.add_metric(label, value)
    return made


def _counter(name: str, about: str, value: float, label: list[str]) -> Metric:
    made = CounterMetricFamily(f"{PREFIX}{name}", about, labels=["model_name"])
    made.add_metric(label, value)
    return made


def _histogram(name: str, about: str, values: Histogram, label: list[str]) -> Metric:
    made = HistogramMetricFamily(f"{PREFIX}{name}", about, labels=["model_name"])
    buckets, total = values.buckets()
    made.add_metric(label, buckets, total)
    return made
