"""Any sequence of operations on sessions, against a model that keeps whole prompts in plain lists."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from byte_tokenizer import BOS, EOS, make_byte_tokenizer
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from samples import either

from tureen.config import Config
from tureen.errors import TureenError
from tureen.sessions.sessions import Sessions
from tureen.sessions.tree import SessionParams
from tureen.text.gguf_vocab import add_around

TIMEOUT_S, SHORT_S = 100, 30
OWNERS, NAMES, RIDS = ("", "anna"), ("s", "t", "u"), tuple("abcdefghij")
MAX_SESSIONS = 4

ids = st.lists(st.sampled_from([*b"xyz", EOS, BOS]), max_size=6)
offsets = st.one_of(st.none(), st.integers(-4, 9), st.sampled_from([-20, 20]))


@dataclass
class Asked:
    """A request as a person would note it: all it was asked, all it answered."""

    prompt: list[int]
    num_new: int
    parent: Asked | None
    live: list[int]
    request_id: str
    turn: object = None
    output: list[int] = field(default_factory=list)
    is_running: bool = True

    def said(self):
        return list(self.live) if self.is_running else list(self.output)

    def is_below(self, other):
        return self.parent is not None and (self.parent is other or self.parent.is_below(other))


@dataclass
class Talk:
    capacity: int
    timeout_s: int
    used_s: float
    asked: dict[str, Asked] = field(default_factory=dict)


def make_bos_tokenizer():
    tokenizer = make_byte_tokenizer()
    add_around(tokenizer._backend, BOS, None)
    assert tokenizer.encode("x") == [BOS, ord("x")]
    return tokenizer


def attempt(work):
    """(its result, None) or (None, the error it raised)."""
    try:
        return work(), None
    except TureenError as error:
        return None, error


class SessionMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now, self.aborted, self.num = 0.0, [], 0
        self.sessions = Sessions(
            make_bos_tokenizer(),
            Config(max_sessions=MAX_SESSIONS, session_timeout_s=TIMEOUT_S),
            abort=self.aborted.append,
            clock=lambda: self.now,
        )
        self.talks: dict[tuple[str, str], Talk] = {}
        self.in_flight: list[tuple[Talk, str, Asked]] = []

    # -- the model

    def _forget_idle(self):
        for key, talk in list(self.talks.items()):
            is_busy = any(one.is_running for one in talk.asked.values())
            if not is_busy and self.now >= talk.used_s + talk.timeout_s:
                del self.talks[key]

    def _expected(self, talk, params, new_ids, rid):
        """(code of the refusal, None, parent) or (None, prompt, parent)."""
        if talk is None:
            return "session_not_found", None, None
        parent = None if params.rid is None else talk.asked.get(params.rid)
        refusal, context = self._context(parent, params)
        if refusal:
            return refusal, None, None
        if context and new_ids and new_ids[0] == BOS:
            new_ids = new_ids[1:]
        prompt = context + new_ids
        if not prompt:
            return "empty_prompt", None, None
        if sum(one < 256 for one in prompt) > talk.capacity:
            return "session_capacity_exceeded", None, None
        goes = self._going(talk, params, parent)
        if rid in talk.asked and rid not in goes:
            return "duplicate_rid", None, None
        return None, prompt, parent

    def _context(self, parent, params):
        if params.rid is None:
            return None, []
        if parent is None:
            return "invalid_rid", []
        if parent.is_running and not params.replace:
            return "session_request_running", []
        context = parent.prompt if params.drop_previous_output else parent.prompt + parent.said()
        if not params.offset:
            return None, context
        is_inside = abs(params.offset) <= len(context)
        return (None, context[: params.offset]) if is_inside else ("invalid_offset", [])

    def _going(self, talk, params, parent):
        """What a request replaces."""
        if not params.replace:
            return {}
        return {rid: one for rid, one in talk.asked.items() if parent is None or one.is_below(parent)}

    # -- what clients do

    @initialize()
    def open_two(self):
        self.open(owner="", name="s", capacity=10**6, timeout=None)
        self.open(owner="anna", name="s", capacity=12, timeout=None)

    @rule(
        owner=st.sampled_from(OWNERS),
        name=st.sampled_from(NAMES),
        capacity=st.sampled_from([12, 10**6, 10**6]),
        timeout=st.sampled_from([None, SHORT_S]),
    )
    def open(self, owner, name, capacity, timeout):
        self._forget_idle()
        num_mine = sum(holder == owner for holder, _ in self.talks)
        expected = None
        if (owner, name) in self.talks:
            expected = 400
        elif owner and num_mine >= MAX_SESSIONS // 2:
            expected = 429
        elif len(self.talks) >= MAX_SESSIONS:
            expected = 503
        opened, error = attempt(lambda: self.sessions.open(capacity, owner=owner, name=name, timeout_s=timeout))
        assert (opened, error and error.status) == (None if expected else name, expected)
        if expected in (429, 503):
            ends = [
                talk.used_s + talk.timeout_s
                for (holder, _), talk in self.talks.items()
                if expected == 503 or holder == owner
            ]
            assert error.retry_after_s == max(1, min(ends) - self.now)
        elif expected is None:
            self.talks[owner, name] = Talk(capacity, timeout or TIMEOUT_S, self.now)

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES))
    def close(self, owner, name):
        self._forget_idle()
        _, error = attempt(lambda: self.sessions.close(name, owner=owner))
        known = self.talks.pop((owner, name), None)
        assert (error and error.status) == (None if known else 404)

    @rule(
        data=st.data(),
        is_done=st.booleans(),
        rid=st.sampled_from(RIDS),
        new_ids=ids,
        offset=offsets,
        replace=st.booleans(),
        drop=st.booleans(),
    )
    def ask(self, data, is_done, rid, new_ids, offset, replace, drop):
        self._forget_idle()
        owner, name = data.draw(st.sampled_from([*self.talks, *self.talks, *self.talks, ("bert", "u")]))
        talk = self.talks.get((owner, name))
        known = [*talk.asked] if talk else []
        after = data.draw(st.sampled_from([*reversed(known), *known, None, "a"]))
        params = SessionParams(id=name, rid=after, offset=offset, replace=replace, drop_previous_output=drop)
        expected, prompt, parent = self._expected(talk, params, new_ids, rid)
        self.num += 1
        live, request_id, num_aborted = [], f"{self.num}", len(self.aborted)
        turn, error = attempt(lambda: self.sessions.extend(params, list(new_ids), owner=owner))
        if error is None:
            talk.used_s = self.now
            _, error = attempt(lambda: turn.begin(rid, request_id, live))
        assert (error and error.code) == expected
        if expected is not None:
            assert len(self.aborted) == num_aborted
            return
        assert turn.token_ids == prompt
        going = self._going(talk, params, parent)
        ended = [one for one in going.values() if one.is_running]
        if replace and parent is not None and parent.is_running:
            ended.append(parent)
            parent.output, parent.is_running = list(parent.live), False
        assert sorted(self.aborted[num_aborted:]) == sorted(one.request_id for one in ended)
        for gone in going:
            del talk.asked[gone]
        num_new = len(prompt) - turn.base
        talk.asked[rid] = Asked(prompt, num_new, parent, live, request_id, turn)
        self.in_flight.append((talk, rid, talk.asked[rid]))
        if is_done:
            live.extend(b"pqr")
            self._settle(len(self.in_flight) - 1, is_complete=True)

    @rule(data=st.data(), more=st.lists(st.sampled_from([*b"pq", EOS]), max_size=4))
    def grow(self, data, more):
        if self.in_flight:
            data.draw(st.sampled_from(self.in_flight))[2].live.extend(more)

    @rule(data=st.data(), is_complete=st.booleans())
    def settle(self, data, is_complete):
        if self.in_flight:
            self._settle(data.draw(st.integers(0, len(self.in_flight) - 1)), is_complete=is_complete)

    def _settle(self, index, *, is_complete):
        self._forget_idle()
        talk, rid, one = self.in_flight.pop(index)
        one.turn.end(list(one.live) if is_complete else None)
        if talk not in self.talks.values() or talk.asked.get(rid) is not one:
            return
        talk.used_s = self.now
        if is_complete:
            one.output, one.is_running = list(one.live), False
        elif one.is_running:
            del talk.asked[rid]

    # -- time and totals

    @rule(seconds=st.sampled_from([1, 1, 10, SHORT_S, 50]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def sweep(self):
        self._forget_idle()
        self.sessions.sweep()
        assert len(self.sessions) == len(self.talks)
        everything = [one for talk in self.talks.values() for one in talk.asked.values()]
        assert self.sessions.num_tokens == sum(
            one.num_new + (0 if one.is_running else len(one.output)) for one in everything
        )

    def teardown(self):
        for _, _, one in self.in_flight:
            one.turn.end([])
        self.now += TIMEOUT_S
        self.sessions.sweep()
        assert (len(self.sessions), self.sessions.num_tokens) == (0, 0)
        assert not self.sessions._num_tokens


TestSessionMachine = pytest.mark.sampled(SessionMachine.TestCase)
TestSessionMachine.settings = settings(max_examples=either(150, 40), stateful_step_count=50, deadline=None)
