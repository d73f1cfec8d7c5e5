"""What /status shows: the figures of /metrics, each client's own requests, the shape of the cache and no text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from app_under_test import LOCAL, App, parse_metrics
from served_app import ServedApp
from timeouts import PATIENCE_S

from tureen.admin import live
from tureen.admin.reporter import sample
from tureen.cache.manager import CacheManager
from tureen.cache.summary import MOST_BRANCHES, summarise
from tureen.metrics import LATENCY_BUCKETS_S, NUM_SAMPLES, Histogram, History, Level, quantile

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SECRET = "xyzzy-plugh-secret"


def look(app: App, **how: Any) -> dict[str, Any]:
    response = app.request("GET", "/status/live", **how)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App() as running:
        yield running


def test_the_figures_are_those_of_metrics(app: App):
    app.generate(text="say:hello", sampling_params={"max_new_tokens": 9})
    app.generate(text="a" * 40, sampling_params={"max_new_tokens": 3})
    app.error(text="")
    shown = look(app)["models"][0]["figures"]
    told = {
        f"sglang:{name.replace('[', '{').replace(']', '}')}": value
        for name, value in parse_metrics(app.request("GET", "/metrics").text).items()
        if not name.partition("[")[0].endswith(("_bucket", "_created"))
    }
    values = {name.partition("{")[0]: [] for name in told}
    for name, value in told.items():
        values[name.partition("{")[0]].append(value)
    ours = {name: [] for name in values}
    for name, value in shown.items():
        ours[name.partition("{")[0]].append(value)
    values.pop("sglang:http_responses_total"), ours.pop("sglang:http_responses_total")  # a look is one itself
    assert {name: sorted(each) for name, each in ours.items()} == {name: sorted(each) for name, each in values.items()}
    assert shown["sglang:generation_tokens_total"] == 6 + 3  # with the end of the text
    assert shown['sglang:http_responses_total{status="400"}'] == 1


def test_browsers_get_a_page_without_a_key_and_others_json_with_one():
    with App(api_key="k") as app:
        page = app.request("GET", "/status", headers=HTML)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "script-src 'sha256-" in page.headers["content-security-policy"]
        assert "fake-model" not in page.text
        assert app.request("GET", "/status").status_code == 401
        assert app.request("GET", "/status/live", headers=HTML).status_code == 401
        key = {"authorization": "Bearer k"}
        assert app.request("GET", "/status", headers=key).json()["models"][0]["name"] == "fake-model"


@pytest.mark.parametrize("query", ["after=-1", "after=x", "after=", f"after={10**20}", "before=1"])
def test_a_wrong_query_is_refused_by_name(app: App, query):
    error = app.request("GET", f"/status/live?{query}").json()["error"]
    assert query.partition("=")[0] in error["message"]


def test_samples_are_of_the_time_in_between_and_no_more_than_ten_minutes(app: App):
    history = app.state.metrics.history
    sample(app.state)
    app.generate(text="b", sampling_params={"max_new_tokens": 7})
    sample(app.state)
    newest = history.samples[-1]
    assert newest.output_tokens_per_s > 0
    assert newest.itl_mean_s is not None
    assert newest.itl_mean_s > 0
    rows = look(app)["models"][0]["samples"]
    assert rows[-1] == list(newest)
    assert look(app, params={"after": newest.number})["models"][0]["samples"] == []


def test_a_history_has_rates_by_its_clock_and_keeps_so_many_samples():
    first, following = (Histogram(name, "", "m", LATENCY_BUCKETS_S) for name in "ab")
    history = History(first, following)
    for second in range(NUM_SAMPLES + 5):
        following.observe(0.02)
        history.take(Level(2.0 * second, 60 * second, 10 * second, 1, 2, 0.5))
    assert len(history.samples) == NUM_SAMPLES
    newest = history.samples[-1]
    assert (newest.output_tokens_per_s, newest.prompt_tokens_per_s) == (30.0, 5.0)
    assert newest.itl_mean_s == pytest.approx(0.02)
    assert (newest.ttft_mean_s, newest.ttft_p95_s) == (None, None)


def test_a_quantile_of_buckets_is_near_that_of_the_values():
    rng = random.Random(1)
    values = [rng.uniform(0, 10) for _ in range(5000)]
    bounds = tuple(step / 10 for step in range(1, 100))
    histogram = Histogram("a", "", "m", bounds)
    for value in values:
        histogram.observe(value)
    for share in (0.01, 0.5, 0.95):
        exact = sorted(values)[int(share * len(values))]
        assert quantile(histogram.observed().counts, bounds, share) == pytest.approx(exact, abs=0.1)
    assert quantile([0, 0, 4], (1.0, 2.0), 0.95) == 2.0  # beyond the last bound nothing is known


@pytest.fixture(scope="module")
def locked(tmp_path_factory) -> Iterator[ServedApp]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("ada KEY-ADA\nbob KEY-BOB\n")
    path.chmod(0o600)
    with ServedApp(slow=True, api_key_file=str(path), admin_api_key="ADMIN") as server:
        yield server


def test_a_client_sees_its_own_requests_and_an_operator_all_of_them_and_nobody_what_was_said(locked: ServedApp):
    body = {"text": f"{SECRET} " * 8, "sampling_params": {"max_new_tokens": 1500}, "stream": True}

    def seen(key: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"}
        response = httpx.get(f"{locked.url}/status/live", headers=headers, timeout=PATIENCE_S)
        assert response.status_code == 200
        assert SECRET not in response.text
        assert json.dumps([ord(char) for char in SECRET])[1:-1] not in response.text
        return response.json()

    headers = {"authorization": "Bearer KEY-ADA"}
    with httpx.stream("POST", f"{locked.url}/generate", json=body | {"rid": "mine"}, headers=headers) as stream:
        pieces = stream.iter_bytes()  # dropped, it would end the stream
        next(pieces)
        [own] = seen("KEY-ADA")["models"][0]["requests"]
        assert own["state"] == "writing"
        assert own["prompt_tokens"] == len(body["text"])
        assert "client" not in own
        other = seen("KEY-BOB")
        assert other["models"][0]["requests"] == []
        assert other["models"][0]["engines"][0]["branches"] is None
        assert other["models"][0]["figures"]["sglang:num_running_reqs"] == 1
        [told] = seen("ADMIN")["models"][0]["requests"]
        assert (told["client"], told["rid"]) == ("ada", "mine")
        assert told["age_s"] >= own["age_s"]
        live._told.clear()
        assert seen("ADMIN")["models"][0]["engines"][0]["branches"], "the prompt is cached"
    assert not seen("ADMIN")["models"][0]["requests"], "it is aborted"


def test_however_many_look_the_engine_is_asked_once(app: App, monkeypatch):
    asked = []
    call = app.client.call

    async def note(op: str, **args: Any) -> object:
        asked.append(op)
        return await call(op, **args)

    monkeypatch.setattr(app.client, "call", note)
    monkeypatch.setattr(live, "FRESH_S", PATIENCE_S)
    monkeypatch.setattr(live, "ANSWER_S", PATIENCE_S)
    live._told.clear()
    for _ in range(5):
        look(app)
    assert asked == ["overview"]


def test_an_engine_that_has_no_time_is_left_out_and_the_rest_is_there(app: App, monkeypatch):
    monkeypatch.setattr(live, "ANSWER_S", 0.0)
    live._told.clear()
    [model] = look(app)["models"]
    assert model["engines"][0]["branches"] is None
    assert model["figures"]


def test_a_caller_from_elsewhere_without_keys_does_not_see_the_cache(app: App):
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app.app, client=("10.1.2.3", 5555))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as http:
            return await http.get("/status/live")

    answer = app.run(ask()).json()
    assert answer["is_admin"] is False
    assert answer["models"][0]["engines"][0]["branches"] is None


# ---- the shape of the cache


def fill(cache: CacheManager, prompts: list[list[int]]) -> list[Any]:
    """Sequences with these prompts, all computed; they still run."""
    tables = []
    for prompt in prompts:
        nodes = cache.match(("", ""), prompt, len(prompt))
        table = cache.open(("", ""), nodes, len(prompt), headroom=0)
        cache.publish(table, prompt, len(prompt))
        tables.append(table)
    return tables


def test_what_prompts_have_in_common_stands_once_with_the_number_that_share_it():
    cache = CacheManager(100, 2)
    tables = fill(cache, [[1] * 8 + [2] * 4, [1] * 8 + [3] * 6, [1] * 8 + [3] * 6 + [4] * 2, [9] * 2])
    told = {(each.num_tokens, each.num_holders, each.num_children) for each in summarise(cache).branches}
    assert told == {(8, 3, 2), (4, 1, 0), (6, 2, 1), (2, 1, 0)}  # the last of the third and the fourth are alike
    branches = summarise(cache).branches
    assert branches[0].num_holders == 3  # what most share comes first
    for table in tables:
        cache.close(table)
    told = {(each.num_tokens, each.num_holders) for each in summarise(cache).branches}
    assert told == {(8, 0), (4, 0), (8, 0), (2, 0)}  # nobody runs: where nothing forks there is one branch


def test_every_branch_is_there_once_and_its_lengths_add_up_to_what_is_cached():
    draw, cache = random.Random(3), CacheManager(400, 2)
    prompts = [[draw.choice((1, 2)) for _ in range(2 * draw.randint(1, 5))] for _ in range(20)]
    fill(cache, prompts)
    summary = summarise(cache)
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(2, len(prompt) + 1, 2)}
    assert sum(branch.num_tokens for branch in summary.branches) == 2 * len(prefixes)
    assert summary.num_left_out == 0
    assert all(branch.parent < index for index, branch in enumerate(summary.branches))


def test_of_a_large_cache_so_many_branches_are_told_and_the_work_does_not_grow():
    from work import count_lines

    costs = []
    for number in (3000, 9000):
        cache = CacheManager(number, 2)
        fill(cache, [[index, index] for index in range(number)])
        summary = summarise(cache)
        assert len(summary.branches) == MOST_BRANCHES
        assert summary.num_left_out == number - MOST_BRANCHES
        costs.append(count_lines(lambda cache=cache: summarise(cache)))
    assert costs[1] <= 1.1 * costs[0]
    deep = CacheManager(9000, 2)
    fill(deep, [[1] * 16000])
    assert count_lines(lambda: summarise(deep)) < 50_000
