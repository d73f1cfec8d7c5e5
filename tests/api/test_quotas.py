"""Tokens a minute, requests at once: the arithmetic against an oracle, then as clients see it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from functools import partial
from pathlib import Path

import pytest
from app_under_test import App
from fake_engine import make_engine
from hypothesis import given
from hypothesis import strategies as st
from timeouts import until

from tureen.clients.keys import Limits, load_keys
from tureen.clients.quotas import Account, Hold, Quotas
from tureen.config import Config
from tureen.contract.types import OutputDelta, Usage
from tureen.engine import finish
from tureen.errors import StartupError, TooManyRequests, Unavailable
from tureen.http.server import Server

STEPS = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 500)), max_size=20)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _used(charges: list[tuple[float, int]], now_s: float, per_minute: int) -> float:
    """A bucket in closed form: the most that any stretch up to now used over what it gave back."""
    found = [0.0]
    for start_s, _ in charges:
        stretch = sum(num for at_s, num in charges if at_s >= start_s)
        found.append(stretch - (now_s - start_s) * per_minute / 60)
    return max(found)


def _wait_s(account: Account, num_tokens: int = 1) -> int | None:
    try:
        account.check(num_tokens)
    except TooManyRequests as error:
        return error.retry_after_s
    return None


@given(STEPS, st.integers(1, 2000))
def test_what_is_left_is_what_the_closed_form_says(steps, per_minute):
    clock, charges = Clock(), []
    account = Account(Limits(per_minute), clock)
    for wait_s, num_tokens in steps:
        clock.now_s += wait_s
        account.charge(num_tokens)
        charges.append((clock.now_s, num_tokens))
        debt = _used(charges, clock.now_s, per_minute) - per_minute
        waits_s = _wait_s(account)
        if abs(debt) > 1e-6:
            assert (waits_s is not None) == (debt > 0)
        if waits_s is not None:
            assert waits_s == pytest.approx(debt * 60 / per_minute, abs=1.001)
            assert waits_s >= debt * 60 / per_minute - 1e-6
        left = dict(account.headers())[b"x-ratelimit-remaining-tokens"]
        assert int(left) == pytest.approx(max(0, math.floor(-debt)), abs=1)


@given(STEPS, st.integers(1, 2000))
def test_who_waits_as_long_as_it_is_told_is_let_in_and_not_much_before(steps, per_minute):
    clock = Clock()
    account = Account(Limits(per_minute), clock)
    for wait_s, num_tokens in steps:
        clock.now_s += wait_s
        account.charge(num_tokens)
    wait_s = _wait_s(account)
    if wait_s is not None:
        clock.now_s += wait_s - 1.001
        assert wait_s == 1 or _wait_s(account) is not None
        clock.now_s += 1.002
        assert _wait_s(account) is None


def test_the_headers_are_openai_s():
    clock = Clock()
    account = Account(Limits(600), clock)
    account.charge(100)
    assert account.headers() == [
        (b"x-ratelimit-limit-tokens", b"600"),
        (b"x-ratelimit-remaining-tokens", b"500"),
        (b"x-ratelimit-reset-tokens", b"10s"),
    ]
    account.charge(1200)
    assert dict(account.headers())[b"x-ratelimit-reset-tokens"] == b"2m10s"
    assert Account().headers() == []


def test_the_headers_count_what_running_requests_may_still_use_as_used():
    account = Account(Limits(600), Clock())
    account.charge(100)
    hold = account.hold(50)
    hold.pay(20)
    headers = dict(account.headers())
    assert (headers[b"x-ratelimit-remaining-tokens"], headers[b"x-ratelimit-reset-tokens"]) == (b"450", b"15s")


def test_limits_of_a_key_go_before_those_of_the_settings_each_by_itself():
    quotas = Quotas(Config(client_tokens_per_minute=60, max_client_requests=3))
    for own, limits in (
        (Limits(), Limits(60, 3)),
        (Limits(tokens_per_minute=5), Limits(5, 3)),
        (Limits(max_requests=2, weight=4.0), Limits(60, 2, 4.0)),
    ):
        with quotas.visit(("name", "ann"), own) as account:
            assert account.limits == limits


def test_a_limit_that_changes_counts_from_then_on():
    clock = Clock()
    account = Account(Limits(600), clock)
    account.charge(700)
    account.limits = Limits(1200)
    assert _wait_s(account) is None
    account.limits = Limits(60)
    assert _wait_s(account) == 640
    account.limits = Limits()
    assert _wait_s(account) is None


def test_who_has_enough_running_is_told_how_long_its_requests_take():
    clock = Clock()
    account = Account(Limits(max_requests=2), clock)
    with account.running():
        clock.now_s += 30
    with account.running(), account.running(), pytest.raises(TooManyRequests) as refused, account.running():
        pass
    assert refused.value.retry_after_s == 15  # one of two of 30 s ends after 15, if they are anywhere


def test_how_long_requests_take_is_what_the_newest_took_to_a_fifth():
    clock = Clock()
    account = Account(Limits(max_requests=1), clock)
    for seconds, expected_s in ((10, 1), (20, 10), (60, 12), (1, 22)):
        with account.running():
            with pytest.raises(TooManyRequests) as refused, account.running():
                pass
            assert refused.value.retry_after_s == expected_s
            clock.now_s += seconds


def test_a_refusal_says_how_many_tokens_are_left_and_when_to_come_back():
    clock = Clock()
    account = Account(Limits(60), clock)
    account.charge(90)
    with pytest.raises(TooManyRequests, match=r"has used its 60 tokens a minute and 30 more; .* in 30 s$"):
        account.check(1)
    clock.now_s += 60
    hold = account.hold(20)
    account.check(10)
    with pytest.raises(TooManyRequests, match=r"has 10 of its 60 tokens .*.*; this one may use 11; .* in about 1 s$"):
        account.check(11)
    hold.pay(20)
    account.hold(20)
    with pytest.raises(TooManyRequests, match=r"has 0 of its 60 tokens .* in about 1 s$"):
        account.check(1)
    account.charge(40)
    with pytest.raises(TooManyRequests, match=r"has 0 of its 60 tokens .* in about 30 s$"):
        account.check(1)


def test_clients_that_used_nothing_lately_are_forgotten():
    clock = Clock()
    quotas = Quotas(Config(client_tokens_per_minute=60), clock)
    for index in range(1000):
        with quotas.visit(("address", f"10.0.{index // 250}.{index % 250}"), Limits()) as account:
            account.charge(index % 2)
            quotas.sweep()
    assert len(quotas) == 500
    clock.now_s += 1
    quotas.sweep()
    assert len(quotas) == 0


def test_who_is_here_is_not_forgotten():
    quotas = Quotas(Config(max_client_requests=1))
    with quotas.visit(("name", "ann"), Limits()) as account:
        quotas.sweep()
        with quotas.visit(("name", "ann"), Limits()) as again:
            assert again is account


# ---- the file of keys


def _keys(tmp_path: Path, content: str) -> Config:
    path = tmp_path / "keys"
    path.write_text(content)
    path.chmod(0o600)
    return Config(api_key_file=str(path))


def test_a_line_of_the_key_file_may_carry_limits(tmp_path):
    lines = "ann k1 tokens_per_minute=100 max_requests=3 weight=2.5\nbob k=2==\ncy k3 weight=4\n"
    keys = load_keys(_keys(tmp_path, lines))
    assert [key.limits for key in keys.keys] == [Limits(100, 3, 2.5), Limits(), Limits(weight=4)]
    assert keys.find(b"Bearer k=2==").name == "bob"


@pytest.mark.parametrize(
    "setting",
    [
        "tokens=5",
        "tokens_per_minute=0",
        "tokens_per_minute=1.5",
        "tokens_per_minute=many",
        "tokens_per_minute=",
        "max_requests=-1",
        "weight=0",
        "weight=nan",
        "weight=1e9",
        "weight=1 weight=2",
        "s3cret==",
        "s3cret",
    ],
)
def test_a_limit_that_is_none_is_refused_by_its_line(tmp_path, setting):
    with pytest.raises(StartupError) as refused:
        load_keys(_keys(tmp_path, f"# comment\nann k1 {setting}\n"))
    assert "line 2" in refused.value.message
    assert "s3cret" not in refused.value.message
    assert "k1" not in refused.value.message


# ---- as clients see it


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def named(tmp_path):
    lines = "ann k-ann tokens_per_minute=40\nbob k-bob\n"
    with App(api_key_file=_keys(tmp_path, lines).api_key_file) as app:
        app.state.quotas._clock = Clock()  # nothing comes back while a test is held up
        yield app


def _post(app: App, key: str, path: str = "/generate", **body):
    return app.request("POST", path, json=body, headers=bearer(key))


def test_prompt_and_output_tokens_count_and_who_is_in_debt_is_told_when_to_come_back(named):
    first = _post(named, "k-ann", text="say:abc")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-tokens"] == "40"
    second = _post(named, "k-ann", text="abc", sampling_params={"max_new_tokens": 50})
    assert int(second.headers["x-ratelimit-remaining-tokens"]) < 40 - 7 - 4 + 5
    refused = _post(named, "k-ann", text="say:a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tokens_per_minute")
    debt = 7 + 4 + 3 + 50 - 40
    assert int(refused.headers["retry-after"]) in range(debt * 60 // 40 - 5, debt * 60 // 40 + 2)
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert _post(named, "k-bob", text="say:abc").status_code == 200
    assert "x-ratelimit-limit-tokens" not in _post(named, "k-bob", text="say:abc").headers
    assert named.request("GET", "/v1/models", headers=bearer("k-ann")).status_code == 200


def test_what_is_refused_costs_nothing(named, monkeypatch):
    async def refuse(*_):
        raise Unavailable("the queue is full", code="queue_full", retry_after_s=7)
        yield

    assert _post(named, "k-ann", text="a" * 30, sampling_params={"top_p": 7}).status_code == 400
    monkeypatch.setattr(named.client, "generate", refuse)
    for n in (1, 4):
        refused = _post(named, "k-ann", text="a" * 30, sampling_params={"n": n})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
    assert refused.headers["x-ratelimit-remaining-tokens"] == "40"


def test_what_is_aborted_before_it_answers_costs_nothing_and_takes_nothing_off_what_others_cost():
    clock = Clock()
    account = Account(Limits(60), clock)
    account.charge(100)
    hold = account.hold(1000)
    assert _wait_s(account, 0) == 40
    hold.give_back()
    assert _wait_s(account) == 40
    hold = account.hold(30)
    hold.pay(30)
    hold.pay(0)
    assert _wait_s(account) == 70
    hold = account.hold(1000)
    clock.now_s += 1000
    hold.give_back()
    assert (_wait_s(account), account.is_unused) == (None, True)


class Running:
    """One request of the model below, with its own books."""

    def __init__(self, hold: Hold, prompt: int, most: int) -> None:
        self.hold, self.prompt, self.most, self.num_tokens = hold, prompt, most, 0

    @property
    def left(self) -> int:
        return self.prompt + self.most - self.num_tokens

    def generate(self, num_tokens: int) -> int:
        """The prompt is paid with the first token. Returns what was used."""
        num_tokens = min(num_tokens, self.most - max(0, self.num_tokens - self.prompt))
        used = num_tokens + (0 if self.num_tokens or not num_tokens else self.prompt)
        self.hold.pay(used)
        self.num_tokens += used
        return used


STARTS = st.tuples(st.just("start"), st.integers(1, 150), st.integers(0, 150))
TOKENS = st.tuples(st.just("tokens"), st.integers(0, 9), st.integers(1, 60))
ENDS = st.tuples(st.just("end"), st.integers(0, 9), st.just(0))
WAITS = st.tuples(st.just("wait"), st.integers(0, 30), st.just(0))


@given(st.lists(st.one_of(STARTS, STARTS, TOKENS, TOKENS, ENDS, WAITS), max_size=60), st.integers(50, 400))
def test_however_requests_interleave_they_use_no_more_than_the_limit_but_for_one_that_was_alone(steps, per_minute):
    """The oracle: the sum of what was used, in closed form, and of what each may still use, by its own books."""
    clock, charges, running = Clock(), [], []
    account = Account(Limits(per_minute), clock)
    alone: Running | None = None  # it may use more than was left

    def at_most() -> float:
        return _used(charges, clock.now_s, per_minute) + sum(one.left for one in running)

    for what, first, second in steps:
        if what == "wait":
            clock.now_s += first
        elif what == "start":
            need, before = first + second, at_most()
            is_alone = not any(one.left for one in running)
            may = before <= per_minute if is_alone else before + min(need, per_minute) <= per_minute
            waits_s = _wait_s(account, need)
            if abs(before - per_minute) > 1e-6 and abs(before + need - per_minute) > 1e-6:
                assert (waits_s is None) == may
            if waits_s is None:
                running.append(Running(account.hold(need), first, second))
                alone = running[-1] if is_alone else alone
                assert is_alone or need > per_minute or at_most() <= per_minute + 1e-6
        elif running and what == "tokens":
            one = running[first % len(running)]
            charges.append((clock.now_s, one.generate(second)))
        elif running:
            one = running.pop(first % len(running))
            one.hold.give_back()
        excess = 0 if alone is None else alone.prompt + alone.most
        assert at_most() <= per_minute + excess + 1e-6
    for one in running:
        one.hold.give_back()
        one.hold.give_back()
    clock.now_s += 60 * (1 + sum(num for _, num in charges) / per_minute)
    assert account.is_unused
    assert dict(account.headers())[b"x-ratelimit-remaining-tokens"] == str(per_minute).encode()


def test_requests_begun_together_use_no_more_than_the_limit_in_all():
    with App(slow=True, client_tokens_per_minute=200) as app:

        async def scenario():
            body = {"text": "abc", "sampling_params": {"max_new_tokens": 97}}
            return await asyncio.gather(*(app.http.post("/generate", json=body) for _ in range(8)))

        answers = app.run(scenario())
        assert sorted(one.status_code for one in answers) == [200, 200] + [429] * 6
        for one in answers:
            if one.status_code == 429:
                assert one.json()["error"]["code"] == "tokens_per_minute"
                assert "this one may use 100" in one.json()["error"]["message"]
                assert 1 <= int(one.headers["retry-after"]) <= 60
        used = sum(one.json()["meta_info"]["prompt_tokens"] + 97 for one in answers if one.status_code == 200)
        assert used <= 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["abc"] * 2, "sampling_params": {"n": 2, "max_new_tokens": 25}}),
        ("/v1/embeddings", {"input": ["abcdefgh"] * 100, "model": "fake-model"}),
        ("/v1/completions", {"prompt": ["abc"] * 9, "max_tokens": 9, "model": "fake-model"}),
    ],
)
def test_all_that_a_body_asks_for_is_counted_before_any_of_it_begins(path, body):
    with App(factory=partial(make_engine, step_s=0.1), client_tokens_per_minute=200) as app:

        async def scenario():
            running = asyncio.create_task(
                app.http.post("/generate", json={"text": "abc", "sampling_params": {"max_new_tokens": 110}})
            )
            while not app.client.num_live:
                await asyncio.sleep(0)
            refused = await app.http.post(path, json=body)
            assert app.client.num_live == 1
            return await running, refused

        answer, refused = app.run(scenario())
        assert (answer.status_code, refused.status_code) == (200, 429), refused.text


def test_everything_that_was_held_is_given_back_however_a_request_ends():
    with App(slow=True, client_tokens_per_minute=5000) as app:
        account = app.state.quotas._accounts

        async def leave(**body):
            task = asyncio.create_task(app.http.post("/generate", json=body))
            while not app.client.num_live:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        app.post(text="say:abc")
        app.post(text=["say:a", "say:b"], sampling_params={"n": 2})
        app.post(text="abc", sampling_params={"top_p": 7})
        app.post(text="a" * 5000)
        app.post(text="abc", rid="x", stream=True, sampling_params={"max_new_tokens": 5})
        app.run(leave(text=["abc"] * 3, sampling_params={"max_new_tokens": 900}))
        app.run(leave(text="abc", stream=True, sampling_params={"max_new_tokens": 900}))
        app.post("/v1/embeddings", input=["abcdefgh"] * 100, model="fake-model")
        assert [one._num_held for one in account.values()] == [0]
        assert [one.num_visitors for one in account.values()] == [0]


def test_who_aborts_in_the_queue_pays_for_no_prompt(named, monkeypatch):
    async def abort(request, interval, watch):
        watch(0)
        yield OutputDelta(request.id, usage=Usage(30, 0, 0), finish=finish.aborted("client"))

    generate = named.client.generate
    monkeypatch.setattr(named.client, "generate", abort)
    assert _post(named, "k-ann", text="a" * 30, stream=True).status_code == 200
    monkeypatch.setattr(named.client, "generate", generate)
    assert _post(named, "k-ann", text="say:a").headers["x-ratelimit-remaining-tokens"] >= "33"


def test_prompts_that_wait_are_held_against_their_client(named, monkeypatch):
    """A thousand requests cannot be begun before the first is paid for."""

    async def scenario():
        begun = asyncio.Event()

        async def wait(request, *_):
            begun.set()
            await asyncio.Event().wait()
            yield

        monkeypatch.setattr(named.client, "generate", wait)
        waiting = asyncio.create_task(named.http.post("/generate", json={"text": "a" * 50}, headers=bearer("k-ann")))
        await begun.wait()
        refused = await named.http.post("/generate", json={"text": "a"}, headers=bearer("k-ann"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return refused

    refused = named.run(scenario())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    monkeypatch.undo()
    assert _post(named, "k-ann", text="say:a").status_code == 200


def test_samples_of_one_prompt_pay_for_it_once(named):
    answer = _post(named, "k-ann", text="say:abcdefgh", sampling_params={"n": 2})
    assert answer.status_code == 200
    left = _post(named, "k-ann", text="say:a").headers["x-ratelimit-remaining-tokens"]
    spent = 12 + 2 * 9 + 5 + 2
    assert 40 - spent <= int(left) <= 40 - spent + 5


def test_what_has_begun_is_not_refused_in_the_middle(named):
    """Many prompts run one wave after the other."""
    answer = _post(named, "k-ann", "/v1/embeddings", input=["abcdefgh"] * 100, model="fake-model")
    assert answer.status_code == 200, answer.text
    assert _post(named, "k-ann", text="say:a").status_code == 429


def test_an_error_has_the_shape_of_its_api(named):
    _post(named, "k-ann", text="abc", sampling_params={"max_new_tokens": 80})
    tgi = _post(named, "k-ann", inputs="abc")
    assert (tgi.status_code, tgi.json()["error_type"]) == (429, "overloaded")
    assert int(tgi.headers["retry-after"]) > 1
    chat = _post(named, "k-ann", "/v1/completions", prompt="abc", model="fake-model")
    assert (chat.status_code, chat.json()["error"]["type"]) == (429, "rate_limit_error")


def test_a_stream_is_charged_as_it_flows():
    with App(slow=True, client_tokens_per_minute=10) as app:

        async def scenario():
            body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 1900}}
            running = asyncio.create_task(app.http.post("/generate", json=body))
            await until(lambda: app.state.num_running)
            statuses = []
            while 429 not in statuses and len(statuses) < 500:
                statuses.append((await app.http.post("/generate", json={"text": "say:"})).status_code)
            assert 429 in statuses
            assert not running.done()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

        app.run(scenario())


def test_clients_without_limits_have_no_headers_and_those_of_the_settings_hold_for_all():
    with App(client_tokens_per_minute=50) as app:
        assert app.post(text="say:a").headers["x-ratelimit-limit-tokens"] == "50"
    with App() as app:
        assert not [name for name in app.post(text="say:a").headers if name.startswith("x-ratelimit")]


def test_limits_are_read_again_with_the_keys(tmp_path):
    config = _keys(tmp_path, "ann k1 tokens_per_minute=1000\n")
    with App(api_key_file=config.api_key_file) as app:
        server = Server(app.app, app.config, lambda: None)

        async def reload() -> None:
            server.reload()

        assert _post(app, "k1", text="say:a").headers["x-ratelimit-limit-tokens"] == "1000"
        _keys(tmp_path, "ann k1 tokens_per_minute=2000\n")
        app.run(reload())
        assert _post(app, "k1", text="say:a").headers["x-ratelimit-limit-tokens"] == "2000"


def test_the_engine_hears_whose_a_request_is_and_what_it_weighs(tmp_path, monkeypatch):
    seen = []
    with App(api_key_file=_keys(tmp_path, "ann k1 weight=3\nbob k2\n").api_key_file) as app:
        generate = app.client.generate

        def noting(request, *how):
            seen.append((request.client, request.client_weight))
            return generate(request, *how)

        monkeypatch.setattr(app.client, "generate", noting)
        for key in ("k1", "k2"):
            assert _post(app, key, text="say:a").status_code == 200
            assert _post(app, key, inputs="say:a").status_code == 200
            assert _post(app, key, prompt="say:a").status_code == 200
            assert _post(app, key, "/v1/completions", prompt="say:a", model="fake-model").status_code == 200
    assert seen == [("ann", 3.0)] * 4 + [("bob", 1.0)] * 4
