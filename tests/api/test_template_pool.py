"""Chat templates that leave no chance to look at a clock: their chat is refused, and the next one is answered."""

# ruff: noqa: E501 - a template is a line

from __future__ import annotations

import asyncio
import marshal
import os
import resource
import signal
from datetime import datetime

import pytest
from byte_tokenizer import make_byte_tokenizer

from tureen.errors import InvalidRequest, Unavailable
from tureen.requests import template_pool, template_worker
from tureen.requests.template_pool import TemplatePool
from tureen.sandbox.worker import Lost, Worker
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
    pool.supervisor.close()


def _make_template(pool, source):
    return ChatTemplate(source, ControlTokens(make_byte_tokenizer()), tokens={}, placeholders={}, do=pool.do)


def _job(source, **values):
    return write_job(marshal.dumps(Sandbox().code_of(source, lambda tree: tree)), Variables(values))


def test_what_a_template_renders_is_the_same_in_the_pool(pool):
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


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_single_operation_that_takes_for_ever_is_ended_and_the_next_chat_is_answered(pool, monkeypatch, source):
    receive = Worker.receive

    def receive_or_end(worker, *args):
        """As the limit on CPU time does, which counts in seconds, but after a tenth of one."""
        while not worker.wait_readable(0.01):
            if worker.cpu_s > 0.1:
                os.kill(worker.pid, signal.SIGXCPU)
        return receive(worker, *args)

    monkeypatch.setattr(Worker, "receive", receive_or_end)
    template = _make_template(pool, "{% if messages[0].content == 'go' %}" + source + "{% endif %}ok")
    with pytest.raises(InvalidRequest, match=r"cannot write these: it takes more than 2 s of CPU time") as refused:
        template.render([{"role": "user", "content": "go"}])
    assert (refused.value.code, refused.value.status) == ("chat_template_limit", 400)
    monkeypatch.undo()
    assert template.render([{"role": "user", "content": "x"}]) == "ok"


def test_the_limit_is_of_cpu_time(pool, monkeypatch):
    def grant_one_second(worker):
        resource.prlimit(worker.pid, resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))

    monkeypatch.setattr(Worker, "_grant_cpu", grant_one_second)
    assert (
        pool.do(_job(ENDLESS["equal"]))
        == LIMIT + b"it takes more than 2 s of CPU time, or more than 1024 MiB of memory"
    )


def test_a_worker_that_is_ended_from_outside_is_replaced_without_a_word(pool):
    pool.do(_job("a"))
    os.kill(pool._idle[-1].pid, signal.SIGKILL)
    assert pool.do(_job("{{ 'b' }}")) == TEXT + b"b"
    job = _job("{{ 'c' }}")

    async def soon():
        worker = pool.take_idle(job)
        os.kill(worker.pid, signal.SIGKILL)
        return await pool.do_soon(worker, job)

    assert asyncio.run(soon()) == TEXT + b"c"


def test_an_answer_that_nobody_waits_for_any_more_is_not_the_next_chat_s(pool):
    job = _job("{% for i in range(99999) %}{% endfor %}first")

    async def leave():
        task = asyncio.create_task(pool.do_soon(pool.take_idle(job), job))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    pool.do(job)
    asyncio.run(leave())
    assert pool.do(_job("second")) == TEXT + b"second"
    assert pool._num_used == 0


def test_a_worker_that_does_not_get_to_run_is_no_fault_of_the_chat(pool, monkeypatch):
    pool.do(_job("a"))

    def starved(*_):
        raise Lost("it did not answer in time", is_late=True)

    monkeypatch.setattr(Worker, "receive", starved)
    with pytest.raises(Unavailable):
        pool.do(_job("b"))
    monkeypatch.undo()
    assert pool.do(_job("c")) == TEXT + b"c"


def test_no_worker_can_open_files_or_use_more_memory_than_it_may(pool):
    assert template_worker.LIMITS.is_sealed
    big = (
        "{% set ns = namespace(x=[]) %}{% for i in range(400) %}{% set ns.x = ns.x + ['x' * 8000000 ~ i] %}{% endfor %}"
    )
    assert b"much" in pool.do(_job(big)) or b"MiB" in pool.do(_job(big))


def test_all_servers_of_a_process_share_one_pool():
    assert template_pool.template_pool() is template_pool.template_pool()
