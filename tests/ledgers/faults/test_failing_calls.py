"""The system says no to the k-th call, k = 1, 2, … until there is none: only the request at hand may fail, and clearly;
what comes after it works, and nothing is left open."""

import asyncio
import errno
import socket
import sys
from pathlib import Path

import fake_engine
import pytest
from app_under_test import LiveServer, ThreadedApp
from byte_tokenizer import EOS, VOCAB_SIZE
from timeouts import until, wait_until

sys.path.append(str(Path(__file__).parents[2] / "faults"))
from kth_call import SITES, Failing, Site, assert_nothing_left, children, each_failure, held, no_more

from tureen.config import Config
from tureen.engine.engine import Engine
from tureen.errors import TureenError
from tureen.grammar.base import Vocabulary
from tureen.grammar_service.compiler import Compiler
from tureen.log import no_progress
from tureen.serving.inproc import InprocClient
from tureen.serving.process import ProcessClient

GUARDS = ("grammar_service", "grammar", "http", "sandbox", "serving")
ANSWER = "00-ab"
REGEX = r"00-[a]b"


def sites(*names):
    return pytest.mark.parametrize("site", [one for one in SITES if one.name in names or not names], ids=str)


# ---- constraints: the process that compiles them, and the one that judges their outputs


def new_compiler():
    vocabulary = Vocabulary(tuple(bytes([byte]) for byte in range(256)), (EOS,), VOCAB_SIZE)
    tokenizer = fake_engine.make_byte_tokenizer()
    return Compiler(lambda: vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False))


class Fresh:
    """The application with helpers that have not been started yet."""

    def __init__(self, app):
        self.app = app
        self.engine: Engine = app.client.engine
        self.before = self.engine.preparing.grammars._compiler

    def __enter__(self):
        self.compiler = self.engine.preparing.grammars._compiler = new_compiler()
        self.app.state.helpers._checker = None
        return self

    def __exit__(self, *_):
        self.engine.preparing.grammars._compiler = self.before
        self.compiler.close()
        if self.app.state.helpers._checker is not None:
            self.app.state.helpers._checker.close()
        self.app.state.helpers._checker = None


def keep_engine(config, progress):
    """The engine of `app`, within reach."""
    made = fake_engine.make_engine(config, progress=progress)
    keep_engine.made = made[0]
    return made


@pytest.fixture(scope="module")
def reachable():
    with ThreadedApp(factory=keep_engine) as running:
        running.client.engine = keep_engine.made
        yield running


@sites()
def test_a_constraint_s_helpers_may_fail_to_start_or_to_be_asked_at_any_call(reachable, site):
    plain = {"text": "say:plain"}
    constrained = {"text": "x", "sampling_params": {"regex": REGEX, "max_new_tokens": 20}}
    before, others = held(), children()

    def work(failing):
        with Fresh(reachable):
            with failing.armed():
                found = reachable.post(**constrained)
                assert found.status_code in (200, 500, 503), found.text
                if found.status_code == 200:
                    assert found.json()["text"] == ANSWER
                else:
                    assert found.json()["error"]["code"], found.text
                assert reachable.generate(**plain)["text"] == "plain"
            assert reachable.client.failure is None
            assert reachable.generate(**constrained)["text"] == ANSWER, "it does not work any more afterwards"
            reachable.check_idle()

    each_failure(site, work)
    assert children() <= others
    assert_nothing_left(before)


# ---- the engine's own process and thread


@sites("Popen", "socketpair", "start")
def test_an_engine_process_that_cannot_be_started_says_so_and_leaves_nothing(site, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_engine.__file__).parent))

    async def start(failing):
        client = ProcessClient("fake_engine:make_engine", Config())
        try:
            with failing.armed():
                await client.start()
            stream = client.generate(fake_engine.make_request("1", "say:hi"))
            assert "".join([delta.text async for delta in stream]) == "hi"
        except (TureenError, OSError, RuntimeError) as error:
            if not failing.has_failed:
                raise AssertionError("it failed by itself") from error
        finally:
            await client.close()

    before, others = held(), children()
    each_failure(site, lambda failing: asyncio.run(start(failing)))
    assert children() <= others
    assert_nothing_left(before)


@sites("start")
def test_an_engine_thread_that_cannot_be_started_says_so_and_leaves_nothing(site):
    async def start(failing):
        client = InprocClient(lambda report: fake_engine.make_engine(progress=no_progress))
        try:
            with failing.armed():
                await client.start()
        except (TureenError, RuntimeError) as error:
            if not failing.has_failed:
                raise AssertionError("it failed by itself") from error
        else:
            await client.close()

    before = held()
    each_failure(site, lambda failing: asyncio.run(start(failing)))
    assert_nothing_left(before)


async def text_of(client, number):
    stream = client.generate(fake_engine.make_request(str(number), "say:hello"))
    return "".join([delta.text async for delta in stream])


def test_a_message_that_cannot_be_sent_to_an_engine_process_costs_no_output(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_engine.__file__).parent))
    before, others = held(), children()

    async def talk():
        client = ProcessClient("fake_engine:make_engine", Config())
        await client.start()
        try:
            for k in (1, 2, 3):  # the engine is also asked whether it is there: there would always be one more
                failing = Failing(Site(socket.socket, "send", no_more(errno.ENOBUFS)), k)
                with failing.armed():
                    found = [await text_of(client, f"{k} {count}") for count in range(3)]
                    await until(lambda failing=failing: failing.has_failed, "the call that fails")
                assert found == ["hello"] * 3
                assert await text_of(client, f"{k} after") == "hello"
                await until(lambda: client.health.state == "healthy", "the engine")
            assert client.health.num_replacements == 3
        finally:
            await client.close()

    asyncio.run(talk())
    assert children() <= others
    assert_nothing_left(before)


# ---- sockets of the front

SOCKETS = (
    Site(socket.socket, "accept", no_more(errno.EMFILE)),
    Site(socket.socket, "send", no_more(errno.ENOBUFS)),
    Site(socket.socket, "recv", no_more(errno.ENOMEM)),
)


def ask(port, text):
    """One request over a connection of its own; None = the connection ended before an answer."""
    body = b'{"text": "say:%s"}' % text.encode()
    head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        real_send, real_recv = socket.SocketType.send, socket.SocketType.recv
        real_send(connection, head + b"content-length: %d\r\n\r\n" % len(body) + body)
        found = b""
        try:
            while piece := real_recv(connection, 65536):
                found += piece
        except ConnectionError:
            return None
    return found or None


@pytest.mark.parametrize("site", SOCKETS, ids=str)
def test_a_connection_s_failure_ends_that_connection_only(site):
    with LiveServer(loop=asyncio.new_event_loop) as server:
        assert b"hello" in ask(server.port, "hello")
        before = held()

        def work(failing):
            with failing.armed():
                found = ask(server.port, "first")
                assert found is None or not found.endswith(b"}") or b'"first"' in found
                ask(server.port, "second")
            assert b'"third"' in ask(server.port, "third")

        each_failure(site, work)
        assert server.client.failure is None
        wait_until(lambda: held()["thread"] <= before["thread"], "the end of the threads of connections")
