"""Tokens are counted and timed as they come in, also where their client gets them all at once, or leaves before."""

from __future__ import annotations

import asyncio

from app_under_test import App
from timeouts import until


def test_every_token_of_an_answer_that_is_not_streamed_is_timed():
    with App() as app:
        app.generate(text="abc", sampling_params={"max_new_tokens": 100, "ignore_eos": True})
        found = app.metrics()
        assert found["time_to_first_token_seconds_count"] == 1
        assert found["inter_token_latency_seconds_count"] == 99


def test_tokens_count_that_came_before_a_client_left_who_waited_for_the_whole():
    with App(slow=True) as app:

        async def leave():
            body = {"text": "abc", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
            task = asyncio.create_task(app.http.post("/generate", json=body))
            await until(lambda: app.client.stats.total_output_tokens >= 10)
            num_tokens = app.client.stats.total_output_tokens
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return num_tokens

        num_tokens = app.run(leave())
        app.check_idle()
        found = app.metrics()
        assert found["num_aborted_requests_total"] == 1
        assert 1900 > found["generation_tokens_total"] >= num_tokens >= 10
        assert found["generation_tokens_histogram_sum"] == found["generation_tokens_total"]
