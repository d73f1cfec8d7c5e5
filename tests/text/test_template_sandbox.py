"""Hostile chat templates: they end with an error, soon, without much memory, and reach nothing of the server's."""

# ruff: noqa: E501 - a template is a line

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import threading
import tracemalloc
from datetime import datetime

import pytest
from byte_tokenizer import make_byte_tokenizer
from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError
from timeouts import PATIENCE_S

from tureen.errors import Unavailable
from tureen.requests.template_pool import TemplatePool
from tureen.sandbox.supervisor import Supervisor
from tureen.sandbox.worker import Lost
from tureen.text import template_sandbox
from tureen.text.chat_template import FAILURES, ChatTemplate
from tureen.text.control_tokens import ControlTokens
from tureen.text.template_jobs import Variables, do_job, write_job
from tureen.text.template_sandbox import MAX_CHARS, OverLimit, Sandbox

LOOPS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one list in itself": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "a filter for each": "{% set r = range(99999) | list %}{% for i in r %}{{ r | map('string') | list | length }}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a condition": "{% for i in range(99999) if i > 99998 %}{% endfor %}" * 200,
    "tests": "{% for i in range(99999) %}{{ range(99999) | select('odd') | list | length }}{% endfor %}",
    "a loop that calls itself": "{% for i in [[1]] * 9 recursive %}{{ loop([[1]] * 9) if loop.depth < 30 }}{% endfor %}",
    "comparisons": "{% set a = 'x' * 9999999 %}{% for i in range(99999) %}{{ a.count('xy') }}{% endfor %}",
}
BOMBS = {
    "times": "{{ 'x' * 1000000000 }}",
    "times the other way": "{{ 1000000000 * 'x' }}",
    "lists": "{{ [0] * 1000000000 }}",
    "doubling": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "joining": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "blocks": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "lists of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "their JSON": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "their text": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | upper }}",
    "powers": "{{ 10 ** 1000000000 }}",
    "powers of powers": "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a star": "{{ '%*d' % (1000000000, 1) }}",
    "the filter format": "{{ '%1000000000s' | format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format with a width": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format many": "{{ ('{0}' * 99999).format('x' * 9999999) }}",
    "percent many": "{{ ('%(a)s' * 99999) % {'a': 'x' * 9999999} }}",
    "replace": "{{ ('x' * 9999999).replace('x', 'y' * 9999999) }}",
    "the filter replace": "{{ ('x' * 9999999) | replace('', 'y' * 9999999) }}",
    "join": "{{ ('x' * 9999999).join(range(99999) | map('string')) }}",
    "the filter join": "{{ range(99999) | join('x' * 9999999) }}",
    "indent": "{{ ('\n' * 9999999) | indent(9999999) }}",
    "centre": "{{ 'x' | center(1000000000) }}",
    "justify": "{{ 'x'.ljust(1000000000) }}",
    "fill": "{{ 'x'.zfill(1000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "translate": "{{ ('a' * 9999999).translate({97: 'x' * 9999999}) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "batches": "{{ [1] | batch(1000000000, 0) | list }}",
    "slices": "{{ [1] | slice(1000000000) | list }}",
    "sums": "{{ ([[0] * 9999999] * 9999) | sum(start=[]) }}",
    "many large": "{{ ([('x' * 9999999)] * 9999) | map('upper') | list | length }}",
    "indented JSON": "{{ {'a': 1} | tojson(indent=1000000000) }}",
    "the time": "{{ strftime_now('%Y' * 9999999) }}",
    "ranges": "{{ range(1000000000) | list }}",
    "the whole of large texts": "{% set x = 'x' * 9999999 %}{% for i in range(99) %}{{ x }}{% endfor %}",
    "the whole": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
}  # fmt: skip
ESCAPES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ namespace.__init__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace.mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ self.__init__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ ('' | attr('join')).__self__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
)


def _render(source, **variables):
    sandbox = Sandbox()
    return sandbox.render(_loaded(sandbox, source), {"messages": [{"role": "user"}], **variables})


def _loaded(sandbox, source):
    return Template.from_code(sandbox, sandbox.code_of(source, lambda tree: tree), sandbox.make_globals(None))


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_a_template_that_does_not_end_is_ended(monkeypatch, source):
    monkeypatch.setattr(template_sandbox, "LIMIT_S", 0.05)
    with pytest.raises(OverLimit, match=r"more than 0.05 s of CPU time"):
        _render(source)


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_template_cannot_use_up_the_memory(monkeypatch, source):
    monkeypatch.setattr(template_sandbox, "LIMIT_S", 0.2)
    tracemalloc.start()
    try:
        with pytest.raises(FAILURES):
            _render(source)
        assert tracemalloc.get_traced_memory()[1] < 40 * MAX_CHARS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_but_what_it_is_given(source):
    messages = [{"role": "user"}]
    with contextlib.suppress(TemplateError, TypeError):
        assert _render(source, messages=messages) == ""
    assert messages == [{"role": "user"}]


def test_the_limit_is_of_one_rendering_on_one_thread(monkeypatch):
    monkeypatch.setattr(template_sandbox, "LIMIT_S", 0.05)
    sandbox = Sandbox()
    loop = _loaded(sandbox, "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}")
    fine = _loaded(sandbox, "{% for m in messages %}{{ m }}{% endfor %}")
    ended = []

    def run():
        with pytest.raises(OverLimit):
            sandbox.render(loop, {})
        ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        assert sandbox.render(fine, {"messages": ["a", "b"]}) == "ab"
    assert ended
    assert sandbox.render(fine, {"messages": ["c"]}) == "c"


def test_json_is_as_it_was_given():
    value = {"b": "<'&>\u2028é\"", "a": [1.5, None, True, {}]}
    assert _render("{{ x | tojson }}", x=value) == json.dumps(value, ensure_ascii=False)
    form = "{{ x | tojson(indent=2, sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}"
    assert _render(form, x=value) == json.dumps(value, indent=2, sort_keys=True, separators=(",", ":"))


def test_a_template_knows_the_day():
    assert _render("{{ strftime_now('%Y-%m') }}") == datetime.now().strftime("%Y-%m")


def test_a_namespace_keeps_what_begins_with_an_underscore_out():
    with pytest.raises(SecurityError):
        _render("{% set ns = namespace(a=1) %}{% set ns._a = 1 %}")
    assert _render("{% set ns = namespace(a=1) %}{% set ns.b = ns.a + 1 %}{{ ns.b }}") == "2"


def test_what_a_template_makes_on_its_way_is_bounded_too(monkeypatch):
    source = "{% for i in range(99) %}{% set x = 'x' * 100 %}{% endfor %}"
    assert _render(source) == ""
    monkeypatch.setattr(template_sandbox, "MAX_TOTAL_CHARS", 9000)
    with pytest.raises(OverLimit, match="too much text on its way"):
        _render(source)


JOB = write_job(marshal.dumps(Sandbox().code_of("a", lambda tree: tree)), Variables({}))


def test_while_no_worker_can_be_started_only_the_first_chat_waits(monkeypatch):
    waited_s = []

    def wait_ready(_, timeout_s):
        waited_s.append(timeout_s)
        return len(waited_s) > 3

    def no_fork(_):
        raise Lost("", is_blameless=True)

    never = TemplatePool()
    monkeypatch.setattr(Supervisor, "wait_ready", wait_ready)
    monkeypatch.setattr(Supervisor, "fork", no_fork)
    for _ in range(2):
        with pytest.raises(Unavailable, match="the process that starts the workers that render chat templates is not"):
            never.do(JOB)
    with pytest.raises(Unavailable, match="is not ready"):
        asyncio.run(never.do_soon(JOB))
    with pytest.raises(Unavailable, match="could not be started"):
        never.do(JOB)  # now it is ready
    assert waited_s == [20.0, 0.0, 0.0, 0.0, 20.0, 20.0]
    assert never._num_used == 0
    never.close()


def test_a_template_that_is_probed_does_not_hold_up_another_one():
    other = ChatTemplate("{{ messages }}", ControlTokens(make_byte_tokenizer()), tokens={}, placeholders={})
    probing, were_free = [], []

    def do(job):
        if not probing:
            probing.append(threading.Thread(target=other.probe, daemon=True))
            probing[0].start()
            probing[0].join(PATIENCE_S)
            were_free.append(other.is_probed)
        return do_job(job)

    one = ChatTemplate("{{ messages }}", other.controls, tokens={}, placeholders={}, do=do)
    one.probe()
    probing[0].join()
    assert were_free == [True]
