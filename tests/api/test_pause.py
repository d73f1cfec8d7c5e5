import asyncio

import httpx
import pytest
from app_under_test import App
from served_app import ServedApp
from timeouts import until

PROMPT = {"text": "abc", "sampling_params": {"max_new_tokens": 1500, "temperature": 0}}


@pytest.fixture
def app():
    with App(slow=True) as app:
        yield app


async def post(app, path, body):
    return await app.http.post(path, json=body)


def start(app, body=PROMPT):
    """A request that has begun to run."""

    async def begin():
        before = app.client.stats.total_output_tokens
        task = asyncio.create_task(post(app, "/generate", body))
        await until(lambda: app.client.stats.total_output_tokens > before)
        return task

    return app.run(begin())


async def turns(app, count):
    """Of the engine: it steps between any two, if there is a step to be made."""
    for _ in range(count):
        await app.client.call("stats")


async def wait_for(task):
    return await task


def pause(app, **body):
    response = app.run(post(app, "/pause_generation", body))
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "ok"


def resume(app):
    assert app.run(post(app, "/continue_generation", {})).json()["status"] == "ok"


def nothing_moves(app):
    before = app.client.stats.total_output_tokens
    app.run(turns(app, 30))
    return app.client.stats.total_output_tokens == before


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_where_it_was(app, mode):
    with App() as fast:
        whole = fast.generate(**PROMPT)
    task = start(app)
    pause(app, mode=mode)
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
        await until(lambda: app.client.stats.num_queued, unless=waiting)
        await turns(app, 30)
        assert not waiting.done()
        assert (await post(app, "/continue_generation", {})).status_code == 200
        return (await wait_for(waiting)).json()

    assert len(app.run(later())["output_ids"]) == 1500
    app.check_idle()


def test_deadlines_and_aborts_act_during_a_pause(app):
    late = start(app, PROMPT | {"deadline_ms": 1000})
    pause(app, mode="in_place")
    assert app.run(wait_for(late)).json()["meta_info"]["finish_reason"]["reason"] == "deadline"
    resume(app)
    gone = start(app, PROMPT | {"rid": "gone"})
    pause(app, mode="in_place")
    app.run(post(app, "/abort_request", {"rid": "gone"}))
    assert app.run(wait_for(gone)).json()["meta_info"]["finish_reason"]["type"] == "abort"


def count_reports(client):
    """Gets one for each that the engine makes from now on."""
    seen, receive = [], client._streams.receive

    def noted(message):
        seen.append(type(message))
        receive(message)

    client._streams.receive = noted
    return seen


def test_a_pause_is_not_taken_for_a_hang():
    """The time until the engine is given up passes almost between its signs of life, again and again."""
    with ServedApp(slow=True) as server:

        async def pass_almost_all():
            server.client.look(0.9 * server.client._watchdog._timeout_s)

        with httpx.stream("POST", f"{server.url}/generate", json=PROMPT | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"})
            seen = count_reports(server.client)
            for _ in range(3):
                before = len(seen)
                server.wait_until(lambda enough=before + 2: len(seen) >= enough, "a sign of life")
                server.run(pass_almost_all())
            assert httpx.get(f"{server.url}/health").status_code == 200
            httpx.post(f"{server.url}/continue_generation")
            assert list(lines)[-2] == "data: [DONE]"
        server.check_idle()


@pytest.mark.parametrize(
    ("body", "field"), [({"mode": "later"}, "mode"), ({"mode": 1}, "mode"), ({"mod": "abort"}, "mod")]
)
def test_a_wrong_mode_is_refused_by_name(app, body, field):
    response = app.run(post(app, "/pause_generation", body))
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]
    assert not app.client.stats.is_paused
