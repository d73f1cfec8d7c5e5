import asyncio
import time

import httpx
import pytest
from app_under_test import App, LiveServer, wait_until

PROMPT = {"text": "abc", "sampling_params": {"max_new_tokens": 60, "temperature": 0}}


@pytest.fixture
def app():
    with App(slow=True) as app:
        yield app


async def post(app, path, body):
    return await app.http.post(path, json=body)


def start(app, body=PROMPT):
    """A request that has begun to run."""

    async def begin():
        task = asyncio.create_task(post(app, "/generate", body))
        while not app.client.stats.num_running:
            await asyncio.sleep(0.005)
        return task

    return app.run(begin())


async def wait_for(task):
    return await asyncio.wait_for(task, 10)


def pause(app, **body):
    response = app.run(post(app, "/pause_generation", body))
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "ok"


def resume(app):
    assert app.run(post(app, "/continue_generation", {})).json()["status"] == "ok"


def nothing_moves(app):
    before = app.client.stats.total_output_tokens
    app.run(asyncio.sleep(0.15))
    return app.client.stats.total_output_tokens == before


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_where_it_was(app, mode):
    whole = app.run(post(app, "/generate", PROMPT)).json()
    task = start(app)
    pause(app, mode=mode)
    app.run(asyncio.sleep(0.05))
    assert nothing_moves(app)
    assert app.client.stats.is_paused
    assert app.client.stats.num_running == (1 if mode == "in_place" else 0)
    assert not task.done()
    resume(app)
    answer = app.run(wait_for(task)).json()
    assert answer["output_ids"] == whole["output_ids"]
    app.check_idle()


def test_the_default_ends_what_runs_and_lets_new_requests_wait(app):
    task = start(app)
    pause(app)
    answer = app.run(wait_for(task)).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted", "reason": "pause"}

    async def later():
        waiting = asyncio.create_task(post(app, "/generate", PROMPT))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert (await post(app, "/continue_generation", {})).status_code == 200
        return (await wait_for(waiting)).json()

    assert len(app.run(later())["output_ids"]) == 60
    app.check_idle()


def test_deadlines_and_aborts_act_during_a_pause(app):
    late = start(app, PROMPT | {"deadline_ms": 300})
    pause(app, mode="in_place")
    assert app.run(wait_for(late)).json()["meta_info"]["finish_reason"]["reason"] == "deadline"
    resume(app)
    gone = start(app, PROMPT | {"rid": "gone"})
    pause(app, mode="in_place")
    app.run(post(app, "/abort_request", {"rid": "gone"}))
    assert app.run(wait_for(gone)).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_pause_is_not_taken_for_a_hang():
    with LiveServer(slow=True) as server:
        server.client._watchdog_timeout_s = 1.6
        with httpx.stream("POST", f"{server.url}/generate", json=PROMPT | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"})
            time.sleep(2.5)
            assert httpx.get(f"{server.url}/health").status_code == 200
            httpx.post(f"{server.url}/continue_generation")
            assert list(lines)[-2] == "data: [DONE]"
        wait_until(lambda: server.stats.num_running == 0, "the end")


@pytest.mark.parametrize(
    ("body", "field"), [({"mode": "later"}, "mode"), ({"mode": 1}, "mode"), ({"mod": "abort"}, "mod")]
)
def test_a_wrong_mode_is_refused_by_name(app, body, field):
    response = app.run(post(app, "/pause_generation", body))
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]
    assert not app.client.stats.is_paused
