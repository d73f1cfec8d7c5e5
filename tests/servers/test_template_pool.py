"""Chat templates that leave no chance to look at a clock: their chat is refused, and the next one is answered."""

# ruff: noqa: E501 - a template is a line

from __future__ import annotations

import asyncio
import marshal
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from byte_tokenizer import make_byte_tokenizer

from tureen.errors import InvalidRequest, Unavailable
from tureen.requests import template_pool, template_worker
from tureen.requests.helpers import Helpers
from tureen.requests.template_pool import TemplatePool
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.worker import Lost, Worker, readable
from tureen.text.chat_template import ChatTemplate
from tureen.text.control_tokens import ControlTokens
from tureen.text.template_jobs import FAILURE, LIMIT, TEXT, Variables, do_job, write_job
from tureen.text.template_sandbox import Sandbox

DEEP = "{% set a = namespace(x=[0]) %}{% set b = namespace(x=[0]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}"
LONG = "{% set a = 'a' * 4000000 %}{% set b = 'a' * 2000000 + 'b' + 'a' * 1000000 %}"
ENDLESS = {
    "equal": DEEP + "{{ a.x == b.x }}",
    "less": DEEP + "{{ a.x < b.x }}",
    "in": DEEP + "{{ a.x in [b.x] }}",
    "sort": DEEP + "{{ [a.x, b.x] | sort | length }}",
    "index": DEEP + "{{ [b.x].index(a.x) }}",
    "count": DEEP + "{{ [b.x].count(a.x) }}",
    "max": DEEP + "{{ [a.x, b.x] | max | length }}",
    "the test eq": DEEP + "{{ a.x is eq(b.x) }}",
    "selectattr": DEEP + "{{ [{'k': a.x}] | selectattr('k', 'equalto', b.x) | list | length }}",
    "rfind": LONG + "{{ a.rfind(b) }}",
    "rindex": LONG + "{{ a.rindex(b) }}",
    "rpartition": LONG + "{{ a.rpartition(b) | length }}",
    "rsplit": LONG + "{{ a.rsplit(b) | length }}",
    "strip": "{% set a = range(90000) | map('string') | join %}{% set c = 'x' * 8000000 + a %}{{ (c * 2).strip(c) | length }}",
    "dictsort": DEEP + "{{ {'a': a.x, 'b': b.x} | dictsort(by='value') | length }}",
}
"""Templates with a single operation that takes for ever."""


@pytest.fixture(scope="module")
def pool():
    pool = TemplatePool()
    yield pool
    pool.close()


def _make_template(pool, source):
    return ChatTemplate(source, ControlTokens(make_byte_tokenizer()), tokens={}, placeholders={}, do=pool.do)


def _job(source, **values):
    return write_job(marshal.dumps(Sandbox().code_of(source, lambda tree: tree)), Variables(values))


def test_a_template_is_rendered_in_a_sealed_worker_with_limits_of_time_and_memory(pool, monkeypatch):
    what_a_template_renders_is_the_same_in_the_pool(pool)
    no_worker_can_open_files_or_use_more_memory_than_it_may(pool)
    the_limit_is_of_cpu_time(pool, monkeypatch)


def what_a_template_renders_is_the_same_in_the_pool(pool):
    values = {"messages": [{"content": "ä\ud800 \U0001f600", "n": 1 << 99, "x": 1.5}], "tools": None}
    for source in (
        "{{ messages[0].content }}{{ messages | tojson }}{{ tools }}",
        "{{ strftime_now('%Y-%m-%d') }}",
        "{{ missing.attribute }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0]['x'] + 'a' }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' * 99999999 }}",
    ):
        assert pool.do(_job(source, **values)) == do_job(_job(source, **values))
    assert pool.do(_job("{{ strftime_now('%Y-%m') }}")) == TEXT + datetime.now().strftime("%Y-%m").encode()
    assert pool.do(_job("{{ missing.attribute }}"))[:1] == FAILURE
    assert pool.supervisor.num_replaced == 0


def test_a_single_operation_that_takes_for_ever_is_ended_and_the_next_chat_is_answered(pool, monkeypatch):
    receive = Worker.receive

    def receive_or_end(worker, *args):
        """As the limit on CPU time does, which counts in seconds, but after a tenth of one."""
        while not worker.wait_readable(0.01):
            if worker.cpu_s > 0.1:
                os.kill(worker.pid, signal.SIGXCPU)
        return receive(worker, *args)

    for name, source in ENDLESS.items():
        template = _make_template(pool, "{% if messages[0].content == 'go' %}" + source + "{% endif %}ok")
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "receive", receive_or_end)
            with pytest.raises(InvalidRequest) as refused:
                template.render([{"role": "user", "content": "go"}])
        assert (refused.value.code, refused.value.status) == ("chat_template_limit", 400), name
        assert "cannot render these: it takes more than 2 s of CPU time" in refused.value.message, name
        assert template.render([{"role": "user", "content": "x"}]) == "ok", name


def the_limit_is_of_cpu_time(pool, monkeypatch):
    def grant_one_second(worker):
        resource.prlimit(worker.pid, resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))

    monkeypatch.setattr(Worker, "_grant_cpu", grant_one_second)
    assert (
        pool.do(_job(ENDLESS["equal"]))
        == LIMIT + b"it takes more than 2 s of CPU time, or more than 1024 MiB of memory"
    )


def a_worker_that_is_ended_from_outside_is_replaced_without_a_word(pool, _):
    pool.do(_job("a"))
    os.kill(pool._idle[-1].pid, signal.SIGKILL)
    assert pool.do(_job("{{ 'b' }}")) == TEXT + b"b"
    os.kill(pool._idle[-1].pid, signal.SIGKILL)
    assert asyncio.run(pool.do_soon(_job("{{ 'c' }}"))) == TEXT + b"c"


def a_worker_that_the_memory_budget_ends_is_replaced_and_the_chat_is_rendered(pool, monkeypatch):
    killed = []

    def killed_once(send):
        def killed_then_sent(worker, *args, **options):
            if not killed:
                killed.append(worker)
                worker.kill()
            return send(worker, *args, **options)

        return killed_then_sent

    pool.do(_job("a"))
    monkeypatch.setattr(Worker, "receive", killed_once(Worker.receive))
    assert pool.do(_job("{{ 'b' }}")) == TEXT + b"b"
    for call in ("try_send", "has_reply"):
        killed.clear()
        monkeypatch.undo()
        pool.do(_job("a"))
        monkeypatch.setattr(Worker, call, killed_once(getattr(Worker, call)))
        assert asyncio.run(pool.do_soon(_job("{{ 'c' }}"))) == TEXT + b"c"
        assert killed
    monkeypatch.undo()
    monkeypatch.setattr(Worker, "send", lambda worker, *args, **options: worker.kill())
    with pytest.raises(Unavailable):
        pool.do(_job("d"))
    assert pool._num_used == 0


def an_error_gives_the_place_of_a_chat_free(pool, monkeypatch):
    def fails(*_):
        raise OSError("too many open files")

    pool.do(_job("a"))
    monkeypatch.setattr(Worker, "is_alive", property(fails))
    with pytest.raises(OSError, match="too many"):
        pool.do(_job("a"))
    monkeypatch.undo()
    pool.do(_job("a"))
    monkeypatch.setattr(Worker, "is_alive", property(fails))
    with pytest.raises(OSError, match="too many"):
        asyncio.run(pool.do_soon(_job("a")))
    monkeypatch.undo()
    assert pool._num_used == 0
    assert pool.supervisor.workers == pool._idle


def test_chats_wait_for_each_other_alone_and_in_order(pool):
    chats_beyond_the_workers_wait_their_turn_on_the_event_loop_and_in_order(pool)
    other_work_in_threads_does_not_keep_a_chat_waiting(pool)


def chats_beyond_the_workers_wait_their_turn_on_the_event_loop_and_in_order(pool):
    turns = [pool._ask_turn() for _ in range(template_pool.MAX_WORKERS)]
    ended = []

    async def chat(number):
        ended.append((await pool.do_soon(_job(f"{number}")))[1:])

    async def chats():
        tasks = [asyncio.create_task(chat(number)) for number in range(200)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        assert not ended
        pool._leave(turns.pop())
        await asyncio.wait(tasks)
        assert ended == [b"%d" % number for number in range(200) if number != 1]

    asyncio.run(chats())
    for turn in turns:
        pool._leave(turn)
    assert pool._num_used == 0


def other_work_in_threads_does_not_keep_a_chat_waiting(pool):
    is_rendered = threading.Event()

    async def chat():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        other = loop.run_in_executor(None, is_rendered.wait, 20)
        large = _job("{{ a | length }}", a="a" * template_pool.SMALL_BYTES)
        assert await pool.do_soon(large) == TEXT + b"%d" % template_pool.SMALL_BYTES
        is_rendered.set()
        assert await other

    asyncio.run(chat())


def test_the_pool_ends_with_its_last_server_and_a_later_server_has_another(monkeypatch):
    monkeypatch.setattr(template_pool, "_pools", [])
    first, second = MemoryBudget(1 << 40), MemoryBudget(1 << 40)
    servers = [Helpers(None, first) for _ in range(2)]
    pool = template_pool.template_pool()
    assert pool is template_pool.template_pool()
    assert template_pool.do(_job("a")) == TEXT + b"a"
    assert first.used_bytes > 0
    asyncio.run(servers[0].close())
    asyncio.run(servers[0].close())
    assert template_pool.do(_job("b")) == TEXT + b"b"
    processes = [os.pidfd_open(pid) for pid in (pool.supervisor.pid, pool._idle[0].pid)]
    turns = [pool._ask_turn() for _ in range(template_pool.MAX_WORKERS)]

    async def close_while_a_chat_waits():
        waiting = asyncio.create_task(pool.do_soon(_job("c")))
        await asyncio.sleep(0)
        await servers[1].close()
        with pytest.raises(Unavailable, match="shutting down"):
            await waiting

    asyncio.run(close_while_a_chat_waits())
    assert all(readable(120.0, process) for process in processes)
    for process in processes:
        os.close(process)
    for turn in turns:
        pool._leave(turn)
    with pytest.raises(Unavailable, match="shutting down"):
        template_pool.do(_job("d"))
    assert (pool.supervisor.workers, pool._num_used, first.used_bytes) == ([], 0, 0)

    third = Helpers(None, second)
    assert template_pool.do(_job("e")) == TEXT + b"e"
    assert (first.used_bytes, second.used_bytes > 0) == (0, True)
    asyncio.run(third.close())


def an_answer_that_nobody_waits_for_any_more_is_not_the_next_chat_s(pool, _):
    job = _job("{% for i in range(99999) %}{% endfor %}first")

    async def leave():
        task = asyncio.create_task(pool.do_soon(job))
        while pool._idle:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    pool.do(job)
    asyncio.run(leave())
    assert pool.do(_job("second")) == TEXT + b"second"
    assert pool._num_used == 0


def a_worker_that_does_not_get_to_run_is_no_fault_of_the_chat(pool, monkeypatch):
    pool.do(_job("a"))

    def starved(*_):
        raise Lost("it did not answer in time", is_late=True)

    monkeypatch.setattr(Worker, "receive", starved)
    with pytest.raises(Unavailable):
        pool.do(_job("b"))
    monkeypatch.undo()
    assert pool.do(_job("c")) == TEXT + b"c"


def no_worker_can_open_files_or_use_more_memory_than_it_may(pool):
    assert template_worker.LIMITS.is_sealed
    big = (
        "{% set ns = namespace(x=[]) %}{% for i in range(400) %}{% set ns.x = ns.x + ['x' * 8000000 ~ i] %}{% endfor %}"
    )
    assert b"much" in pool.do(_job(big)) or b"MiB" in pool.do(_job(big))


LOSSES = (
    a_worker_that_is_ended_from_outside_is_replaced_without_a_word,
    a_worker_that_the_memory_budget_ends_is_replaced_and_the_chat_is_rendered,
    an_error_gives_the_place_of_a_chat_free,
    an_answer_that_nobody_waits_for_any_more_is_not_the_next_chat_s,
    a_worker_that_does_not_get_to_run_is_no_fault_of_the_chat,
)


def test_no_chat_is_lost_or_blamed_with_a_worker_that_is_lost(pool, monkeypatch):
    for check in LOSSES:
        with monkeypatch.context() as patch:
            check(pool, patch)
