"""What is kept of responses and conversations, for whom, how long, and how much of it."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest

from tureen.errors import InvalidRequest, NotFound, PayloadTooLarge, StartupError, TureenError
from tureen.storage import packing
from tureen.storage.database import size_of
from tureen.storage.responses import Continued, ResponseStore

MIB = 1 << 20
DAY_S = 86400.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path, clock):
    """Runs a scenario over a store; each call opens the same file again."""

    def run(scenario: Callable[[ResponseStore], Awaitable[Any]], **settings: Any) -> Any:
        async def opened() -> Any:
            defaults = {"ttl_s": DAY_S, "max_bytes": 64 * MIB, "max_context_bytes": 32 * MIB, "clock": clock}
            store = ResponseStore(str(tmp_path / "store.db"), **(defaults | settings))
            try:
                return await scenario(store)
            finally:
                await store.close()

        return asyncio.run(opened())

    return run


def item(text: str, name: str = "") -> dict[str, Any]:
    return {"type": "message", "id": name or f"msg_{text[:20]}", "role": "user", "content": text}


def response(name: str, *output: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    return {"id": name, "status": status, "output": list(output)}


async def turn(store: ResponseStore, owner: str, name: str, previous: str | None = None, size: int = 1, **more) -> None:
    """One question and its answer, that continue `previous`."""
    continued = await store.continued(owner, previous=previous, conversation=more.get("conversation"))
    asked, said = item(f"{name}?" * size, f"ask_{name}"), item(f"{name}!" * size, f"say_{name}")
    await store.add(owner, response(name, said), [asked], continued)


def texts(items) -> list[str]:
    return [found["content"] for found in items]


async def error_of(work: Awaitable[Any]) -> TureenError:
    with pytest.raises(TureenError) as failed:
        await work
    return failed.value


def test_what_continues_a_response_reads_all_that_it_continues_in_order(run):
    async def write(store):
        await turn(store, "", "a")
        await turn(store, "", "b", "a")
        await turn(store, "", "other", "a")
        await turn(store, "", "c", "b")

    async def read(store):
        continued = await store.continued("", previous="c", conversation=None)
        return texts(continued.items), texts(await store.items_of_request("", "c")), await store.find("", "b")

    run(write)
    context, items, found = run(read)
    assert context == ["a?", "a!", "b?", "b!", "c?", "c!"]
    assert items == ["a?", "a!", "b?", "b!", "c?"]
    assert found.response == response("b", item("b!", "say_b"))


def test_a_client_never_finds_what_is_another_s(run):
    async def scenario(store):
        await turn(store, "ada", "r")
        await store.conversations.add("ada", "conv", {}, [item("x")])
        await turn(store, "ada", "in_conv", conversation="conv")
        seen = []
        for owner in ("bob", ""):
            for work in (
                store.find(owner, "r"),
                store.delete(owner, "r"),
                store.items_of_request(owner, "r"),
                store.continued(owner, previous="r", conversation=None),
                store.continued(owner, previous=None, conversation="conv"),
                store.conversations.find(owner, "conv"),
                store.conversations.describe(owner, "conv", {}),
                store.conversations.delete(owner, "conv"),
                store.conversations.items(owner, "conv"),
                store.conversations.add_items(owner, "conv", [item("y")]),
                store.conversations.item(owner, "conv", "msg_x"),
                store.conversations.delete_item(owner, "conv", "msg_x"),
            ):
                seen.append(await error_of(work))
            await turn(store, owner, "r")  # their own of the same name
        assert {type(error) for error in seen} == {NotFound}
        assert {error.message for error in seen} == {
            (await error_of(store.find("", "gone"))).message.replace("gone", "r"),
            (await error_of(store.conversations.find("", "gone"))).message.replace("gone", "conv"),
        }
        assert texts((await store.continued("ada", previous=None, conversation="conv")).items)[0] == "x"
        await store.end("bob", response("in_conv", item("stolen")))
        return (await store.find("ada", "in_conv")).response

    assert run(scenario)["output"][0]["content"] == "in_conv!"


def test_a_response_is_kept_for_its_time_and_no_longer(run, clock):
    async def scenario(store):
        await turn(store, "", "a")
        await store.conversations.add("", "conv", {}, [])
        clock.now_s += DAY_S - 1
        await store.sweep()
        await store.find("", "a")
        await store.conversations.find("", "conv")
        clock.now_s += 1
        assert isinstance(await error_of(store.find("", "a")), NotFound)
        assert isinstance(await error_of(store.conversations.find("", "conv")), NotFound)
        await store.sweep()
        clock.now_s = 1000.0  # now it is not the time that hides it
        assert isinstance(await error_of(store.find("", "a")), NotFound)
        assert isinstance(await error_of(store.conversations.find("", "conv")), NotFound)

    run(scenario)


def test_to_continue_a_response_or_a_conversation_lets_all_of_it_live_on(run, clock):
    async def scenario(store):
        await store.conversations.add("", "conv", {}, [])
        await turn(store, "", "a")
        for name, previous in (("b", "a"), ("c", "b"), ("d", "c")):
            clock.now_s += DAY_S - 1
            await store.sweep()
            await turn(store, "", name, previous)
            await turn(store, "", f"conv_{name}", conversation="conv")
        clock.now_s += DAY_S - 1
        await store.sweep()
        continued = await store.continued("", previous=None, conversation="conv")
        return len((await store.continued("", previous="d", conversation=None)).items), len(continued.items)

    assert run(scenario) == (8, 6)


def test_what_was_deleted_is_not_continued(run):
    async def scenario(store):
        await turn(store, "", "a")
        await turn(store, "", "b", "a")
        await turn(store, "", "c", "b")
        await store.delete("", "a")
        error = await error_of(store.continued("", previous="c", conversation=None))
        await turn(store, "", "a")
        again = await error_of(store.continued("", previous="c", conversation=None))
        return error, again

    error, again = run(scenario)
    assert isinstance(error, NotFound)
    assert error.code == "previous_response_not_found"
    assert "start again" in error.message
    assert again.message == error.message, "a new response of the old name is another one"


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_only_what_gave_an_answer_is_continued(run, status):
    async def scenario(store):
        await store.add("", response("a", status=status), [item("x")], Continued())
        return await error_of(store.continued("", previous="a", conversation=None))

    error = run(scenario)
    assert isinstance(error, InvalidRequest)
    assert error.field == "previous_response_id"


def test_a_response_that_was_cut_is_continued_unless_it_was_cut_in_a_call(run):
    call = {"type": "function_call", "id": "fc", "name": "f", "arguments": '{"a', "status": "incomplete"}

    async def scenario(store):
        await store.add("", response("text", item("x"), status="incomplete"), [], Continued())
        await store.add("", response("call", call, status="incomplete"), [], Continued())
        continued = await store.continued("", previous="text", conversation=None)
        return texts(continued.items), await error_of(store.continued("", previous="call", conversation=None))

    items, error = run(scenario)
    assert items == ["x"]
    assert "in the middle of a tool call" in error.message


def test_a_response_of_a_conversation_reads_it_as_it_was(run):
    async def scenario(store):
        await store.conversations.add("", "conv", {}, [item("hello")])
        await turn(store, "", "a", conversation="conv")
        await turn(store, "", "b", conversation="conv")
        await turn(store, "", "after a", "a")
        whole = await store.conversations.items("", "conv")
        return [
            texts(whole),
            texts(await store.items_of_request("", "b")),
            texts(await store.items_of_request("", "after a")),
        ]

    whole, of_b, after_a = run(scenario)
    assert whole == ["hello", "a?", "a!", "b?", "b!"]
    assert of_b == ["hello", "a?", "a!", "b?"]
    assert after_a == ["hello", "a?", "a!", "after a?"]


def test_items_of_a_conversation_come_and_go(run):
    async def scenario(store):
        made = await store.conversations.add("", "conv", {"topic": "x"}, [item("one")])
        await store.conversations.add_items("", "conv", [item("two"), item("three")])
        await store.conversations.delete_item("", "conv", "msg_two")
        gone = await error_of(store.conversations.item("", "conv", "msg_two"))
        told = await store.conversations.describe("", "conv", {"topic": "y"})
        found = texts(await store.conversations.items("", "conv"))
        assert (await store.conversations.item("", "conv", "msg_three"))["content"] == "three"
        await store.conversations.delete("", "conv")
        after = await error_of(store.conversations.items("", "conv"))
        return made, gone.code, told, found, after.code

    made, gone, told, found, after = run(scenario)
    assert made == {"id": "conv", "object": "conversation", "created_at": 1000, "metadata": {"topic": "x"}}
    assert told == made | {"metadata": {"topic": "y"}}
    assert (gone, found, after) == ("item_not_found", ["one", "three"], "conversation_not_found")


def test_what_ran_when_the_server_ended_has_failed_at_the_next_start(run):
    async def before(store):
        await store.add("", response("q", status="queued"), [item("x")], Continued())
        await store.add("", response("p", status="in_progress"), [item("x")], Continued())
        await turn(store, "", "done")

    async def after(store):
        return [(await store.find("", name)).response for name in ("q", "p", "done")]

    run(before)
    queued, running, done = run(after)
    for lost in (queued, running):
        assert lost["status"] == "failed"
        assert lost["error"]["code"] == "server_error"
        assert "the server ended while it generated this response" in lost["error"]["message"]
    assert done["status"] == "completed"


def test_how_a_running_response_ends_is_kept_with_its_stream_and_in_its_conversation(run):
    call = {"type": "function_call", "id": "fc", "name": "f", "arguments": '{"a', "status": "incomplete"}

    async def scenario(store):
        await store.conversations.add("", "conv", {}, [])
        for name, status in (("a", "completed"), ("b", "failed"), ("c", "incomplete")):
            continued = await store.continued("", previous=None, conversation="conv")
            await store.add("", response(name, status="queued"), [item(f"{name}?")], continued)
            assert texts(await store.conversations.items("", "conv")) == texts(continued.items)
            await store.end("", response(name, item(f"{name}!"), call, status=status), b"data: 1\n\n" * 3)
        await store.end("", response("never", item("x")))
        return await store.find("", "a"), await store.conversations.items("", "conv")

    found, items = run(scenario)
    assert found.events == b"data: 1\n\n" * 3
    assert found.response["status"] == "completed"
    assert texts(items) == ["a?", "a!", "c?", "c!"], "a call that was cut cannot be continued, nor what failed"


def test_the_file_does_not_grow_beyond_its_limit(run, tmp_path):
    noise = [os.urandom(3000).hex() for _ in range(10)]

    async def fill(store):
        for number in range(600):
            await store.add("", response(f"r{number}"), [item(noise[number % 10] + str(number), "m")], Continued())
        found = []
        for number in range(600):
            try:
                await store.find("", f"r{number}")
            except NotFound:
                continue
            found.append(number)
        return found

    found = run(fill, max_bytes=MIB)
    assert len(found) > 100
    assert found == list(range(found[0], 600)), "the oldest are dropped"
    assert (tmp_path / "store.db").stat().st_size < 1.1 * MIB


def test_room_is_made_at_the_cost_of_who_takes_most(run):
    noise = os.urandom(3000).hex()

    async def scenario(store):
        await turn(store, "modest", "r")
        await store.conversations.add("modest", "conv", {}, [item("x")])
        for number in range(600):
            await store.add("greedy", response(f"r{number}"), [item(noise + str(number), "m")], Continued())
        await store.find("modest", "r")
        await store.conversations.find("modest", "conv")
        return await error_of(store.find("greedy", "r0"))

    assert isinstance(run(scenario, max_bytes=MIB), NotFound)


def test_what_runs_is_not_dropped_to_make_room(run):
    noise = os.urandom(3000).hex()

    async def scenario(store):
        await store.add("", response("running", status="queued"), [item("x")], Continued())
        for number in range(600):
            await store.add("", response(f"r{number}"), [item(noise + str(number), "m")], Continued())
        await store.end("", response("running", item("done")))
        return (await store.find("", "running")).response["status"]

    assert run(scenario, max_bytes=MIB) == "completed"


def test_no_more_is_read_than_a_request_may_have(run):
    async def scenario(store):
        await turn(store, "", "a", size=3000)
        await turn(store, "", "b", "a", size=3000)
        await store.conversations.add("", "conv", {}, [item("x" * 20000)])
        await store.continued("", previous="a", conversation=None)
        errors = [
            await error_of(store.continued("", previous="b", conversation=None)),
            await error_of(store.continued("", previous=None, conversation="conv")),
        ]
        with pytest.raises(PayloadTooLarge) as refused:
            store.check_size(17 * MIB)
        return [*errors, refused.value]

    chained, conversation, single = run(scenario, max_context_bytes=16000)
    assert isinstance(chained, PayloadTooLarge)
    assert isinstance(conversation, PayloadTooLarge)
    assert chained.field == "previous_response_id"
    assert conversation.field == "conversation"
    assert str(16 * MIB) in single.message


def test_of_two_responses_of_one_name_that_come_at_once_the_second_is_refused_by_its_name(run):
    async def scenario(store):
        await turn(store, "ada", "mine")
        return await error_of(turn(store, "ada", "mine"))

    error = run(scenario)
    assert (error.status, error.field, error.code) == (400, "rid", "duplicate_rid")


def test_a_name_that_is_taken_is_refused_before_work_begins(run):
    async def scenario(store):
        await turn(store, "ada", "mine")
        await store.check_free("bob", "mine")
        return await error_of(store.check_free("ada", "mine"))

    error = run(scenario)
    assert (error.field, error.code) == ("rid", "duplicate_rid")


def test_a_file_whose_running_responses_cannot_be_read_stops_the_start(run, tmp_path):
    async def write(store):
        await store.add("", response("q", status="queued"), [item("x")], Continued())
        await store._database.run(lambda connection: connection.execute("UPDATE responses SET response = x'00'"))

    run(write)
    with pytest.raises(StartupError, match=r"--responses-store .*store.db: .*is damaged") as refused:
        run(write)
    with closing(sqlite3.connect(tmp_path / "store.db", timeout=0)) as connection:  # it is let go
        assert connection.execute("SELECT count(*) FROM responses").fetchone() == (1,)
    assert refused.traceback


def test_room_is_made_at_the_cost_of_conversations_that_have_nothing_but_metadata_too(run):
    async def scenario(store: ResponseStore) -> None:
        await turn(store, "small", "r")
        for number in range(60):
            notes = {str(note): os.urandom(250).hex() for note in range(16)}
            await store.conversations.add("large", f"conv_{number}", notes, [])
        await store.find("small", "r")
        with pytest.raises(NotFound):
            await store.conversations.find("large", "conv_0")
        await store.conversations.find("large", "conv_59")

    run(scenario, max_bytes=MIB // 4)


def test_room_among_many_rows_is_made_in_a_few_looks_at_them(run):
    async def scenario(store: ResponseStore) -> int:
        looks = list[str]()

        def fill(connection: sqlite3.Connection) -> None:
            row = "INSERT INTO responses (owner, id, status, expires_s, num_bytes, input, response)"
            rows = [("a", f"r{number}", 1e9 + number, os.urandom(300)) for number in range(3000)]
            connection.executemany(f"{row} VALUES (?, ?, 'completed', ?, 300, '', ?)", rows)
            store._max_bytes = size_of(connection) - 1
            connection.set_trace_callback(looks.append)

        await store._database.run(fill)
        await turn(store, "a", "r")
        assert isinstance(await error_of(store.find("a", "r0")), NotFound)
        return sum("GROUP BY owner" in statement for statement in looks)

    assert 0 < run(scenario) <= 12, "some 300 rows have to go"


def test_a_conversation_that_no_request_could_continue_takes_no_more_items(run):
    async def scenario(store: ResponseStore) -> None:
        await store.conversations.add("a", "conv", {}, [])
        await store.conversations.add_items("a", "conv", [item("x" * 30_000)])
        refused = await error_of(store.conversations.add_items("a", "conv", [item("x" * 30_000)]))
        assert isinstance(refused, PayloadTooLarge)
        assert refused.field == "items"
        assert len(await store.conversations.items("a", "conv")) == 1

    run(scenario, max_context_bytes=50_000)


def test_nothing_is_compressed_on_the_event_loop(run, monkeypatch):
    seen = list[str]()

    def compress(plain: bytes, level: int) -> bytes:
        seen.append(threading.current_thread().name)
        return zlib_compress(plain, level)

    zlib_compress = packing.zlib.compress
    monkeypatch.setattr(packing.zlib, "compress", compress)

    async def scenario(store: ResponseStore) -> None:
        await store.add("a", response("r", status="queued"), [item("x")], Continued())
        await store.end("a", response("r", item("y")), b"event: x\n\n")
        await store.conversations.add("a", "conv", {"a": "b"}, [item("x")])

    run(scenario)
    assert len(seen) == 6
    assert all(name.startswith("storage") for name in seen)


def test_an_item_that_is_named_again_and_again_counts_each_time(run):
    async def scenario(store: ResponseStore) -> TureenError:
        await turn(store, "a", "r", size=2000)
        items, num_bytes = await store.items_named("a", ["say_r", "say_r", "missing"])
        assert (list(items), num_bytes) == (["say_r"], 2 * len(json.dumps(items["say_r"], separators=(",", ":"))))
        return await error_of(store.items_named("a", ["say_r"] * 5))

    refused = run(scenario, max_context_bytes=20_000)
    assert isinstance(refused, PayloadTooLarge)
    assert refused.field == "input"


def test_items_of_conversations_are_looked_for_once_for_all_names(run):
    """Not once for each: the file has one thread, which all clients share."""

    async def scenario(store: ResponseStore) -> int:
        await store.conversations.add("a", "conv", {}, [item("x", f"msg_{number}") for number in range(400)])
        turns = list[int]()
        await store._database.run(
            lambda connection: connection.set_progress_handler(lambda: turns.append(1), 1000)  # operations of SQLite
        )
        assert await store.items_named("a", [f"not_{number}" for number in range(400)]) == ({}, 0)
        return len(turns)

    assert run(scenario) < 40
