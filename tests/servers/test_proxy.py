"""A call that is passed on, when either side of it leaves."""

from __future__ import annotations

import asyncio
import json

import pytest

from tureen.api_workers.proxy import answer_passed, pass_on

SCOPE = {
    "type": "http",
    "method": "POST",
    "scheme": "http",
    "http_version": "1.1",
    "path": "/generate",
    "raw_path": b"/generate",
    "query_string": b"",
    "headers": [],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
}
HEAD = {"type": "http.response.start", "status": 200, "headers": []}


async def passed(path, app, receive):
    """What a client is sent by a front that passes its call to `app`."""
    sent = []

    async def send(message):
        sent.append(message)

    async def answer(reader, writer):
        if app is None:
            writer.close()
        else:
            await answer_passed(app, reader, writer)

    server = await asyncio.start_unix_server(answer, path=path)
    async with server:
        await pass_on(path, dict(SCOPE), receive, send)
    return sent


def silent(gone=None):
    """The receive function of a client that has sent all; it stays, or leaves once `gone` is set."""
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await (asyncio.Event() if gone is None else gone).wait()
        return {"type": "http.disconnect"}

    return receive


async def until_left(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


def test_whichever_side_of_a_call_leaves_the_other_is_told(tmp_path):
    a_client_that_leaves_is_no_error_of_the_server(tmp_path)
    a_client_hears_in_the_form_of_errors_that_the_other_front_has_left(tmp_path)
    an_answer_that_breaks_off_is_not_ended_as_if_it_were_whole(tmp_path)
    an_answer_that_needs_no_body_arrives_whole_while_the_body_still_comes(tmp_path)


def a_client_that_leaves_is_no_error_of_the_server(tmp_path):
    async def scenario(has_begun):
        gone, noticed = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            if has_begun:
                await send(HEAD)
            gone.set()
            await until_left(receive)
            noticed.set()

        await passed(str(tmp_path / "owner"), app, silent(gone))
        await noticed.wait()

    for has_begun in (False, True):
        asyncio.run(scenario(has_begun))


def a_client_hears_in_the_form_of_errors_that_the_other_front_has_left(tmp_path):
    sent = asyncio.run(passed(str(tmp_path / "owner"), None, silent()))
    assert sent[0]["status"] == 503
    body = b"".join(message.get("body", b"") for message in sent[1:])
    assert json.loads(body)["error"]["code"] == "front_gone"


def an_answer_that_breaks_off_is_not_ended_as_if_it_were_whole(tmp_path):
    async def app(scope, receive, send):
        await send(HEAD)
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ConnectionError

    with pytest.raises(ConnectionAbortedError):
        asyncio.run(passed(str(tmp_path / "owner"), app, silent()))


def an_answer_that_needs_no_body_arrives_whole_while_the_body_still_comes(tmp_path):
    async def app(scope, receive, send):
        await send(HEAD | {"status": 413})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def scenario():
        begun, sent = asyncio.Event(), []

        async def receive():
            await begun.wait()
            return {"type": "http.request", "body": bytes(1 << 16), "more_body": True}

        async def send(message):
            sent.append(message)
            begun.set()
            for _ in range(100):  # meanwhile the body goes to one who does not read it
                await asyncio.sleep(0)

        async def answer(reader, writer):
            await answer_passed(app, reader, writer)

        async with await asyncio.start_unix_server(answer, path=str(tmp_path / "owner")):
            await pass_on(str(tmp_path / "owner"), dict(SCOPE), receive, send)
        return sent

    sent = asyncio.run(scenario())
    assert [message.get("status") for message in sent] == [413, None]
