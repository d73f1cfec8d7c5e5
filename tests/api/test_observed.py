"""What the operator sees: metrics equal what the clients got, logs tell nothing of what they said."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
import time
from functools import partial
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from app_under_test import App
from fake_engine import make_engine
from served_app import ServedApp
from timeouts import until
from wire import all_told, told

from tureen.admin import reporter
from tureen.admin.reporter import report_forever
from tureen.log import LOGGER_NAME, RateLimit, get_logger, set_up_logging

DASHBOARD = [
    "num_running_reqs",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
    "num_queue_reqs",
    "num_grammar_queue_reqs",
    "cache_hit_rate",
    "spec_accept_length",
    "max_total_num_tokens",
    "utilization",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
]
HISTOGRAMS = ["time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"]
SECRET = "xyzzy-plugh-secret"


def test_the_names_that_sglang_s_dashboard_reads_are_there_from_the_start():
    with App() as app:
        text = app.request("GET", "/metrics").text
        for name in DASHBOARD:
            assert f'sglang:{name}{{model_name="fake-model"}}' in text
        for name in HISTOGRAMS:
            for part in ("_sum", "_count"):
                assert f'sglang:{name}{part}{{model_name="fake-model"}}' in text
            assert f'sglang:{name}_bucket{{le="+Inf",model_name="fake-model"}}' in text
        assert 'sglang:num_requests_total{finish_reason="stop",model_name="fake-model"} 0.0' in text
        assert app.request("GET", "/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_totals_equal_what_the_clients_got():
    with App() as app:
        answers = []
        for i in range(10):
            answers.append(app.generate(text=f"say:{'long ' * i}"))
            answers.append(app.events(text="a shared prompt of two pages or more", rid=f"r{i}")[-1])
        answers += app.generate(text=["p", "q"], sampling_params={"n": 3, "max_new_tokens": 5})
        assert app.post(text="say:a\x01b").status_code == 500
        app.error(text="")
        metas = [answer["meta_info"] for answer in answers]
        found = app.metrics()
        assert found["prompt_tokens_total"] == sum(meta["prompt_tokens"] for meta in metas) + len("say:a\x01b")
        assert found["generation_tokens_total"] - 2 == sum(meta["completion_tokens"] for meta in metas)
        assert found["cached_tokens_total"] == sum(meta["cached_tokens"] for meta in metas) > 0
        finishes = [meta["finish_reason"]["type"] for meta in metas]
        for finish in ("stop", "length", "abort"):
            assert found[f"num_requests_total[{finish}]"] == finishes.count(finish)
        assert found["num_requests_total[error]"] == 1
        assert found["e2e_request_latency_seconds_count"] == len(answers) + 1
        assert found["time_to_first_token_seconds_count"] == len(answers) + 1
        assert found["generation_tokens_histogram_sum"] == found["generation_tokens_total"]
        assert found["e2e_request_latency_seconds_sum"] >= sum(meta["e2e_latency"] for meta in metas) * 0.9
        assert found["http_responses_total[400]"] == 1
        assert found["http_responses_total[500]"] == 1


def test_a_request_that_asks_for_it_does_not_count():
    with App() as app:
        app.generate(text="say:a", log_metrics=False)
        app.request("GET", "/health_generate")
        found = app.metrics()
        for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_total[stop]"):
            assert found[name] == 0
        for name in HISTOGRAMS:
            assert found[f"{name}_count"] == 0


def test_gauges_show_what_runs_and_return_to_zero():
    with App(factory=partial(make_engine, step_s=0.1)) as app:

        async def scenario():
            body = {"text": ["abc"] * 20, "sampling_params": {"max_new_tokens": 240}}
            task = asyncio.create_task(app.http.post("/generate", json=body))
            await until(lambda: app.client.stats.num_running >= 16)
            during = (await app.http.get("/metrics")).text
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return during

        during = app.run(scenario())
        assert 'sglang:num_running_reqs{model_name="fake-model"} 16.0' in during
        assert 'sglang:num_queue_reqs{model_name="fake-model"} 4.0' in during
        assert 'sglang:utilization{model_name="fake-model"} 1.0' in during
        app.check_idle()
        found = app.metrics()
        for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "utilization"):
            assert found[name] == 0
        assert found["num_aborted_requests_total"] == 20


def test_the_use_of_window_pages_is_measured_apart(monkeypatch):
    with App() as app:
        assert app.metrics()["swa_token_usage"] == 0
        stats = msgspec.structs.replace(app.client.stats, num_used_window_pages=3, num_window_pages=4)
        monkeypatch.setattr(type(app.client), "stats", stats)
        assert app.metrics()["swa_token_usage"] == 0.75
    assert reporter.line(stats, stats, 1.0, 0.0).endswith("KV use 0%, of window pages 75%")


def test_rates_are_measured_each_interval_and_return_to_zero(caplog, monkeypatch):
    """The reporter's clock is scripted: so much it shows after each interval."""
    shows, intervals = [0.0], asyncio.Queue()
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: shows[-1]))
    monkeypatch.setattr(reporter, "asyncio", SimpleNamespace(sleep=lambda _: intervals.get()))

    async def rate(app: App, shown_s: float) -> float:
        shows.append(shown_s)
        intervals.put_nowait(None)
        await until(lambda: len(intervals._getters) == 1 and intervals.empty())
        found = (await app.http.get("/metrics")).text
        return float(re.search(r'sglang:gen_throughput\{model_name="fake-model"\} (\S+)', found)[1])

    async def scenario(app: App) -> list[float]:
        task = asyncio.create_task(report_forever(app.state.common, app.config.log_interval_s))
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 1500}}
        asked = asyncio.create_task(app.http.post("/generate", json=body))
        await until(lambda: app.client.stats.total_output_tokens >= 10, unless=asked)
        rates = [await rate(app, 0.5)]
        await asked
        await until(lambda: app.client.stats.total_output_tokens == 1500)
        rates += [await rate(app, 1.0), await rate(app, 3.0)]
        task.cancel()
        return rates

    with App(slow=True) as app, caplog.at_level(logging.INFO, logger=LOGGER_NAME):
        first, second, third = app.run(scenario(app))
    assert first >= 20
    assert (first + second, third) == (pytest.approx(3000), 0)
    lines = [record.getMessage() for record in caplog.records if record.name == "tureen.stats"]
    assert len(lines) == 2
    assert re.search(r"running 1, queued 0, in .* tok/s, out .* tok/s, cache hits 0%, KV use \d+%", lines[0])


def test_nothing_that_clients_choose_becomes_a_label():
    with App() as app:
        before = set(app.metrics())
        for index in range(30):
            app.generate(text="say:a", rid=f"rid{index}", cache_salt=f"salt{index}")
            app.post(f"/path{index}")
            app.error(text="a", **{f"field{index}": 1})
        new = set(app.metrics()) - before
        assert {re.sub(r"_(total|created)", "", name) for name in new} <= {
            "http_responses[200]",
            "http_responses[400]",
            "http_responses[404]",
        }


# ---- logs


@pytest.fixture
def log_to(monkeypatch):
    """Set up logging into a text buffer; put everything back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger(LOGGER_NAME)
    before = (root.handlers[:], root.level, ours.level, logging.raiseExceptions)
    written = io.StringIO()

    def set_up(level: str, log_format: str) -> io.StringIO:
        monkeypatch.setattr(sys, "stderr", written)
        set_up_logging(level, log_format)
        return written

    yield set_up
    root.handlers[:], logging.raiseExceptions = before[0], before[3]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.fixture
def moment(monkeypatch):
    """All lines of the log are of one moment for what bounds how many there are in a second."""
    stopped = SimpleNamespace(monotonic=lambda: 100.0, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr("tureen.log.time", stopped)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_clients_say_is_in_no_log_error_or_metric(log_to, log_format):
    written = log_to("debug", log_format)
    with ServedApp(slow=True, log_format=log_format, log_level="debug") as server:

        def post(**body):
            return httpx.post(f"{server.url}/generate", json=body)

        assert SECRET in post(text=f"say:{SECRET}").text
        assert SECRET in post(text=f"say:{SECRET}", stream=True).text
        answers = [
            post(text=f"say:{SECRET}\x01a"),
            post(text=SECRET, sampling_params={"max_new_tokens": 10**6}),
            post(text=[SECRET, ""]),
            post(text=SECRET, prompt=SECRET),
            post(text=SECRET * 500),
            post(text={SECRET: 1}),
            post(text=SECRET, deadline_ms=10),
            httpx.post(f"{server.url}/generate?q={SECRET}", content=f'{{"text":"{SECRET}"'),
            httpx.post(f"{server.url}/generate", content=SECRET.encode(), headers={"authorization": SECRET}),
            httpx.get(f"{server.url}/metrics"),
            httpx.get(f"{server.url}/server_info"),
        ]
        assert {400, 500} <= {answer.status_code for answer in answers}
        for answer in answers:
            assert SECRET not in answer.text
    assert "/generate" in written.getvalue()
    assert SECRET not in written.getvalue()


def test_a_rid_or_path_cannot_forge_log_lines(log_to):
    written = log_to("debug", "text")
    with App() as app:
        app.error(text="a", rid="x\nERROR forged")
        app.request("GET", "http://127.0.0.1/%0d%0aERROR%20forged")
        app.generate(text="say:a", rid="ok id")
    assert "ok id" in written.getvalue()
    assert "forged" not in written.getvalue()


def test_json_logs_are_one_object_a_line_also_with_tracebacks_and_from_libraries(log_to):
    written = log_to("info", "json")
    get_logger("part").info("two\nlines")
    try:
        raise ValueError("in a traceback")
    except ValueError:
        get_logger("part").exception("it failed")
    logging.getLogger("asyncio").error("from a library")
    logging.getLogger("another_package").info("too much detail")
    entries = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [entry["message"] for entry in entries] == ["two\nlines", "it failed", "from a library"]
    assert entries[0]["part"] == "part"
    assert entries[0]["level"] == "info"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entries[0]["time"])
    assert "in a traceback" in entries[1]["exception"]


def test_text_logs_show_time_level_and_part_without_colour_in_a_file(log_to):
    written = log_to("warning", "text")
    get_logger("part").warning("careful")
    get_logger("part").info("not this")
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING part: careful\n", written.getvalue())


def test_a_closed_log_stops_nothing(log_to):
    written = log_to("info", "text")
    written.close()
    with App() as app:
        assert app.generate(text="say:a")["text"] == "a"


@pytest.mark.usefixtures("moment")
def test_a_flood_of_bad_requests_does_not_flood_the_log(caplog):
    with App() as app, caplog.at_level(logging.INFO, logger=LOGGER_NAME):
        for _ in range(200):
            app.error(text="")
        num_lines = sum(" 400 " in record.getMessage() for record in caplog.records)
        assert 1 <= num_lines <= 60
        app.generate(text="say:a")
        assert " 200 " in caplog.records[-1].getMessage()


def test_a_rate_limit_tells_how_many_it_left_out(monkeypatch):
    now = 100.0
    monkeypatch.setattr("tureen.log.time.monotonic", lambda: now)
    limit = RateLimit(count=2, interval_s=1.0)
    assert [limit.admit() for _ in range(5)] == [0, 0, None, None, None]
    now = 101.5
    assert [limit.admit() for _ in range(3)] == [3, 0, None]


def test_every_answer_has_an_id_that_is_in_the_log(caplog):
    with App() as app, caplog.at_level(logging.INFO, logger=LOGGER_NAME):
        response = app.post(text="say:a")
        assert any(response.headers["x-request-id"] in record.getMessage() for record in caplog.records)
        assert app.post(text="").headers["x-request-id"] != response.headers["x-request-id"]


def test_health_checks_are_not_logged(caplog):
    with App() as app, caplog.at_level(logging.INFO, logger=LOGGER_NAME):
        caplog.clear()
        app.request("GET", "/health")
        app.request("GET", "/metrics")
        assert not caplog.records


@pytest.mark.usefixtures("moment")
def test_a_refusal_before_a_request_is_read_is_logged_and_counted_like_any_other(log_to):
    """Under the id that its client sees, with nothing that the client sent, and no flood of them."""
    written = log_to("info", "json")
    with App(log_format="json") as app:
        answers = all_told(app, [SECRET.encode() + b"\r\n\r\n"] * 30)
        answers.append(told(app, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 300))
        ids = [re.search(rb"x-request-id: (\w+)", answer)[1].decode() for answer in answers]
        assert app.metrics()["http_responses_total[431]"] == 1
        assert app.metrics()["http_responses_total[400]"] == 30
    messages = [json.loads(line)["message"] for line in written.getvalue().splitlines()]
    lines = [message for message in messages if "refused before it was parsed" in message]
    assert lines[0] == f"{ids[0]} refused before it was parsed: 400 invalid_http"
    assert 20 <= len(lines) < 31
    assert SECRET not in written.getvalue()


def test_a_refusal_in_the_middle_of_a_request_is_counted_once_and_logged_under_its_id(log_to):
    written = log_to("info", "json")
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with App(log_format="json") as app:
        answer = told(app, head + b"5\r\nhello\r\nnonsense\r\n")
        request_id = re.search(rb"x-request-id: (\w+)", answer)[1].decode()
        assert app.metrics()["http_responses_total[400]"] == 1
        assert "http_responses_total[499]" not in app.metrics()
    [line] = [line for line in written.getvalue().splitlines() if request_id in line]
    assert f"{request_id} POST /generate 400" in line


def test_a_log_of_json_has_the_figures_of_each_request(log_to):
    written = log_to("info", "json")
    with App() as app:
        answer = app.generate(text="abc", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
        app.request("GET", "/v1/models")
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    generated, listed = [line for line in lines if line["part"] == "http"]
    usage = {name: answer["meta_info"][name] for name in ("prompt_tokens", "cached_tokens")}
    assert {name: generated[name] for name in usage} == usage
    assert (generated["output_tokens"], generated["status"]) == (5, 200)
    assert 0 < generated["ttft_ms"] <= generated["duration_ms"]
    assert generated["tokens_per_s"] == pytest.approx(5e3 / generated["duration_ms"], rel=1e-2)
    assert "output_tokens" not in listed
