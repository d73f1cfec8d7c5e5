"""A full queue is seen when a request arrives: the engine, which may be in the middle of a long step, is not asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from app_under_test import App
from fake_engine import MAX_ROWS, make_engine
from timeouts import until

from tureen.dialects.sglang import generate as sglang
from tureen.requests.generation import Run

MAX_QUEUED = 2
ROOM = MAX_ROWS + MAX_QUEUED
LONG = {"max_new_tokens": 1000}


class Held:
    """An engine that steps only while it is let."""

    def __init__(self) -> None:
        self.num_added = 0

    @property
    def may_step(self) -> asyncio.Event:
        return self.app.client._host.may_step

    def make(self, config, *, progress):
        engine, info = make_engine(config, progress=progress)
        add = engine.add

        def counted_add(request):
            self.num_added += 1
            add(request)

        engine.add = counted_add
        return engine, info


@contextlib.contextmanager
def holding(**settings) -> Iterator[tuple[App, Held]]:
    control = Held()
    with App(factory=control.make, max_queued_requests=MAX_QUEUED, **settings) as app:
        control.app = app
        yield app, control
        control.may_step.set()


@pytest.fixture
def held() -> Iterator[tuple[App, Held]]:
    with holding() as pair:
        yield pair


def post(app: App, key: str = "", route: str = "/generate", **body) -> asyncio.Task:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    json = {"text": "abc", "sampling_params": LONG} | body
    return asyncio.create_task(app.http.post(route, json=json, headers=headers))


async def fill(app: App, count: int, key: str = "", **body) -> list[asyncio.Task]:
    """So many requests that have been handed to the engine."""
    tasks = [post(app, key, **body) for _ in range(count)]
    while app.client.num_live < count:
        await asyncio.sleep(0)
    return tasks


async def leave(tasks: list[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_one_too_many_is_refused_at_once_while_the_engine_is_in_a_step_that_never_ends(held):
    app, control = held
    control.may_step.clear()

    async def scenario():
        running = await fill(app, ROOM)
        await until(lambda: control.num_added)
        added = control.num_added
        refused = [await post(app), await post(app, stream=True), await post(app, text="b" * 1000)]
        assert (await app.http.get("/health")).status_code == 200
        assert control.num_added == added
        await leave(running)
        return refused

    for one in app.run(scenario()):
        assert one.status_code == 503
        assert one.json()["error"]["code"] == "queue_full"
        assert int(one.headers["retry-after"]) >= 1
    control.may_step.set()
    app.check_idle()
    assert app.state.client.num_live == 0


@pytest.fixture
def shared(tmp_path) -> Iterator[tuple[App, Held]]:
    """A server of two clients with keys."""
    keys = tmp_path / "keys"
    keys.write_text("greedy k-greedy\nmodest k-modest\n")
    keys.chmod(0o600)
    with holding(api_key_file=str(keys)) as pair:
        yield pair


def test_a_request_that_is_refused_for_its_name_takes_nobody_s_place(shared):
    app, control = shared
    control.may_step.clear()

    async def scenario():
        greedy = await fill(app, ROOM, "k-greedy")
        first = post(app, "k-modest", rid="same")
        while not app.state.room.leaving:
            await asyncio.sleep(0)
        leaving = set(app.state.room.leaving)
        again = await post(app, "k-modest", rid="same")
        assert app.state.room.leaving == leaving
        control.may_step.set()
        await leave([*greedy, first])
        return again

    again = app.run(scenario())
    assert (again.status_code, again.json()["error"]["code"]) == (400, "duplicate_rid")
    app.check_idle()


def test_an_output_that_has_ended_without_a_token_does_not_wait(shared):
    """It holds no place, so ending it would make no room. The client has not read it yet."""
    app, _ = shared

    async def scenario():
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 0}}
        run = Run(app.state, (await sglang.prepare(body, app.state)).plan)
        async with contextlib.aclosing(run.updates()) as updates:
            output = await anext(updates)
            assert output.finish is not None
            return run.is_waiting

    assert app.run(scenario()) is False


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_with_less_than_its_share_takes_the_newest_waiting_place_of_the_one_with_more(shared, is_stream):
    app, control = shared
    control.may_step.clear()

    async def scenario():
        greedy = await fill(app, ROOM, "k-greedy", stream=is_stream)
        await until(lambda: control.num_added)
        again = [await post(app, "k-greedy") for _ in range(3)]
        modest = [post(app, "k-modest", text="say:a", stream=is_stream) for _ in range(ROOM // 2)]
        while app.client.num_live < ROOM + len(modest):  # displaced ones leave when the step has ended
            await asyncio.sleep(0)
        above_its_share = await post(app, "k-modest")
        control.may_step.set()
        displaced, kept = greedy[-len(modest) :], greedy[: -len(modest)]
        answers = await asyncio.gather(*displaced), await asyncio.gather(*modest)
        await leave(kept)
        return [*again, above_its_share], *answers, [task.cancelled() for task in kept]

    refused, displaced, modest, were_kept = app.run(scenario())
    for one in (*refused, *displaced):
        assert (one.status_code, one.json()["error"]["code"]) == (503, "queue_full")
        assert int(one.headers["retry-after"]) >= 1
    assert [one.status_code for one in modest] == [200] * (ROOM // 2)
    assert all(were_kept)
    app.check_idle()
    assert (app.state.room.num_free, app.state.room.leaving) == (ROOM, set())


def test_a_request_that_has_begun_keeps_its_place(shared):
    app, control = shared

    async def scenario():
        greedy = await fill(app, ROOM, "k-greedy", stream=True)
        while sum(run.is_waiting for run in app.state.common.runs) > MAX_QUEUED:
            await asyncio.sleep(0)
        control.may_step.clear()
        waiting = [run.outputs[0].request.id for run in app.state.common.runs if run.is_waiting]
        modest = post(app, "k-modest", text="say:a")
        while not modest.done() and not app.state.room.leaving:
            await asyncio.sleep(0)
        leaving = set(app.state.room.leaving)
        control.may_step.set()
        await leave(greedy)
        assert (await modest).status_code == 200
        return waiting, leaving

    waiting, leaving = app.run(scenario())
    assert leaving == {waiting[-1]}


def test_any_number_of_health_checks_make_one_request_and_take_no_place_from_clients(shared):
    app, control = shared
    control.may_step.clear()

    def probe():
        return asyncio.create_task(app.http.get("/health_generate"))

    async def scenario():
        probes = [probe() for _ in range(3 * ROOM)]
        while not app.client.num_live:
            await asyncio.sleep(0)
        await leave(probes[:ROOM])  # the first client to ask leaves, too
        running = await fill(app, ROOM - 1, "k-greedy", text="say:a")
        assert app.client.num_live == ROOM
        control.may_step.set()
        answers = await asyncio.gather(*probes[ROOM:], *running)
        num_added, refused = control.num_added, []
        control.may_step.clear()
        running = await fill(app, ROOM, "k-greedy")
        refused += await asyncio.gather(probe(), probe())
        assert not app.state.room.leaving
        await leave(running)
        return answers, num_added, refused

    answers, num_added, refused = app.run(scenario())
    assert {one.status_code for one in answers} == {200}
    assert num_added == 1 + ROOM - 1
    assert [(one.status_code, one.json()["error"]["code"]) for one in refused] == [(503, "queue_full")] * 2


ROUTES = {
    "/generate": {"text": "abc", "sampling_params": LONG},
    "/generate ": {"inputs": "abc", "parameters": {"max_new_tokens": 9}},
    "/generate  ": {"prompt": "abc"},
    "/v1/completions": {"prompt": "abc", "model": "fake-model"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "model": "fake-model"},
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "model": "fake-model", "max_tokens": 5},
    "/v1/responses": {"input": "abc", "model": "fake-model"},
    "/api/generate": {"prompt": "abc", "model": "fake-model"},
    "/api/chat": {"messages": [{"role": "user", "content": "abc"}], "model": "fake-model"},
    "/v1/score": {"query": "abc", "items": ["d"], "label_token_ids": [1], "model": "fake-model"},
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_dialect_refuses_before_it_works_on_the_body(held, route, monkeypatch):
    app, control = held
    control.may_step.clear()

    async def scenario():
        running = await fill(app, ROOM)
        monkeypatch.setattr(type(app.state.context.tokenizer), "encode", None)
        refused = await app.http.post(route.strip(), json=ROUTES[route])
        monkeypatch.undo()
        await leave(running)
        return refused

    assert app.run(scenario()).status_code == (529 if route == "/v1/messages" else 503)


def test_each_prompt_of_a_batch_and_each_of_its_samples_takes_a_place_and_none_begins_where_not_all_fit(held):
    app, control = held
    control.may_step.clear()

    async def scenario():
        running = await fill(app, ROOM - 5)
        too_many = [
            await post(app, text=["a"] * 6),
            await post(app, sampling_params=LONG | {"n": 6}),
            await post(app, text=["a", "b"], sampling_params=LONG | {"n": 3}),
        ]
        assert app.client.num_live == ROOM - 5
        fits = post(app, text=["a", "b"], sampling_params=LONG | {"n": 2})
        last = post(app)
        while app.client.num_live < ROOM:
            await asyncio.sleep(0)
        assert (await post(app)).status_code == 503
        await leave([*running, fits, last])
        return too_many

    assert [one.status_code for one in app.run(scenario())] == [503] * 3
    control.may_step.set()
    app.check_idle()


def test_those_that_come_in_the_same_moment_are_counted_before_the_engine_has_them(held):
    app, control = held
    control.may_step.clear()

    async def scenario():
        tasks = [post(app, text=["a"] * 3) for _ in range(ROOM)]
        answered = 0
        while answered < ROOM - ROOM // 3:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            answered = len(done)
            await asyncio.sleep(0)
        assert app.client.num_live == ROOM // 3 * 3
        assert {task.result().status_code for task in tasks if task.done()} == {503}
        await leave(tasks)

    app.run(scenario())
    control.may_step.set()
    app.check_idle()


def test_places_are_free_again_when_a_request_ends_or_its_client_leaves_or_it_is_refused(held):
    app, _ = held
    for _ in range(3):
        assert app.post(text=["say:a"] * ROOM).status_code == 200
        assert app.post(text="a", sampling_params={"top_p": 7}).status_code == 400
        assert app.post(text=["a"] * (ROOM + 1)).status_code == 503
        assert app.post(text=["a", "b" * 5000]).status_code == 400

        async def scenario():
            await leave(await fill(app, ROOM))

        app.run(scenario())
        assert app.client.num_live == 0
    assert app.post(text=["say:a"] * ROOM).status_code == 200


def test_an_output_that_has_ended_holds_no_place_though_nobody_has_read_it(held):
    """Slow readers of short answers do not fill the queue."""
    app, _ = held

    async def scenario():
        streams = [app.client.generate(one) for one in requests]
        async with contextlib.AsyncExitStack() as stack:
            for stream in streams:
                await stack.enter_async_context(contextlib.aclosing(stream))
                await anext(stream)
            while app.client.num_live:
                await asyncio.sleep(0)

    from fake_engine import make_request

    requests = [make_request(f"{index}", "say:abc") for index in range(ROOM)]
    app.run(scenario())


def test_an_embedding_model_s_queue_is_seen_to_be_full_in_the_same_way():
    from embedding_engine import make_embedding_engine

    with App(factory=make_embedding_engine, max_queued_requests=MAX_QUEUED) as app:
        may_step = app.client._host.may_step
        may_step.clear()

        async def scenario():
            def post():
                return asyncio.create_task(app.http.post("/encode", json={"text": "abc"}))

            running = [post() for _ in range(MAX_QUEUED + 1)]  # one is being computed
            while app.client.num_live < len(running):
                await asyncio.sleep(0)
            refused = await post()
            may_step.set()
            return refused, await asyncio.gather(*running)

        refused, answers = app.run(scenario())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert [one.status_code for one in answers] == [200] * 3
