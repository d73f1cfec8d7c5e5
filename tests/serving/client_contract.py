"""What every engine client promises, over engines that `fake_engine:make_slow_engine` makes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from fake_engine import make_request
from timeouts import until

from tureen.contract.types import EngineStats
from tureen.errors import InvalidRequest, NotFound, RequestFailed, Unavailable

ENDLESS = 2000
"""Tokens of an answer that ends before a test does only where a test is held up for twenty seconds."""


async def collect(client, request):
    """(text, token ids, finish) of a request."""
    text, ids = "", []
    async for delta in client.generate(request):
        assert delta.id == request.id
        text += delta.text
        ids += delta.token_ids
        last = delta
    return text, ids, last.finish


async def keeps_the_contract(client, phases):
    """phases: that it has reported as it started. Closes it."""
    assert (client.info.model_name, client.info.vocab_size) == ("fake-model", 258)
    assert ("load weights", 1, 1) in phases
    for part in (generating, spacing, aborting, leaving, calling, refusing, closing):
        await part(client)


async def generating(client):
    before = client.stats.total_output_tokens
    text, ids, finish = await collect(client, make_request("one", "say:héllo"))
    assert (text, bytes(ids[:-1]).decode()) == ("héllo", "héllo")
    assert (finish.type, finish.matched) == ("stop", 256)
    alone = await collect(client, make_request("alone", "abc"))
    together = await asyncio.gather(*(collect(client, make_request(f"{i}", "abc")) for i in range(30)))
    assert [one[:2] for one in together] == [alone[:2]] * 30
    await until(lambda: client.stats.num_running == 0)
    assert client.stats.total_output_tokens - before == 31 * 20 + 7


async def spacing(client):
    sizes = [len(delta.token_ids) async for delta in client.generate(make_request("spaced", "abc"), 8)]
    assert (sizes[0], sum(sizes)) == (1, 20)
    assert all(size >= 8 for size in sizes[1:-1])


async def aborting(client):
    task = asyncio.create_task(collect(client, make_request("abort-me", max_new_tokens=ENDLESS)))
    await until(lambda: client.stats.num_running == 1)
    client.abort("abort")  # a prefix of an id is no id
    client.abort("nobody")
    seen = client.stats.total_output_tokens
    await until(lambda: client.stats.total_output_tokens > seen + 3)
    assert not task.done()
    client.abort("abort-me", "why")
    client.abort("abort-me")
    text, ids, finish = await task
    assert (finish.type, finish.reason) == ("abort", "why")
    assert len(text) == len(ids) < ENDLESS
    client.abort("abort-me")
    assert (await collect(client, make_request("abort-me", "say:a")))[0] == "a"


async def leaving(client):
    stream = client.generate(make_request("leave", max_new_tokens=1000))
    await anext(stream)
    await stream.aclose()
    await until(lambda: client.stats.num_running == 0)
    tasks = [asyncio.create_task(collect(client, make_request(f"leave{i}", max_new_tokens=1000))) for i in range(40)]
    await until(lambda: client.stats.num_running > 1 and client.stats.num_queued)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: client.stats.num_running == client.stats.num_queued == 0)


async def calling(client):
    freed = await client.call("flush_cache")
    assert type(freed) is int
    assert msgspec.convert(await client.call("stats"), EngineStats).num_pages == 256
    with pytest.raises(NotFound, match="nope"):
        await client.call("nope")
    answers = await asyncio.gather(*(client.call("stats") for _ in range(20)))
    assert len(answers) == 20
    task = asyncio.create_task(collect(client, make_request("busy", max_new_tokens=ENDLESS)))
    await until(lambda: client.stats.num_running == 1)
    with pytest.raises(InvalidRequest):
        await client.call("flush_cache")
    client.abort("busy")
    assert (await task)[2].type == "abort"


async def refusing(client):
    with pytest.raises(InvalidRequest) as refused:
        await collect(client, make_request("long", max_new_tokens=5000))
    assert refused.value.field == "max_new_tokens"
    with pytest.raises(RequestFailed) as failed:
        await collect(client, make_request("wrong", "say:ab\x01c"))
    assert failed.value.code == "nan_logits"
    first = client.generate(make_request("twice", max_new_tokens=ENDLESS))
    await anext(first)
    with pytest.raises(InvalidRequest):
        await collect(client, make_request("twice"))
    assert (await anext(first)).finish is None
    await first.aclose()


async def closing(client):
    assert client.failure is None
    task = asyncio.create_task(collect(client, make_request("r", max_new_tokens=ENDLESS)))
    await until(lambda: client.stats.num_running == 1)
    await client.close()
    finish = (await task)[2]
    assert (finish.type, finish.reason) == ("abort", "shutdown")
    await client.close()  # idempotent
    with pytest.raises(Unavailable):
        await collect(client, make_request("late"))


async def spares_the_others(client, salt="die"):
    """A request whose salt makes the engine raise or abort is ended, and no other."""
    alone = [await collect(client, make_request(f"r{i}", "ab" * i + "c", max_new_tokens=30)) for i in range(4)]
    tasks = [
        asyncio.create_task(collect(client, make_request(f"s{i}", "ab" * i + "c", max_new_tokens=30))) for i in range(4)
    ]
    killer = asyncio.create_task(collect(client, make_request("killer", cache_salt=salt)))
    assert await asyncio.gather(*tasks) == alone
    with pytest.raises(RequestFailed) as failed:
        await killer
    assert failed.value.code == "poison"
    assert "scripted" not in str(failed.value)
    await until(lambda: client.health.state == "healthy")
    assert (await collect(client, make_request("after", "say:a")))[0] == "a"
    assert client.failure is None
