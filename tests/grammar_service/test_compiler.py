"""Compiling in a helper process: whatever a constraint does there, the engine goes on."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import compile_inline
import inline_workers
import pytest
from stack_size import stack_bytes
from timeouts import PATIENCE_S, wait_until

from tureen.grammar.base import GrammarSpec, Vocabulary
from tureen.grammar.expression import GrammarError
from tureen.grammar_service import cache, compile_pool, compile_worker, compiler, loading
from tureen.grammar_service.cache import Cache
from tureen.grammar_service.compiler import Compiler
from tureen.grammar_service.kept_grammars import KeptGrammars
from tureen.grammar_service.masks import MaskThread
from tureen.grammar_service.messages import Failure
from tureen.sandbox import stacks

VOCABULARY = Vocabulary(tokens=(b"a", b"b"), eos_token_ids=(2,), size=3)


class Loaded:
    """In place of a compiled grammar."""

    def __init__(self, source):
        self.source = source
        self.num_bytes = 1000


class LoadingDouble:
    """In place of LanguageCompiler: `gate` holds every load up until it is set."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    def load(self, source):
        assert self.gate.wait(PATIENCE_S)
        if b"no-load" in source:
            raise GrammarError("cannot be loaded")
        if b"bad-load" in source:
            raise KeyError("with words of the client")
        return Loaded(source)


@pytest.fixture
def clock(monkeypatch):
    """The time as the compiler sees it: it passes only when a test says so."""
    clock = SimpleNamespace(now_s=1000.0, cpu_s=0.0)
    monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(compile_pool.Task, "cpu_s", property(lambda task: clock.cpu_s))
    return clock


@pytest.fixture
def make(monkeypatch, clock):
    """Makes compilers, whose workers are inline."""
    languages, made = [], []

    def build(vocabulary, encode, kernels):
        languages.append(LoadingDouble())
        return languages[-1]

    def make_compiler(vocabulary=VOCABULARY, *, is_open=True, **settings):
        one = Compiler(lambda: vocabulary, lambda text: [], **settings)
        made.append(one)
        if is_open:
            wait_until(one._open_pool)
            one.language_double = one._opening.result()[1].get(has_specials=False)
        return one

    monkeypatch.setattr(loading, "LanguageCompiler", build)
    # A worker collects the garbage of its own small process, not that of all tests.
    monkeypatch.setattr(compile_worker, "gc", SimpleNamespace(collect=int, disable=int))
    program = partial(compile_worker.program, compile_inline.make_compile)
    inline_workers.use(monkeypatch, "tureen.grammar_service.compile_pool", program)
    monkeypatch.setattr(compile_pool, "address_space", lambda pid: 0)
    yield make_compiler
    for language in languages:
        language.gate.set()
    for one in made:
        one.close()


def spec(text, kind="regex"):
    return GrammarSpec(kind, text)


def wait_for(condition, one=None):
    """Until it holds, however long that takes here; the compiler is polled meanwhile."""

    def holds():
        if one is not None:
            one.poll()
        return condition()

    wait_until(holds)


def settled(one, *compilations):
    wait_for(lambda: all(each.state != "pending" for each in compilations), one)
    return compilations[0]


def pid_in(path, one, count=1):
    """Return the process id of the newest of `count` children, from the file that they write."""

    def lines():
        return path.read_text().split() if path.exists() else []

    wait_for(lambda: len(lines()) >= count, one)
    return int(lines()[-1])


def worker_of(one, pid):
    return next((worker for worker in one.supervisor.workers if worker.pid == pid), None)


def kill(one, pid):
    """As something outside does."""
    worker_of(one, pid).lose(inline_workers.ended_from_outside)


def is_running(one, pid):
    worker = worker_of(one, pid)
    return worker is not None and worker.is_alive


def test_what_the_child_translated_is_loaded_in_the_engine(make):
    one = make()
    got = settled(one, one.submit(spec("ok")))
    assert got.state == "ready"
    assert got.compiled.source == b"double: ok"
    assert got.error is None


def test_a_large_vocabulary_arrives_whole(make):
    tokens = tuple(b"token %d" % i for i in range(50_000))
    one = make(Vocabulary(tokens, (0,), 50_016))
    got = settled(one, one.submit(spec("vocabulary")))
    assert got.compiled.source == repr((50_000, tokens[-1], 50_016)).encode()


def test_a_large_result_arrives_whole(make):
    one = make()
    got = settled(one, one.submit(spec(f"large {5 << 20}")))
    assert len(got.compiled.source) == 5 << 20


def test_what_hangs_is_ended_at_the_deadline_and_others_go_on(make, clock, tmp_path):
    one = make(timeout_s=10.0)
    hanging = [one.submit(spec(f"sleep {tmp_path}/a")), one.submit(spec(f"spin {tmp_path}/b"))]
    pids = [pid_in(tmp_path / "a", one), pid_in(tmp_path / "b", one)]
    clock.now_s += 9.0  # they count as slow ones now
    clock.cpu_s += 9.0
    assert settled(one, one.submit(spec("ok"))).state == "ready"
    assert [each.state for each in hanging] == ["pending", "pending"]
    clock.cpu_s += 1.5
    settled(one, *hanging)
    for each in hanging:
        assert each.error.code == "grammar_compile_timeout"
        assert each.error.status == 400
        assert "10 s" in each.error.message
    wait_for(lambda: not any(is_running(one, pid) for pid in pids))
    assert one.stats.timeouts == 2
    clock.cpu_s = 0.0
    assert settled(one, one.submit(spec("ok 2"))).state == "ready"


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("memory", 400, "grammar_too_complex"),
        ("recurse", 400, "grammar_too_complex"),
        ("crash", 400, "grammar_too_complex"),
        ("exit", 400, "grammar_too_complex"),
        (f"large {65 << 20}", 400, "grammar_too_complex"),
        ("refuse", 400, "invalid_json_schema"),
        ("no-load", 400, "invalid_json_schema"),
        ("fault", 500, "grammar_failed"),
        ("panic", 500, "grammar_failed"),
        ("bad-load", 500, "grammar_failed"),
    ],
)
def test_a_failure_is_told_and_nothing_else_changes(make, text, status, code):
    one = make()
    before = one.submit(spec("before"))
    failing = one.submit(spec(text, "json_schema"))
    after = one.submit(spec("after"))
    settled(one, before, failing, after)
    assert (failing.error.status, failing.error.code) == (status, code)
    assert "client" not in failing.error.message
    assert before.state == after.state == "ready"
    assert one.supervisor.num_replaced == 0


def test_a_refusal_says_what_the_frontend_said(make):
    one = make()
    assert settled(one, one.submit(spec("refuse"))).error.message == "the keyword 'foo' is not enforced"


def test_what_is_no_text_is_refused_at_once(make):
    got = make().submit(spec("ok \ud800"))
    assert (got.error.status, got.error.code) == (400, "invalid_regex")


def test_the_same_constraint_is_compiled_once_for_all_who_wait(make, tmp_path):
    one = make()
    text = f"until {tmp_path}/a"
    waiting = [one.submit(spec(text)) for _ in range(5)]
    pid_in(tmp_path / "a", one)
    waiting += [one.submit(spec(text)) for _ in range(5)]
    compile_inline.go(tmp_path / "a")
    settled(one, *waiting)
    assert {id(each.compiled) for each in waiting} == {id(waiting[0].compiled)}
    assert len((tmp_path / "a").read_text().split()) == 1
    assert (one.stats.compiles, one.stats.hits) == (1, 9)


def test_what_was_compiled_is_ready_at_once_until_the_cache_is_cleared(make, tmp_path):
    one = make()
    text = f"ok {tmp_path}/a"
    first = settled(one, one.submit(spec(text)))
    again = one.submit(spec(text))
    assert again.compiled is first.compiled
    one.clear()
    assert settled(one, one.submit(spec(text))).state == "ready"
    assert len((tmp_path / "a").read_text().split()) == 2
    assert one.submit(GrammarSpec("regex", text, after="</think>")).state == "pending"


def test_no_worker_starts_before_the_first_constraint(make, tmp_path):
    one = make(is_open=False)
    one.poll()
    assert (one.supervisor, one._opening) == (None, None)
    assert settled(one, one.submit(spec(f"ok {tmp_path}/a"))).state == "ready"
    assert one.supervisor is not None


def test_a_vocabulary_that_cannot_be_made_fails_its_constraint_and_the_next_one_tries_again(make, tmp_path):
    one, made = make(is_open=False), []

    def fail_once():
        made.append(1)
        if len(made) == 1:
            raise ValueError("out of luck")
        return VOCABULARY

    one._make_vocabulary = fail_once
    assert settled(one, one.submit(spec(f"ok {tmp_path}/a"))).error.code == "grammar_failed"
    assert settled(one, one.submit(spec(f"ok {tmp_path}/b"))).state == "ready"


def test_what_took_long_is_kept_for_the_next_start(make, clock, tmp_path):
    spent_s = {"quick": compiler.WORTH_KEEPING_S / 2, "slow": compiler.WORTH_KEEPING_S * 2}
    before = make(kept=KeptGrammars(tmp_path / "kept"))
    for name, clock.cpu_s in spent_s.items():
        settled(before, before.submit(spec(f"ok {tmp_path}/{name}")))
    before.close()
    before._loader.shutdown()  # all is written
    after = make(kept=KeptGrammars(tmp_path / "kept"), is_open=False)
    for name in spent_s:
        got = settled(after, after.submit(spec(f"ok {tmp_path}/{name}")))
        assert got.compiled.source == f"double: ok {tmp_path}/{name}".encode()
    assert [len((tmp_path / name).read_text().split()) for name in spent_s] == [2, 1]


def test_a_kept_grammar_is_loaded_after_a_preparation_that_failed(make, clock, tmp_path, monkeypatch):
    clock.cpu_s = compiler.WORTH_KEEPING_S * 2
    text = f"ok {tmp_path}/a"
    before = make(kept=KeptGrammars(tmp_path / "kept"))
    settled(before, before.submit(spec(text)))
    before.close()
    before._loader.shutdown()  # all is written
    after, loaders = make(kept=KeptGrammars(tmp_path / "kept"), is_open=False), compiler.LazyCompilers

    def fail_once(*parts):
        monkeypatch.setattr(compiler, "LazyCompilers", loaders)
        raise ValueError("out of luck")

    monkeypatch.setattr(compiler, "LazyCompilers", fail_once)
    assert settled(after, after.submit(spec(text))).error.code == "grammar_failed"
    assert settled(after, after.submit(spec(text))).state == "ready"
    assert len((tmp_path / "a").read_text().split()) == 1


def test_what_is_not_kept_after_all_is_compiled(make, clock, tmp_path):
    clock.cpu_s = compiler.WORTH_KEEPING_S * 2
    one = make(kept=KeptGrammars(tmp_path / "kept"))
    text = f"ok {tmp_path}/a"
    settled(one, one.submit(spec(text)))
    one._loader.submit(lambda: None).result()
    (path,) = (tmp_path / "kept").iterdir()
    path.write_bytes(b"something else")
    one._cache.clear()
    assert settled(one, one.submit(spec(text))).state == "ready"
    assert len((tmp_path / "a").read_text().split()) == 2


def test_a_refusal_is_remembered(make, tmp_path):
    one = make()
    text = f"refuse {tmp_path}/a"
    settled(one, one.submit(spec(text)))
    again = one.submit(spec(text))
    assert again.error.code == "invalid_regex"
    assert len((tmp_path / "a").read_text().split()) == 1
    assert (one.stats.failures, one.stats.hits) == (1, 1)


@pytest.mark.parametrize("what", ["crash", "sleep"])
def test_what_may_have_come_of_the_machines_load_is_tried_again_after_a_while(make, clock, tmp_path, what):
    one = make()
    text = f"{what} {tmp_path}/a"
    first = one.submit(spec(text))
    pid_in(tmp_path / "a", one)
    clock.cpu_s += 11
    settled(one, first)
    assert one.submit(spec(text)).state == "failed"
    clock.now_s += compiler.KEEP_S + 1
    clock.cpu_s = 0.0
    again = one.submit(spec(text))
    assert again.state == "pending"
    pid_in(tmp_path / "a", one, count=2)


def test_a_compile_for_which_a_busy_machine_has_no_time_is_not_at_fault(make, clock, tmp_path):
    one = make(timeout_s=10.0, max_parallel=1)
    text = f"until {tmp_path}/a"
    first = one.submit(spec(text))
    pid = pid_in(tmp_path / "a", one)
    clock.now_s += compiler.MAX_RUNNING_S - 1
    clock.cpu_s += 0.4  # far longer than its deadline, of which it has got the least part
    one.poll()
    assert first.state == "pending"
    clock.now_s += 2
    settled(one, first)
    assert (first.error.status, first.error.code) == (503, "grammar_queue_full")
    wait_for(lambda: not is_running(one, pid))
    compile_inline.go(tmp_path / "a")
    assert settled(one, one.submit(spec(text))).state == "ready"  # it was not remembered
    assert one.stats.timeouts == 0


def test_when_to_try_again_is_told_by_how_long_compiles_take(make, clock, monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "PACE_SHARE", 1.0)
    monkeypatch.setattr(compiler, "MAX_WAIT_S", 100.0)
    one = make(max_parallel=1)
    first = one.submit(spec(f"until {tmp_path}/a"))
    pid_in(tmp_path / "a", one)
    clock.now_s += 20.0
    compile_inline.go(tmp_path / "a")
    settled(one, first)
    monkeypatch.setattr(compiler, "MAX_SLOW", 0)
    second = one.submit(spec(f"sleep {tmp_path}/b"))
    pid_in(tmp_path / "b", one)
    waiting = [one.submit(spec(f"ok {number}")) for number in range(3)]
    clock.now_s += 50.0
    monkeypatch.setattr(compiler, "MAX_WAIT_S", 40.0)
    one.poll()
    assert second.state == "pending"
    assert waiting[0].error.status == 503
    assert waiting[0].error.retry_after_s == 5 * 20  # four are there, and it would come after them


def test_the_last_one_that_gives_up_ends_the_compile(make, tmp_path):
    one = make()
    text = f"sleep {tmp_path}/a"
    first, second = one.submit(spec(text)), one.submit(spec(text))
    pid = pid_in(tmp_path / "a", one)
    one.release(first)
    one.release(first)
    assert one.stats.pending == 1
    one.release(second)
    wait_for(lambda: not is_running(one, pid))
    assert one.stats.pending == 0
    assert settled(one, one.submit(spec("ok"))).state == "ready"


def test_what_nobody_waits_for_leaves_the_queue(make, tmp_path):
    one = make(max_parallel=1)
    held = one.submit(spec(f"until {tmp_path}/a"))
    pid_in(tmp_path / "a", one)
    queued = one.submit(spec(f"ok {tmp_path}/b"))
    one.release(queued)
    after = one.submit(spec("after"))
    compile_inline.go(tmp_path / "a")
    settled(one, held, after)
    assert not (tmp_path / "b").exists()


def test_slow_compiles_do_not_hold_up_quick_ones(make, clock, tmp_path):
    one = make(max_parallel=1)
    for number in range(4):
        one.submit(spec(f"sleep {tmp_path}/{number}"))
        pid_in(tmp_path / str(number), one)
        clock.now_s += 1
    assert settled(one, one.submit(spec("ok"))).state == "ready"


def test_a_queue_that_does_not_move_says_try_again(make, monkeypatch, clock, tmp_path):
    monkeypatch.setattr(compiler, "MAX_WAIT_S", 5.0)
    one = make(max_parallel=1)
    one.submit(spec(f"sleep {tmp_path}/a"))
    pid_in(tmp_path / "a", one)
    queued = one.submit(spec("ok"))
    clock.now_s += 0.01
    one.poll()
    assert queued.state == "pending"
    monkeypatch.setattr(compiler, "MAX_SLOW", 0)
    clock.now_s += 6
    one.poll()
    assert (queued.error.status, queued.error.code) == (503, "grammar_queue_full")
    assert one.submit(spec("ok")).state == "pending"


@pytest.fixture
def none_is_slow(monkeypatch):
    """However slow the machine is."""
    monkeypatch.setattr(compile_pool, "LOWER_AFTER_S", 1000.0)


@pytest.mark.usefixtures("none_is_slow")
def test_workers_that_were_quick_are_used_again(make, tmp_path):
    one = make()
    texts = ["ok", "refuse", "ok 2", "ok 3", "ok 4"]
    for text in texts:
        settled(one, one.submit(spec(f"{text.split()[0]} {tmp_path}/{text}")))
    assert len({(tmp_path / text).read_text() for text in texts}) <= 2  # one is there in advance


@pytest.mark.usefixtures("none_is_slow")
@pytest.mark.parametrize("what", ["fault", "recurse", "memory", "panic", "crash"])
def test_a_child_that_failed_is_not_used_again(make, tmp_path, what):
    one = make()
    for text in (what, "ok"):
        settled(one, one.submit(spec(f"{text} {tmp_path}/{text}")))
    failed, after = (int((tmp_path / text).read_text()) for text in (what, "ok"))
    assert failed != after
    wait_for(lambda: not is_running(one, failed))


@pytest.mark.usefixtures("none_is_slow")
def test_a_waiting_child_that_is_killed_is_replaced(make, tmp_path):
    one = make()
    settled(one, one.submit(spec(f"ok {tmp_path}/a")))
    pid = pid_in(tmp_path / "a", one)
    assert is_running(one, pid)
    kill(one, pid)
    wait_for(lambda: not is_running(one, pid))
    assert settled(one, one.submit(spec("ok 2"))).state == "ready"


def test_what_a_killed_fork_server_was_compiling_is_compiled_by_the_next(make, tmp_path):
    one = make()
    got = one.submit(spec(f"until {tmp_path}/a"))
    child = pid_in(tmp_path / "a", one)
    one.supervisor.end_fork_server()
    pid_in(tmp_path / "a", one, count=2)
    compile_inline.go(tmp_path / "a")
    assert settled(one, got).state == "ready"
    wait_for(lambda: not is_running(one, child))


def test_after_two_lost_fork_servers_the_client_is_asked_to_try_again(make, tmp_path):
    one = make()
    text = f"until {tmp_path}/a"
    got = one.submit(spec(text))
    for count in (1, 2):
        pid_in(tmp_path / "a", one, count=count)
        one.supervisor.end_fork_server()
    settled(one, got)
    assert (got.error.status, got.error.code) == (503, "grammar_compiler_lost")
    compile_inline.go(tmp_path / "a")
    assert settled(one, one.submit(spec(text))).state == "ready"


def test_what_is_killed_from_outside_while_it_compiles_is_compiled_again(make, tmp_path):
    one = make()
    got = one.submit(spec(f"until {tmp_path}/a"))
    kill(one, pid_in(tmp_path / "a", one))
    pid_in(tmp_path / "a", one, count=2)
    compile_inline.go(tmp_path / "a")
    assert settled(one, got).state == "ready"


def test_a_constraint_whose_processes_are_killed_again_and_again_is_refused_for_a_while(make, clock, tmp_path):
    one = make()
    text = f"until {tmp_path}/a"
    got = one.submit(spec(text))
    for count in (1, 2):
        kill(one, pid_in(tmp_path / "a", one, count=count))
    settled(one, got)
    assert (got.error.status, got.error.code) == (503, "grammar_compiler_lost")
    assert "was killed 2 times" in got.error.message
    assert one.submit(spec(text)).state == "failed"
    clock.now_s += compiler.KEEP_S + 1
    compile_inline.go(tmp_path / "a")
    assert settled(one, one.submit(spec(text))).state == "ready"


@pytest.mark.parametrize("failing", ["thread", "pool"])
def test_what_the_system_has_nothing_for_now_is_compiled_when_it_has(make, monkeypatch, failing):
    one = make()
    with monkeypatch.context() as patch:
        if failing == "thread":
            patch.setattr(threading.Thread, "start", no_thread)
        else:
            patch.setattr(one, "_open_pool", no_thread)
        got = one.submit(spec("ok"))
        one.poll()
        assert got.state == "pending"
    assert settled(one, got).state == "ready"


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def test_loading_does_not_hold_up_the_caller_and_has_the_deadline_too(make, clock):
    one = make()
    one.language_double.gate.clear()
    got = one.submit(spec("ok"))
    wait_for(lambda: one._jobs[got.spec].load is not None, one)
    assert got.state == "pending"
    clock.now_s += compiler.MAX_RUNNING_S + 1
    one.poll()
    assert (got.error.status, got.error.code) == (503, "grammar_queue_full")
    one.language_double.gate.set()
    assert settled(one, one.submit(spec("ok 2"))).state == "ready"


def entry_bytes(text):
    return cache.OVERHEAD_BYTES + 4 * len(text)


def test_the_cache_drops_the_least_recently_used_when_its_bytes_are_spent():
    kept = Cache(3 * (entry_bytes("a") + 100))
    for name in "abc":
        kept.put(spec(name), Loaded(b""), 100)
    assert kept.get(spec("a"), 0.0) is not None
    kept.put(spec("d"), Loaded(b""), 100)
    assert [name for name in "abcd" if kept.get(spec(name), 0.0)] == ["a", "c", "d"]
    kept.put(spec("e"), Loaded(b""), 2 * entry_bytes("a"))
    assert [name for name in "acde" if kept.get(spec(name), 0.0)] == ["e"]
    assert kept.num_bytes <= 3 * (entry_bytes("a") + 100)


def test_what_is_larger_than_the_cache_pushes_nothing_out():
    kept = Cache(entry_bytes("a") + 100)
    kept.put(spec("a"), Loaded(b""), 100)
    kept.put(spec("b"), Loaded(b""), 101)
    kept.put(spec("c" * 100_000), Failure(400, "invalid_regex", "no"), 8)
    assert kept.get(spec("a"), 0.0) is not None
    assert len(kept) == 1


def test_failures_take_their_share_of_the_cache():
    kept = Cache(10 * entry_bytes(""))
    for number in range(1000):
        kept.put(spec(f"{number}"), Failure(400, "invalid_regex", "no"), 8)
    assert 0 < len(kept) < 10
    assert kept.num_bytes <= 10 * entry_bytes("")


def test_putting_twice_counts_once():
    kept = Cache(1 << 20)
    for _ in range(3):
        kept.put(spec("a"), Loaded(b""), 100)
    assert kept.num_bytes == entry_bytes("a") + 100
    kept.clear()
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_the_threads_that_load_and_follow_grammars_have_stack_that_suffices_whatever_the_default_is():
    """A grammar that is too deep for its thread ends the engine."""
    default = threading.stack_size(256 << 10)
    try:
        one, masks = Compiler(lambda: VOCABULARY, lambda text: []), MaskThread(1, 64)
        found = [one._loader.submit(stack_bytes).result(), masks._executor.submit(stack_bytes).result()]
        one.close()
        masks.close()
        assert threading.stack_size() == 256 << 10
    finally:
        threading.stack_size(default)
    assert min(found) >= stacks.THREAD_BYTES > stacks.WORKER_BYTES
