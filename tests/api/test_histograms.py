"""The server's histograms count like prometheus_client's own."""

from __future__ import annotations

import random

import prometheus_client
import pytest
from app_under_test import parse_metrics

from tureen.metrics import COUNTERS, HISTOGRAMS, Metrics, render


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets_sum_and_count_are_those_of_the_library_s_histogram(name):
    buckets, text = HISTOGRAMS[name]
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram(f"sglang:{name}", text, ["model_name"], registry=registry, buckets=buckets)
    ours = Metrics("m")
    dice = random.Random(5)
    for value in (0.0, *buckets, 1e9, *(dice.lognormvariate(0, 3) for _ in range(200))):
        theirs.labels("m").observe(value)
        ours.observe(name, value)
    expected = parse_metrics(prometheus_client.generate_latest(registry).decode())
    found = parse_metrics(render([ours]).decode())
    expected = {key: value for key, value in expected.items() if not key.endswith("_created")}
    assert len(expected) == len(buckets) + 3
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_every_series_has_a_help_of_its_own():
    metrics = Metrics("m")
    for name in COUNTERS:
        metrics.add(name, 1)
    text = render([metrics]).decode()
    helps = [line.split(" ", 3)[3] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helps) > len(COUNTERS)
    assert [one for one in helps if helps.count(one) > 1] == []
