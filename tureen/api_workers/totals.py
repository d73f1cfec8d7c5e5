"""Adds up what several fronts count, as if they were one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.samples import Sample as MetricSample

from tureen.api_workers.wire import Sample
from tureen.metrics import Metrics

SUMMED = ("counter", "histogram")
"""Kinds of series that are added up. The others tell of the engine, which the owner asks."""

CREATED = "_created"


def samples_of(metrics: Metrics) -> list[Sample]:
    """Returns what a front has counted."""
    return [
        (sample.name, dict(sample.labels), sample.value)
        for family in metrics.families()
        if family.type in SUMMED
        for sample in family.samples
        if not sample.name.endswith(CREATED)
    ]


class Totals:
    """The series of the owner, and what the others count added to them."""

    def __init__(self, own: Metrics, others: Iterable[Sequence[Sample]]) -> None:
        self._own = own
        self._sums: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for samples in others:
            for name, labels, value in samples:
                sums, key = self._sums.setdefault(name, {}), tuple(sorted(labels.items()))
                sums[key] = sums.get(key, 0.0) + value

    def families(self) -> Iterator[Metric]:
        """Yields all series, grouped by name."""
        for family in self._own.families():
            if family.type in SUMMED:
                family.samples = [*self._summed(family)]
            yield family

    def _summed(self, family: Metric) -> Iterator[MetricSample]:
        names = dict.fromkeys((f"{family.name}_total", *(sample.name for sample in family.samples)))
        left = {name: dict(self._sums.get(name, {})) for name in names}
        for sample in family.samples:
            more = left[sample.name].pop(tuple(sorted(sample.labels.items())), 0.0)
            yield sample._replace(value=sample.value + more)
        for name, sums in left.items():
            for key, value in sums.items():
                yield MetricSample(name, dict(key), value)


def added(first: Sequence[Sample], second: Sequence[Sample]) -> list[Sample]:
    """Returns the sums of two lists of samples."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for name, labels, value in (*first, *second):
        key = name, tuple(sorted(labels.items()))
        sums[key] = sums.get(key, 0.0) + value
    return [(name, dict(labels), value) for (name, labels), value in sums.items()]
