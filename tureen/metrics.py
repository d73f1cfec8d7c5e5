"""Prometheus metrics, with SGLang's names so that its dashboards work. They count, in the front, what clients get.

Imports: nothing; prometheus_client.
Imported by: admin, api_workers, app, multi_model, offline, requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SAMPLE_S, NUM_SAMPLES = 2.0, 300
"""Seconds between two samples of a History, and how many it keeps: ten minutes."""
FINISHES = ("stop", "length", "abort", "error")

GAUGES = {
    "num_running_reqs": "Requests that the engine is computing.",
    "num_queue_reqs": "Requests that wait in the queue until a slot and KV pages are free.",
    "num_grammar_queue_reqs": "Requests whose schema, regex or grammar is still being compiled.",
    "num_used_tokens": "Tokens of KV cache held by running requests.",
    "token_usage": "Share of the KV cache held by running requests.",
    "swa_token_usage": "Share of the KV cache's window pages held by running requests; 0 without such pages.",
    "max_total_num_tokens": "Size of the KV cache in tokens.",
    "cache_hit_rate": "Share of prompt tokens that came from the prefix cache, over the last interval.",
    "gen_throughput": "Output tokens per second, over the last interval.",
    "spec_accept_length": "Output tokens of a request per decode step; 0 before the first guess.",
    "spec_saved_seconds": "Estimated time that speculative decoding saved since the start, less what it cost.",
    "num_batches": "Unfinished batches.",
    "utilization": "Running requests divided by --max-running-requests.",
    "kv_disk_bytes": "Bytes of KV pages in --kv-disk.",
    "engine_suspect": "1 while the engine is unresponsive or being replaced; otherwise 0.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests.",
    "generation_tokens": "Output tokens of finished requests.",
    "cached_tokens": "Prompt tokens of finished requests that came from the prefix cache.",
    "num_aborted_requests": "Requests that their client cancelled or left.",
    "num_retracted_requests": "Preemptions of running requests because no KV page was free.",
    "engine_replacements": "Engines that replaced one that crashed or did not respond.",
    "num_resumed_requests": "Requests that continued in another engine after theirs was lost.",
    "num_poison_requests": "Requests that were ended because they crash engines.",
    "forced_tokens": "Output tokens that a grammar left no choice about, so they were not decoded.",
    "spec_draft_tokens": "Draft tokens proposed by speculative decoding.",
    "spec_accept_tokens": "Draft tokens that were accepted.",
    "num_grammar": "Requests with a schema, regex or grammar.",
    "num_grammar_cache_hit": "Requests whose grammar was already compiled or being compiled.",
    "num_grammar_failed": "Grammars that were rejected or took too long to compile.",
    "num_grammar_timeout": "Grammars that took too long to compile.",
    "num_grammar_mismatch": "Finished outputs that do not match their schema, regex or grammar.",
    "num_grammar_unverified": "Constrained outputs whose final check timed out.",
    "num_neutralised_tokens": "Control tokens in chat messages that were treated as plain text.",
    "num_batch_lines": "Lines of batches that were answered.",
    "num_batch_lines_failed": "Lines of batches that were answered with an error.",
    "num_pictures": "Pictures and videos in prompts.",
    "num_pictures_encoded": "Pictures and videos that were encoded; the others were cached.",
    "kv_disk_saved_pages": "KV pages written to --kv-disk.",
    "kv_disk_loaded_pages": "KV pages read from --kv-disk instead of being computed.",
    "kv_disk_evicted_pages": "KV pages removed from --kv-disk to keep --kv-disk-size.",
    "kv_disk_lost_pages": "KV pages evicted from the KV cache before they were saved.",
    "kv_disk_damaged_pages": "Damaged KV pages on the disk, which were recomputed.",
    "kv_disk_failures": "Failed reads and writes of KV pages.",
    "grammar_compile_seconds": "Total time of all grammar compilations, in seconds.",
}
REPLICA_GAUGES = {
    "replica_up": "1 while the engine of the replica is healthy; otherwise 0.",
    "replica_running_reqs": "Running requests of the replica.",
    "replica_queue_reqs": "Requests that wait in the queue of the replica.",
    "replica_queued_tokens": "Tokens that the replica still has to compute.",
    "replica_replacements": "Engines of the replica that replaced one that crashed or did not respond.",
}
"""Gauges with the label `replica` beside `model_name`, where there are several engines."""
HISTOGRAMS = {
    "time_to_first_token_seconds": (LATENCY_BUCKETS_S, "Time from the arrival of a request to its first token."),
    "inter_token_latency_seconds": (LATENCY_BUCKETS_S, "Time between two tokens of a request."),
    "e2e_request_latency_seconds": (LATENCY_BUCKETS_S, "Time from the arrival of a request to its last token."),
    "prompt_tokens_histogram": (TOKEN_BUCKETS, "Prompt tokens per request."),
    "generation_tokens_histogram": (TOKEN_BUCKETS, "Output tokens per request."),
}


class Observed(NamedTuple):
    """The content of a histogram: how many values fell into each bucket, the last without a bound, and their sum."""

    counts: tuple[int, ...]
    sum: float


class Histogram(Collector):
    """One series of a histogram. One thread counts without locks, because every token of every stream is observed."""

    def __init__(self, name: str, text: str, model_name: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def observed(self) -> Observed:
        """Returns what was observed so far."""
        return Observed(tuple(self._counts), self._sum)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*map(str, map(float, self._buckets)), "+Inf"]
        family.add_metric([self._model_name], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class Sample(NamedTuple):
    """The figures of one interval; None: nothing was observed in it."""

    number: int  # rises by one from sample to sample
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    num_running: int
    num_waiting: int
    kv_share: float  # of the pages, those that running requests hold
    ttft_mean_s: float | None
    ttft_p95_s: float | None
    itl_mean_s: float | None
    itl_p95_s: float | None


class Level(NamedTuple):
    """The figures of one engine at a time. Totals only grow."""

    now_s: float
    output_tokens: int
    prompt_tokens: int
    num_running: int
    num_waiting: int
    kv_share: float


class History:
    """The last ten minutes, a sample every SAMPLE_S seconds. It takes at most NUM_SAMPLES samples of room."""

    def __init__(self, first_token: Histogram, next_token: Histogram) -> None:
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._histograms = (first_token, next_token)
        self._observed = (first_token.observed(), next_token.observed())
        self._before: Level | None = None
        self._number = 0

    def take(self, now: Level) -> None:
        """Adds the sample of the time since the last call; the first call only begins."""
        before, self._before = self._before, now
        observed = tuple(histogram.observed() for histogram in self._histograms)
        times = [_mean_and_p95(*pair) for pair in zip(self._observed, observed, strict=True)]
        self._observed = (observed[0], observed[1])
        if before is None or now.now_s <= before.now_s:
            return
        seconds = now.now_s - before.now_s
        self._number += 1
        self.samples.append(
            Sample(
                self._number,
                (now.output_tokens - before.output_tokens) / seconds,
                (now.prompt_tokens - before.prompt_tokens) / seconds,
                now.num_running,
                now.num_waiting,
                now.kv_share,
                *times[0],
                *times[1],
            )
        )


def _mean_and_p95(before: Observed, now: Observed) -> tuple[float | None, float | None]:
    """Returns mean and 95th percentile of the seconds that were observed in between; None where there were none."""
    counts = [new - old for old, new in zip(before.counts, now.counts, strict=True)]
    total = sum(counts)
    if not total:
        return None, None
    return (now.sum - before.sum) / total, quantile(counts, LATENCY_BUCKETS_S, 0.95)


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """Estimates a quantile of the values in a histogram's buckets, at least one, as Prometheus' `histogram_quantile`
    does: evenly within a bucket, and at most the last bound.

    Source: https://prometheus.io/docs/prometheus/latest/querying/functions/#histogram_quantile
    """
    rank, below = share * sum(counts), 0
    for count, low, high in zip(counts, (0.0, *bounds), (*bounds, math.inf), strict=True):
        if count and below + count >= rank:
            return low if high == math.inf else low + (high - low) * (rank - below) / count
        below += count
    return bounds[-1]


class Metrics:
    """All series of one server. Their one label is `model_name`, besides `finish_reason`, `status` and `field`."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._series: dict[str, MetricWrapperBase] = {}
        self._totals: dict[str, float] = {}
        self._levels: dict[str, float] = {}
        self._of_replicas: dict[str, Gauge] = {}
        labels = ["model_name"]
        for name, text in GAUGES.items():
            self._series[name] = Gauge(f"sglang:{name}", text, labels, registry=self._registry)
        for name, text in COUNTERS.items():
            self._series[name] = Counter(f"sglang:{name}", text, labels, registry=self._registry)
        self._histograms = {
            name: Histogram(f"sglang:{name}", text, model_name, buckets) for name, (buckets, text) in HISTOGRAMS.items()
        }
        for histogram in self._histograms.values():
            self._registry.register(histogram)
        self.history = History(
            self._histograms["time_to_first_token_seconds"], self._histograms["inter_token_latency_seconds"]
        )
        self._requests = Counter(
            "sglang:num_requests", "Finished requests.", [*labels, "finish_reason"], registry=self._registry
        )
        self._responses = Counter(
            "sglang:http_responses", "HTTP responses.", [*labels, "status"], registry=self._registry
        )
        self._ignored = Counter(
            "sglang:num_ignored_fields",
            "Requests with a field that was accepted without effect; `unknown`: fields that no API has.",
            [*labels, "field"],
            registry=self._registry,
        )
        for finish in FINISHES:
            self._requests.labels(model_name, finish)
        self._labelled = {name: series.labels(model_name) for name, series in self._series.items()}

    def set(self, name: str, value: float) -> None:
        """Sets a gauge."""
        gauge = self._labelled[name]
        assert isinstance(gauge, Gauge)
        gauge.set(value)
        self._levels[name] = value

    def set_of_replica(self, name: str, number: int, value: float) -> None:
        """Sets a gauge of one replica."""
        if name not in self._of_replicas:
            labels = ["model_name", "replica"]
            self._of_replicas[name] = Gauge(f"sglang:{name}", REPLICA_GAUGES[name], labels, registry=self._registry)
        self._of_replicas[name].labels(self._model_name, str(number)).set(value)

    def level(self, name: str) -> float:
        """Returns the value of a gauge."""
        return self._levels.get(name, 0.0)

    def add(self, name: str, amount: float = 1) -> None:
        """Adds to a counter."""
        counter = self._labelled[name]
        assert isinstance(counter, Counter)
        counter.inc(amount)

    def raise_to(self, name: str, total: float) -> None:
        """Adds to a counter what it lacks of a total that somebody else counts."""
        self.add(name, max(0.0, total - self._totals.get(name, 0.0)))
        self._totals[name] = max(total, self._totals.get(name, 0.0))

    def histogram(self, name: str) -> Histogram:
        return self._histograms[name]

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram, in its unit: seconds or tokens."""
        self._histograms[name].observe(value)

    def count_finish(self, finish: str) -> None:
        self._requests.labels(self._model_name, finish).inc()

    def count_response(self, status: int) -> None:
        self._responses.labels(self._model_name, str(status)).inc()

    def count_ignored(self, field: str) -> None:
        """Counts a request with a field that had no effect. `field`: a declared name, or `unknown`."""
        self._ignored.labels(self._model_name, field).inc()

    def figures(self) -> dict[str, float]:
        """Returns the values of all series but buckets, by their names with all labels but the model's."""
        values: dict[str, float] = {}
        for family in self.families():
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    labels = (f'{name}="{value}"' for name, value in sample.labels.items() if name != "model_name")
                    shown = ",".join(labels)
                    values[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
        return values

    def families(self) -> Iterator[Metric]:
        """Yield all series, grouped by name; not the times at which they were created: the text format would repeat
        each series' help for them."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Series(Protocol):
    """Series of metrics, from one place or several."""

    def families(self) -> Iterator[Metric]:
        """Yields them, grouped by name."""


class _Merged:
    """The series of several models: those of one name stand together, as the text format asks."""

    def __init__(self, sources: Iterable[Series]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for metrics in self._sources:
            for family in metrics.families():
                if family.name in merged:
                    merged[family.name].samples += family.samples
                else:
                    merged[family.name] = family
        return merged.values()


def render(sources: Sequence[Series]) -> bytes:
    """Returns all series of the models in the Prometheus text format, version 0.0.4."""
    return generate_latest(cast(CollectorRegistry, _Merged(sources)))
