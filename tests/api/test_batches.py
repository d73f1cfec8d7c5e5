"""`/v1/batches`: lines of a file, answered as their routes answer, when nobody else asks for anything."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from app_under_test import App
from batch_app import ROUTE, BatchApp, line
from timeouts import until

from tureen.batches import job, lines, results, runner, upload
from tureen.batches.records import BatchRecord
from tureen.batches.turns import Turns
from tureen.dialects.openai import batches
from tureen.errors import Unavailable

ENDLESS = {"prompt": "abc", "max_tokens": 1900}


@pytest.fixture
def app(tmp_path):
    with BatchApp(tmp_path / "kept") as running:
        yield running
        running.check_idle()


@pytest.fixture
def slow_app(tmp_path):
    with BatchApp(tmp_path / "kept", slow=True) as running:
        yield running
        running.check_idle()


def as_answered(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two."""
    return {name: value for name, value in body.items() if name not in ("id", "created")} | {
        "choices": [{**choice, "sampling_seed": None} for choice in body.get("choices", ())]
    }


# ---- lines


def test_each_line_is_answered_as_its_route_answers(app):
    batch = app.begin([line(f"r{index}") for index in range(40)], metadata={"for": "a test"})
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"for": "a test"})
    assert batch["expires_at"] - batch["created_at"] == 86400
    ended = app.ended(batch)
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert ended["error_file_id"] is None
    times = [ended[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert times == sorted(times)
    answers = app.lines(ended["output_file_id"])
    assert answers.keys() == {f"r{index}" for index in range(40)}
    alone = as_answered(app.post(ROUTE, **line("x")["body"]).json())
    assert alone["choices"][0]["text"] == "hello"
    for answer in answers.values():
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
        assert as_answered(answer["response"]["body"]) == alone


def test_a_line_that_fails_has_the_error_that_http_gives_and_the_others_are_answered(app):
    bodies = {
        "bound": {"max_tokens": -3},
        "type": {"prompt": 5},
        "slip": {"temprature": 1},
        "adapter": {"lora_path": "nothing"},
        "long": {"prompt": "a" * 3000},
    }
    ended = app.ended(app.begin([line(name, **body) for name, body in bodies.items()] + [line("fine")]))
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
    assert app.lines(ended["output_file_id"]).keys() == {"fine"}
    errors = app.lines(ended["error_file_id"])
    for name in bodies:
        alone = app.post(ROUTE, **line(name, **bodies[name])["body"])
        assert alone.status_code in (400, 404)
        assert errors[name]["response"]["status_code"] == alone.status_code
        assert errors[name]["response"]["body"] == alone.json()
        assert errors[name]["error"] is None


def test_a_body_that_json_cannot_have_is_an_error_of_its_line(app):
    bad = json.dumps(line("deep", prompt="DEEP")).replace('"DEEP"', "[" * 400 + "]" * 400)
    ended = app.ended(app.begin(bad + "\n" + json.dumps(line("fine"))))
    assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert app.lines(ended["error_file_id"])["deep"]["response"]["status_code"] == 400


def test_a_line_cannot_ask_for_a_stream(app):
    ended = app.ended(app.begin([line("r", stream=True), line("s", stream=False), line("t", stream=None)]))
    assert app.lines(ended["output_file_id"]).keys() == {"s", "t"}
    error = app.lines(ended["error_file_id"])["r"]["response"]
    assert (error["status_code"], error["body"]["error"]["param"]) == (400, "stream")


def test_a_line_cannot_ask_for_an_answer_before_it_is_done(tmp_path):
    with BatchApp(tmp_path / "kept", chat_template="chatml", responses_store=str(tmp_path / "responses")) as app:
        body = {"input": "abc", "max_output_tokens": 16, "store": True}
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": body | more}
            for name, more in (("kept", {}), ("background", {"background": True}))
        ]
        ended = app.ended(app.begin(lines, "/v1/responses"))
        error = app.lines(ended["error_file_id"])["background"]["response"]
        assert (error["status_code"], error["body"]["error"]["param"]) == (400, "background")
        answer = app.lines(ended["output_file_id"])["kept"]["response"]["body"]
        assert app.get(f"/v1/responses/{answer['id']}")["output"] == answer["output"]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/embeddings", {"input": ["abc", "def"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 16}),
    ],
)
def test_the_other_routes_answer_lines_too(tmp_path, endpoint, body):
    with BatchApp(tmp_path / "kept", chat_template="chatml") as app:
        sent = {"custom_id": "r", "method": "POST", "url": endpoint, "body": body}
        ended = app.ended(app.begin([sent], endpoint))
        answer = app.lines(ended["output_file_id"])["r"]["response"]["body"]
        alone = app.post(endpoint, **body).json()
        assert answer["object"] == alone["object"]
        assert answer["usage"]["total_tokens"] == alone["usage"]["total_tokens"]


def test_fields_without_effect_are_told_in_the_batch_and_in_the_answers(app):
    sent = line("r", user="somebody", flavour="sweet") | {"note": "mine"}
    batch = app.begin([sent], colour="red")
    assert batch["ignored_fields"] == ["colour"]
    ended = app.ended(batch)
    assert ended["ignored_fields"] == ["lines[].note"]
    assert "flavour" in app.lines(ended["output_file_id"])["r"]["response"]["body"]["ignored_fields"]


def test_blank_lines_are_none_and_the_last_needs_no_line_break(app):
    text = "\n\n" + json.dumps(line("a")) + "\r\n  \n" + json.dumps(line("b"))
    ended = app.ended(app.begin(text))
    assert ended["request_counts"]["total"] == 2
    assert app.lines(ended["output_file_id"]).keys() == {"a", "b"}


# ---- what cannot begin

FINE = json.dumps(line("fine")).encode()
FAULTS: dict[str, tuple[bytes, str, str | None]] = {
    "no JSON": (b"{", "invalid_json_line", None),
    "not UTF-8": (FINE.replace(b"say", b"\xff"), "invalid_json_line", None),
    "a list": (b"[1]", "invalid_json_line", None),
    "no id": (b'{"method": "POST", "url": "/v1/completions", "body": {}}', "missing_required_parameter", "custom_id"),
    "an id that is a number": (FINE.replace(b'"fine"', b"5"), "invalid_json_line", None),
    "an empty id": (FINE.replace(b'"fine"', b'""'), "invalid_custom_id", "custom_id"),
    "a long id": (FINE.replace(b"fine", b"f" * 513), "invalid_custom_id", "custom_id"),
    "no body": (FINE.replace(b'"body"', b'"bodey"'), "missing_required_parameter", "body"),
    "a body that is no object": (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}',
        "invalid_body",
        "body",
    ),
    "another method": (FINE.replace(b"POST", b"GET"), "invalid_method", "method"),
    "another route": (FINE.replace(b"/v1/completions", b"/v1/embeddings"), "invalid_url", "url"),
    "a path": (FINE.replace(b"/v1/completions", b"/../../etc/passwd"), "invalid_url", "url"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_input_with_a_line_that_is_no_request_fails_and_says_which_line(app, name):
    bad, code, param = FAULTS[name]
    batch = app.begin(FINE.replace(b"fine", b"first") + b"\n\n" + bad + b"\n" + FINE.replace(b"fine", b"last"))
    ended = app.ended(batch)
    assert ended["status"] == "failed"
    assert ended["failed_at"] is not None
    assert ended["output_file_id"] is ended["error_file_id"] is None
    [fault] = ended["errors"]["data"]
    assert (fault["code"], fault["param"], fault["line"]) == (code, param, 3)
    assert fault["message"]


def test_an_id_that_stands_twice_is_a_fault_of_the_second_line(app):
    ended = app.ended(app.begin([line("a"), line("b"), line("a")]))
    [fault] = ended["errors"]["data"]
    assert (fault["code"], fault["line"]) == ("duplicate_custom_id", 3)


@pytest.mark.parametrize("text", [b"", b"\n \n"])
def test_an_input_without_requests_fails(app, text):
    ended = app.ended(app.begin(text))
    assert [fault["code"] for fault in ended["errors"]["data"]] == ["empty_file"]


def test_a_line_longer_than_a_body_may_be_is_not_read_to_its_end(tmp_path):
    with BatchApp(tmp_path / "kept", max_body_bytes=2000) as app:
        ended = app.ended(app.begin(FINE + b"\n" + b"x" * 100_000 + b"\n" + FINE))
        [fault] = ended["errors"]["data"]
        assert (fault["code"], fault["line"]) == ("line_too_long", 2)


def test_of_many_faulty_lines_some_are_told_and_no_more_are_read(app, monkeypatch):
    num_checked = 0
    check = lines.InputCheck._check

    def counted(self, raw):
        nonlocal num_checked
        num_checked += 1
        check(self, raw)

    monkeypatch.setattr(lines.InputCheck, "_check", counted)
    ended = app.ended(app.begin(b"{}\n" * 1_000_000))
    assert len(ended["errors"]["data"]) == num_checked == lines.MAX_FAULTS


def test_more_lines_than_a_batch_may_have_are_one_fault_and_no_more_are_read(app, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINES", 20)
    ended = app.ended(app.begin([line(f"r{index}") for index in range(2000)]))
    [fault] = ended["errors"]["data"]
    assert (fault["code"], fault["line"]) == ("too_many_requests", None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "/generate"),
        ("endpoint", None),
        ("completion_window", "24"),
        ("completion_window", "0h"),
        ("completion_window", "31d"),
        ("completion_window", 24),
        ("input_file_id", None),
        ("metadata", {str(index): "" for index in range(17)}),
        ("metadata", {"a": "b" * 513}),
        ("metadata", {"a": 5}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 5}),
        ("endpont", "/v1/completions"),
    ],
)
def test_a_field_that_is_wrong_is_refused_by_name(app, field, value):
    body = {"input_file_id": app.upload(FINE)["id"], "endpoint": ROUTE, "completion_window": "24h"} | {field: value}
    assert field in app.error(path="/v1/batches", **body)["param"]
    assert app.get("/v1/batches")["data"] == []


def test_an_input_that_is_not_there_is_not_found_and_answers_are_no_input(app):
    body = {"input_file_id": "file-../../x", "endpoint": ROUTE, "completion_window": "24h"}
    response = app.post("/v1/batches", **body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "file_not_found")
    ended = app.ended(app.begin([line("r")]))
    assert (
        app.error(path="/v1/batches", **body | {"input_file_id": ended["output_file_id"]})["param"] == "input_file_id"
    )


# ---- behind everybody else


async def begin_endless(app: App) -> asyncio.Task:
    """Somebody asks for something that has no end, and has begun."""
    task = asyncio.create_task(app.http.post(ROUTE, json=ENDLESS | {"max_tokens": 2000}))
    while app.state.common.admitted.is_idle.is_set():
        await asyncio.sleep(0)
    return task


async def give_up(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_no_line_begins_and_no_input_is_read_while_somebody_else_asks(tmp_path):
    with BatchApp(tmp_path / "kept", slow=True) as app:
        somebody = app.run(begin_endless(app))
        app.wait_until(lambda: app.client.stats.total_prompt_tokens)
        batch = app.begin([line(f"r{index}") for index in range(3)])
        num_added = app.client.stats.total_prompt_tokens
        for _ in range(50):
            assert app.batch(batch)["status"] == "validating"
        assert app.client.stats.total_prompt_tokens == num_added
        app.run(give_up(somebody))
        assert app.ended(batch)["status"] == "completed"


def test_lines_take_no_place_in_the_queue_and_none_of_the_client_s_quota(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice key-of-alice tokens_per_minute=60 max_requests=1\n")
    keys.chmod(0o600)
    with BatchApp(tmp_path / "kept", api_key_file=str(keys), max_queued_requests=1, slow=True) as app:
        app.key = "key-of-alice"
        batch = app.begin([line(f"r{index}", **ENDLESS) for index in range(40)])
        app.wait_until(lambda: app.client.num_live >= 16)
        response = app.post(ROUTE, **line("x")["body"])
        assert response.json()["choices"][0]["text"] == "hello"
        assert app.request("POST", f"/v1/batches/{batch['id']}/cancel").status_code == 200
        app.ended(batch)


def test_latencies_in_the_metrics_are_those_of_others(app):
    app.ended(app.begin([line("r")]))
    figures = app.metrics()
    assert figures["generation_tokens_total"] == 6
    assert figures["time_to_first_token_seconds_count"] == figures["e2e_request_latency_seconds_count"] == 0


# ---- ends


def test_a_batch_that_is_cancelled_keeps_its_answers_and_runs_nothing_more(tmp_path):
    with BatchApp(tmp_path / "kept", slow=True) as app:
        batch = app.begin([line("fine"), *(line(f"r{index}", **ENDLESS) for index in range(30))])
        app.wait_until(lambda: app.service.runner._jobs[batch["id"]].counts.completed)
        cancelled = app.request("POST", f"/v1/batches/{batch['id']}/cancel").json()
        assert (cancelled["status"], cancelled["cancelling_at"] is None) == ("cancelling", False)
        ended = app.ended(batch)
        assert ended["status"] == "cancelled"
        assert ended["cancelled_at"] >= ended["cancelling_at"]
        assert ended["request_counts"] == {"total": 31, "completed": 1, "failed": 30}
        assert app.lines(ended["output_file_id"]).keys() == {"fine"}
        errors = app.lines(ended["error_file_id"])
        assert errors.keys() == {f"r{index}" for index in range(30)}
        for error in errors.values():
            assert (error["response"], error["error"]["code"]) == (None, "batch_cancelled")
        app.check_idle()
        again = app.request("POST", f"/v1/batches/{batch['id']}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_not_cancellable")


def test_a_batch_that_waits_can_be_cancelled(slow_app):
    app = slow_app
    somebody = app.run(begin_endless(app))
    batch = app.begin([line("r")])
    app.request("POST", f"/v1/batches/{batch['id']}/cancel")
    ended = app.ended(batch)
    assert (ended["status"], ended["request_counts"]["total"]) == ("cancelled", 0)
    app.run(give_up(somebody))


class Later:
    """The time, some days from now."""

    def __init__(self, real: Any, days: int) -> None:
        self.time: Callable[[], float] = lambda: real.time() + days * 86400


def test_a_batch_expires_when_its_window_is_over(tmp_path, monkeypatch):
    with BatchApp(tmp_path / "kept", slow=True) as app:
        batch = app.begin([line("fine"), *(line(f"r{index}", **ENDLESS) for index in range(30))])
        app.wait_until(lambda: app.service.runner._jobs[batch["id"]].counts.completed)
    monkeypatch.setattr(job, "time", Later(job.time, 2))
    with BatchApp(tmp_path / "kept", slow=True) as app:
        ended = app.ended(batch)
        assert ended["status"] == "expired"
        assert ended["expired_at"] > ended["expires_at"]
        assert ended["request_counts"] == {"total": 31, "completed": 1, "failed": 30}
        errors = app.lines(ended["error_file_id"])
        assert {error["error"]["code"] for error in errors.values()} == {"batch_expired"}


def test_a_batch_that_was_never_read_expires_too(slow_app, monkeypatch):
    app = slow_app
    somebody = app.run(begin_endless(app))
    monkeypatch.setattr(job, "time", Later(job.time, 2))
    ended = app.ended(app.begin([line("r")]))
    assert (ended["status"], ended["request_counts"]["total"]) == ("expired", 0)
    app.run(give_up(somebody))


# ---- restarts


def test_a_server_that_comes_back_answers_the_lines_that_lack_an_answer_and_no_other(tmp_path):
    folder = tmp_path / "kept"
    with BatchApp(folder, slow=True) as app:
        batch = app.begin([line(f"r{index}", prompt="say:" + "a" * (3 * index), max_tokens=200) for index in range(40)])
        app.wait_until(lambda: app.service.runner._jobs[batch["id"]].counts.completed >= 5)
    [output] = folder.glob("files/*-output")
    before = output.read_bytes()
    assert 5 <= before.count(b"\n") < 40
    output.write_bytes(before + b'{"id": "batch_req_torn')
    with BatchApp(folder) as app:
        ended = app.ended(batch)
        assert ended["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        answers = app.lines(ended["output_file_id"])
        assert app.request("GET", f"/v1/files/{ended['output_file_id']}/content").content.startswith(before)
        for index in range(40):
            assert answers[f"r{index}"]["response"]["body"]["choices"][0]["text"] == "a" * (3 * index)
        assert app.metrics()["prompt_tokens_histogram_count"] == 40 - before.count(b"\n")


def test_files_and_ended_batches_are_there_after_a_restart(tmp_path):
    with BatchApp(tmp_path / "kept") as app:
        ended = app.ended(app.begin([line("r"), line("s", max_tokens=-3)]))
        listed = [app.get("/v1/files"), app.get("/v1/batches")]
    with BatchApp(tmp_path / "kept") as app:
        assert [app.get("/v1/files"), app.get("/v1/batches")] == listed
        assert app.batch(ended) == ended
        assert app.lines(ended["output_file_id"]).keys() == {"r"}
        assert app.lines(ended["error_file_id"]).keys() == {"s"}


def test_what_the_server_could_not_do_is_done_later_and_is_no_error_of_the_line(app, monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    refusals = [Unavailable("no", code="queue_full", retry_after_s=7), Unavailable("no", retry_after_s=3)]
    check_open = app.state.check_open

    def check():
        if refusals:
            raise refusals.pop()
        check_open()

    batch = app.begin([line("r")])
    monkeypatch.setattr(app.state, "check_open", check)
    monkeypatch.setattr("tureen.dialects.openai.batches.pause", sleep)
    ended = app.ended(batch)
    assert ended["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert waits == [3, 7]


def test_a_line_at_which_the_server_fails_again_and_again_is_an_error_and_the_others_are_answered(app, monkeypatch):
    call, num_calls = batches.call_route, 0

    async def failing(route, body, *more):
        nonlocal num_calls
        if b"boom" in body:
            num_calls += 1
            raise ValueError("a fault of ours")
        return await call(route, body, *more)

    monkeypatch.setattr(batches, "call_route", failing)
    ended = app.ended(app.begin([line("r"), line("bad", prompt="boom"), line("s")]))
    assert (ended["status"], ended["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    error = app.lines(ended["error_file_id"])["bad"]
    assert (error["response"], error["error"]["code"]) == (None, "server_error")
    assert num_calls == job.MAX_ATTEMPTS


def test_a_batch_that_the_server_cannot_run_fails_and_does_not_come_back_for_ever(app, monkeypatch):
    num_runs = 0

    async def failing(self):
        nonlocal num_runs
        num_runs += 1
        raise ValueError("a fault of ours")

    monkeypatch.setattr(job.Job, "_work", failing)
    monkeypatch.setattr(runner, "RETRY_S", 0.0)
    ended = app.ended(app.begin([line("r")]))
    assert (ended["status"], [fault["code"] for fault in ended["errors"]["data"]]) == ("failed", ["server_error"])
    assert num_runs == runner.MAX_FAULTS


def test_a_batch_that_was_killed_while_it_expired_is_expired(tmp_path, monkeypatch):
    with BatchApp(tmp_path / "kept", slow=True) as app:
        batch = app.begin([line("fine"), *(line(f"r{index}", **ENDLESS) for index in range(30))])
        app.wait_until(lambda: app.service.runner._jobs[batch["id"]].counts.completed)

    async def killed(*_):
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(job, "time", Later(job.time, 2))
        patched.setattr(job.Job, "_hand_over", killed)
        with BatchApp(tmp_path / "kept", slow=True) as app:
            app.wait_until(lambda: app.service.runner._jobs[batch["id"]].counts.failed == 30)
    with BatchApp(tmp_path / "kept", slow=True) as app:
        ended = app.ended(batch)
        assert ended["status"] == "expired"
        assert ended["request_counts"] == {"total": 31, "completed": 1, "failed": 30}


def test_all_batches_together_hold_so_many_pieces_of_their_inputs(app, monkeypatch):
    """One long line of all of them among these, however many wait."""
    monkeypatch.setattr(lines, "SLICE_BYTES", 100)
    ids = [app.upload("x" * 500 + "\n")["id"] for _ in range(5)]
    means = app.service.runner._means._replace(pieces=Turns(3))
    shown, go_on = [], asyncio.Event()

    async def read(file_id):
        record = BatchRecord(
            id=f"batch_{file_id}", client="", endpoint=ROUTE, input_file_id=file_id, completion_window="24h",
            created_at=0, expires_at=0,
        )  # fmt: skip
        async for piece in job.Job(record, means)._slices():
            shown.append(len(piece[0][1]))
            await go_on.wait()

    async def read_all():
        tasks = [asyncio.create_task(read(file_id)) for file_id in ids]
        await until(lambda: shown and means.pieces.num_waiting == means.long_line.num_waiting == 2)
        assert shown == [501]
        go_on.set()
        await asyncio.gather(*tasks)

    app.run(read_all())
    assert shown == [501] * 5


def open_files(folder: Path) -> list[str]:
    """The files below the folder that this process has open."""
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return [name for name in links if name.startswith(str(folder))]


def test_many_batches_of_one_client_do_not_hold_up_another_s(tmp_path):
    """More than there are pieces of inputs; of the lines that run before another client's end, not more are theirs."""
    keys = tmp_path / "keys"
    keys.write_text("anna one\nbert two\n")
    keys.chmod(0o600)
    with BatchApp(tmp_path / "kept", api_key_file=str(keys)) as app:
        means, order, may_go_on = app.service.runner._means, [], asyncio.Event()

        async def noted(batch, body):
            await may_go_on.wait()
            order.append(batch.client)
            return await means.answer(batch, body)

        slots = Turns(2)
        app.service.runner._means = means._replace(answer=noted, slots=slots)
        few = [line(f"r{index}", prompt="a", max_tokens=1) for index in range(10)]
        app.key = "one"
        many = [app.begin(few) for _ in range(job.MAX_PIECES + 1)]
        app.key = "two"
        other = app.begin(few)
        app.wait_until(lambda: "bert" in slots._shares and slots._shares["bert"].waiting)
        assert not means.disk.submit(open_files, tmp_path / "kept" / "files").result(), "none for each unended batch"
        may_go_on.set()
        assert app.ended(other)["status"] == "completed"
        last = len(order) - order[::-1].index("bert")
        assert order[:last].count("anna") <= 3 * len(few)
        app.key = "one"
        assert {app.ended(batch)["request_counts"]["completed"] for batch in many} == {len(few)}


def test_the_tokens_of_all_answers_are_added_up_and_lines_are_counted(app, tmp_path):
    bodies = [line(f"r{index}", prompt="say:" + "a" * index) for index in range(1, 9)]
    ended = app.ended(app.begin([*bodies, line("bad", max_tokens=-3)]))
    used = [answer["response"]["body"]["usage"] for answer in app.lines(ended["output_file_id"]).values()]
    assert ended["usage"]["input_tokens"] == sum(one["prompt_tokens"] for one in used)
    assert ended["usage"]["output_tokens"] == sum(one["completion_tokens"] for one in used)
    assert ended["usage"]["total_tokens"] == sum(one["total_tokens"] for one in used)
    assert (app.metrics()["num_batch_lines_total"], app.metrics()["num_batch_lines_failed_total"]) == (9, 1)
    assert app.metrics()["num_batches"] == 0


def test_a_line_whose_output_an_operator_ended_runs_again(tmp_path):
    with BatchApp(tmp_path / "kept", slow=True) as app:
        batch = app.begin([line("r", prompt="say:" + "a" * 900, max_tokens=1000)])
        app.wait_until(lambda: app.client.stats.num_running)
        app.post("/pause_generation", mode="abort")
        app.post("/continue_generation")
        ended = app.ended(batch)
        body = app.lines(ended["output_file_id"])["r"]["response"]["body"]
        assert body["choices"][0]["text"] == "a" * 900


@pytest.mark.parametrize("num_answered", [0, 5])
def test_a_batch_whose_input_somebody_took_away_fails_and_keeps_its_answers(tmp_path, num_answered):
    folder = tmp_path / "kept"
    with BatchApp(folder, slow=True) as app:
        batch = app.begin(
            [*(line(f"r{index}") for index in range(5)), *(line(f"s{index}", **ENDLESS) for index in range(5))]
        )
        app.wait_until(lambda: app.service.runner._jobs[batch["id"]].counts.completed >= num_answered)
    (folder / "files" / batch["input_file_id"]).unlink()
    with BatchApp(folder) as app:
        ended = app.ended(batch)
        assert ended["status"] == "failed"
        assert [fault["code"] for fault in ended["errors"]["data"]] == ["input_file_missing"]
        assert len(app.lines(ended["output_file_id"])) == num_answered


def test_a_full_disk_stops_a_batch_until_there_is_room_and_loses_no_line(app, monkeypatch):
    num_writes = 0
    write = results._write

    def refusing(file, text):
        nonlocal num_writes
        num_writes += 1
        if num_writes in (2, 3):
            file.write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, text)

    monkeypatch.setattr(results, "_write", refusing)
    monkeypatch.setattr(runner, "RETRY_S", 0.0)
    ended = app.ended(app.begin([line(f"r{index}", prompt="say:" + "a" * index) for index in range(30)]))
    assert num_writes > 3
    assert ended["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert len(app.lines(ended["output_file_id"])) == 30


def test_an_upload_to_a_full_disk_is_refused_for_now(app, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upload, "_write_all", refuse)
    response = app.send(b"abc")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "storage_failed")
    assert app.get("/v1/files")["data"] == []


# ---- whose they are


def test_nobody_sees_the_files_and_batches_of_another_client(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice key-of-alice\nbob key-of-bob\n")
    keys.chmod(0o600)
    with BatchApp(tmp_path / "kept", api_key_file=str(keys)) as app:
        app.key = "key-of-alice"
        ended = app.ended(app.begin([line("r")]))
        files = [ended["input_file_id"], ended["output_file_id"]]
        app.key = "key-of-bob"
        assert app.get("/v1/files")["data"] == app.get("/v1/batches")["data"] == []
        asked = [("GET", f"/v1/batches/{ended['id']}"), ("POST", f"/v1/batches/{ended['id']}/cancel")]
        asked += [(method, f"/v1/files/{name}") for name in files for method in ("GET", "DELETE")]
        asked += [("GET", f"/v1/files/{name}/content") for name in files]
        for method, path in asked:
            other, none = app.request(method, path), app.request(method, path.replace(path.split("/")[3], "nothing"))
            assert (other.status_code, none.status_code) == (404, 404)
            assert other.json()["error"]["code"] == none.json()["error"]["code"]
        body = {"input_file_id": files[0], "endpoint": ROUTE, "completion_window": "24h"}
        assert app.post("/v1/batches", **body).status_code == 404
        assert app.request("GET", f"/v1/files?after={files[0]}").status_code == 400
        app.key = "key-of-alice"
        assert len(app.get("/v1/files")["data"]) == 2


def test_answers_that_find_no_room_are_errors_and_nothing_more_is_run(tmp_path):
    with BatchApp(tmp_path / "kept", max_batch_bytes=24_000) as app:
        many = [line(f"r{index}", prompt="a", max_tokens=250, seed=index) for index in range(60)]
        ended = app.ended(app.begin(many))
        counts = ended["request_counts"]
        assert ended["status"] == "completed"
        assert counts["completed"] + counts["failed"] == counts["total"] == 60
        assert 0 < counts["completed"] < 40
        errors = app.lines(ended["error_file_id"])
        assert {error["error"]["code"] for error in errors.values()} == {"storage_full"}


def test_a_client_may_have_so_many_batches_that_have_not_ended(slow_app, monkeypatch):
    app = slow_app
    somebody = app.run(begin_endless(app))
    monkeypatch.setattr("tureen.batches.store.MAX_UNENDED", 3)
    batches = [app.begin([line("r")]) for _ in range(3)]
    body = {"input_file_id": batches[0]["input_file_id"], "endpoint": ROUTE, "completion_window": "24h"}
    refused = app.post("/v1/batches", **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
    assert int(refused.headers["retry-after"]) > 0
    app.run(give_up(somebody))
    for batch in batches:
        assert app.ended(batch)["status"] == "completed"
    assert app.post("/v1/batches", **body).status_code == 200
    app.wait_until(lambda: not app.service.runner._jobs)


def test_ended_batches_are_forgotten_when_there_are_too_many(app, monkeypatch):
    monkeypatch.setattr("tureen.batches.store.MAX_BATCHES", 3)
    batches = [app.ended(app.begin([line("r")]))["id"] for _ in range(5)]
    assert [batch["id"] for batch in app.get("/v1/batches")["data"]] == batches[:1:-1]


def test_batches_are_listed_in_pages_the_newest_first(app):
    ids = [app.ended(app.begin([line("r")]))["id"] for _ in range(5)]
    first = app.get("/v1/batches?limit=2")
    assert [batch["id"] for batch in first["data"]] == [ids[4], ids[3]]
    assert (first["object"], first["first_id"], first["last_id"], first["has_more"]) == ("list", ids[4], ids[3], True)
    rest = app.get(f"/v1/batches?after={first['last_id']}&limit=3")
    assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == ([ids[2], ids[1], ids[0]], False)
    for query in ("limit=0", "limit=101", "limit=x", "after=nothing", "afetr=x"):
        assert app.request("GET", f"/v1/batches?{query}").status_code == 400


ROUTES = [
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/x"),
    ("DELETE", "/v1/files/x"),
    ("GET", "/v1/files/x/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/x"),
    ("POST", "/v1/batches/x/cancel"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_folder_each_route_names_the_setting(method, path):
    with App() as app:
        response = app.request(method, path)
        assert response.status_code == 400
        assert "--batch-path" in response.json()["error"]["message"]


def test_openai_s_client_finds_what_it_expects(app):
    client = openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1/v1", http_client=app.http, max_retries=0)

    async def scenario():
        text = "".join(json.dumps(line(f"r{index}")) + "\n" for index in range(5)).encode()
        file = await client.files.create(file=("in.jsonl", text), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=ROUTE, completion_window="24h", metadata={"a": "b"}
        )
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0)
            batch = await client.batches.retrieve(batch.id)
        answers = (await client.files.content(batch.output_file_id)).text
        listed = [entry.id async for entry in client.batches.list(limit=1)]
        files = [entry.id async for entry in client.files.list(purpose="batch")]
        deleted = await client.files.delete(file.id)
        return file, batch, answers, listed, files, deleted

    file, batch, answers, listed, files, deleted = app.run(scenario())
    assert (batch.request_counts.completed, batch.metadata, batch.errors) == (5, {"a": "b"}, None)
    assert len(answers.splitlines()) == 5
    assert (listed, files) == ([batch.id], [file.id])
    assert deleted.deleted
    with pytest.raises(openai.NotFoundError):
        app.run(client.files.retrieve(file.id))
