"""The alerts and the dashboard ask for series that a server has, in expressions that Prometheus understands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from app_under_test import App

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
PROMTOOL = shutil.which("promtool")
SERIES = re.compile(r"\bsglang:\w+")
VARIABLE = re.compile(r"\$__rate_interval")


def alerts() -> list[dict]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict:
    return json.loads((MONITORING / "dashboard.json").read_text())


def expressions() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [rule["expr"] for rule in alerts()] + panels


@pytest.fixture(scope="module")
def series() -> set[str]:
    """Names of the series of a server that has answered a request."""
    with App() as app:
        app.generate(text="Hi", sampling_params={"max_new_tokens": 2})
        app.request("POST", "/v1/chat/completions", json={"model": "default", "messages": [{}], "store": True})
        lines = app.request("GET", "/metrics").text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")} | {
        line.split()[2] + ("_total" if line.split()[3] == "counter" else "")
        for line in lines
        if line.startswith("# TYPE") and not line.split()[2].endswith("_total")
    }


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_is_promql_over_series_that_the_server_has(expression, series):
    promql_parser.parse(VARIABLE.sub("1m", expression))
    names = set(SERIES.findall(expression))
    assert names <= series
    assert names or "up{" in expression


def test_an_expression_that_names_no_series_of_ours_is_seen(series):
    assert "sglang:num_running_requests" not in series
    with pytest.raises(ValueError):
        promql_parser.parse("sum(rate(x[5m])")


def test_every_alert_says_what_it_is_and_what_to_do():
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) >= 8
    for rule in alerts():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_panels_of_the_dashboard_do_not_overlap_and_each_says_what_it_shows():
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert all(panel["title"] and panel["description"].endswith(".") for panel in dashboard()["panels"])
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_prometheus_loads_the_alerts_and_asks_for_metrics():
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert [(MONITORING / name).is_file() for name in config["rule_files"]] == [True]
    assert config["scrape_configs"][0].get("metrics_path", "/metrics") == "/metrics"
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert {job for rule in alerts() for job in re.findall(r'job="(\w+)"', rule["expr"])} <= jobs


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool on this machine")
def test_promtool_finds_no_fault():
    subprocess.run([PROMTOOL, "check", "config", MONITORING / "prometheus.yml"], check=True)
