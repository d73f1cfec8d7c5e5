"""What clients and operators see of an engine that is lost and replaced."""

from __future__ import annotations

import asyncio

import pytest
from app_under_test import App, parse_events

from tureen.contract.types import EngineHealth


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_the_engine_is_told_so_and_the_others_see_nothing(stream):
    with App(slow=True) as app:

        async def scenario(*more):
            body = {"text": "abc", "sampling_params": {"max_new_tokens": 40, "sampling_seed": 3}, "stream": stream}
            running = [app.http.post("/generate", json=body) for _ in range(2)]
            others = [app.http.post("/generate", json=one) for one in more]
            return await asyncio.gather(*running, *others)

        def content(response):
            assert response.status_code == 200, response.text
            last = parse_events(response.text)[-1] if stream else response.json()
            return last["text"], last["output_ids"], last["meta_info"]["finish_reason"]

        alone = app.run(scenario())
        *others, killed = app.run(scenario({"text": "abc", "cache_salt": "die"}))
        assert list(map(content, others)) == list(map(content, alone))
        assert (killed.status_code, killed.json()["error"]["code"]) == (500, "poison")
        app.wait_until(lambda: app.client.health.state == "healthy")
        assert app.request("GET", "/health").status_code == 200
        metrics = app.metrics()
        assert metrics["engine_replacements_total"] >= 3
        assert metrics["num_poison_requests_total"] == 1
        assert metrics["engine_suspect"] == 0
        assert app.state.num_running == 0


@pytest.mark.parametrize(
    ("health", "code"),
    [
        (EngineHealth(state="suspect", reason="its process is stopped", retry_after_s=31), "engine_suspect"),
        (EngineHealth(state="replacing", reason="it was killed", retry_after_s=2), "engine_replacing"),
        (EngineHealth(state="down", reason="no memory", retry_after_s=30), "engine_dead"),
    ],
)
def test_health_and_metrics_say_how_the_engine_is_and_when_to_come_again(monkeypatch, health, code):
    with App() as app:
        monkeypatch.setattr(type(app.client), "health", health)
        for path in ("/health", "/health_generate"):
            response = app.request("GET", path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, code)
            assert health.reason in response.json()["error"]["message"]
            assert response.headers["retry-after"] == str(health.retry_after_s)
        assert app.metrics()["engine_suspect"] == 1
        (load,) = app.request("GET", "/v1/loads").json()["loads"]
        assert load["engine"] == {"state": health.state, "reason": health.reason}
        monkeypatch.undo()
        assert app.request("GET", "/health").status_code == 200
