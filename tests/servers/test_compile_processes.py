"""Compiling in real helper processes: whatever ends or stops one, the engine goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from timeouts import PATIENCE_S, wait_until

from tureen.grammar.base import GrammarSpec, Vocabulary
from tureen.grammar.expression import GrammarError
from tureen.grammar_service import compile_pool, compiler, loading
from tureen.grammar_service.compiler import Compiler
from tureen.sandbox import seccomp

DOUBLE = str(Path(__file__).with_name("compile_double.py"))
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
def patient_ends(monkeypatch):
    """How a worker ended is waited for, however long a busy machine takes to say so."""
    monkeypatch.setattr("tureen.sandbox.worker.STATUS_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def clock(monkeypatch):
    """The time as the compiler sees it: it passes only when a test says so."""
    clock = SimpleNamespace(now_s=1000.0, cpu_s=0.0)
    monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(compile_pool.Task, "cpu_s", property(lambda task: clock.cpu_s))
    return clock


@pytest.fixture
def make(monkeypatch, clock):
    """Makes compilers, whose fork server is the double."""
    languages, made = [], []

    def build(vocabulary, encode, kernels):
        languages.append(LoadingDouble())
        return languages[-1]

    def make_compiler(vocabulary=VOCABULARY, **settings):
        """Return a new compiler, the only one from now on."""
        for before in made:
            before.close()
        wait_until(lambda: not fork_servers(), "the end of the one before")
        one = Compiler(lambda: vocabulary, lambda text: [], **settings)
        made.append(one)
        wait_until(one._open_pool)
        one.language_double = one._opening.result()[1].get(has_specials=False)
        return one

    monkeypatch.setattr(loading, "LanguageCompiler", build)
    monkeypatch.setattr(compile_pool, "PROGRAM", DOUBLE)
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
    """Wait until `count` children have written their process ids to a file. Return the last id."""

    def lines():
        return path.read_text().split() if path.exists() else []

    wait_for(lambda: len(lines()) >= count, one)
    return int(lines()[-1])


def processes():
    """Process ids of all fork servers and their workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if DOUBLE.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def fork_servers():
    """Process ids of the fork servers that this process started and that still run."""
    return [pid for pid in processes() if parent_of(pid) == os.getpid()]


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def is_running(pid):
    """Not so once it is dead, whether or not the system has reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def what_ends_its_worker_fails_alone(make):
    one = make()
    failing = {what: one.submit(spec(what, "json_schema")) for what in ("memory", "recurse", "crash", "exit")}
    settled(one, *failing.values())
    assert {what: each.error.code for what, each in failing.items()} == dict.fromkeys(failing, "grammar_too_complex")
    assert settled(one, one.submit(spec("after"))).state == "ready"
    assert len(fork_servers()) == 1


@pytest.mark.usefixtures("patient_ends")
def test_whatever_ends_or_stops_a_process_nothing_waits_for_ever_and_what_was_asked_is_compiled(
    make, monkeypatch, tmp_path
):
    what_ends_its_worker_fails_alone(make)
    for number, check in enumerate((killed_fork_server, killed_worker)):
        check(make, tmp_path / str(number))
    a_stopped_fork_server_is_replaced_and_what_waits_is_compiled(make)
    nothing_waits_for_a_fork_server_that_never_gets_ready(make, monkeypatch, tmp_path)
    a_fork_server_that_cannot_start_fails_requests_instead_of_holding_them(make, monkeypatch, tmp_path)


def nothing_waits_for_a_fork_server_that_never_gets_ready(make, monkeypatch, tmp_path):
    deaf = tmp_path / "deaf.py"
    deaf.write_text("import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)")  # until the engine closes it
    monkeypatch.setattr(compile_pool, "PROGRAM", str(deaf))
    tokens = tuple(b"token %d" % i for i in range(50_000))
    one = make(Vocabulary(tokens, (0,), 50_000))
    got = one.submit(spec("ok"))
    one.poll()
    assert got.state == "pending"
    one.release(got)
    assert one.stats.pending == 0


def test_compiles_have_a_lower_priority_and_no_ctrl_c(make, monkeypatch, tmp_path):
    a_lower_priority_counts_and_ctrl_c_does_not_reach_the_fork_server(make)
    a_long_compile_loses_its_priority(make, monkeypatch, tmp_path)


def a_long_compile_loses_its_priority(make, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_pool, "IDLE_AFTER_S", 0.2)
    one = make()
    one.submit(spec(f"spin {tmp_path}/a"))
    pid = pid_in(tmp_path / "a", one)
    wait_for(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, pid) == 19)


def a_lower_priority_counts_and_ctrl_c_does_not_reach_the_fork_server(make):
    one = make()
    settled(one, one.submit(spec("ok")))
    (pid,) = fork_servers()
    assert os.getsid(pid) == os.getsid(0)  # priorities are compared within a session
    assert os.getpgid(pid) == pid
    os.kill(pid, signal.SIGINT)
    assert settled(one, one.submit(spec("ok 2"))).state == "ready"
    assert fork_servers() == [pid]


def killed_fork_server(make, path):
    """What it was compiling is compiled by the next one."""
    one = make()
    got = one.submit(spec(f"until {path}"))
    child = pid_in(path, one)
    os.kill(fork_servers()[0], signal.SIGKILL)
    pid_in(path, one, count=2)
    (path.with_suffix(".go")).touch()
    assert settled(one, got).state == "ready"
    wait_for(lambda: not is_running(child))


def killed_worker(make, path):
    """What it was compiling is compiled again."""
    one = make()
    got = one.submit(spec(f"until {path}"))
    os.kill(pid_in(path, one), signal.SIGKILL)
    pid_in(path, one, count=2)
    (path.with_suffix(".go")).touch()
    assert settled(one, got).state == "ready"


def a_fork_server_that_cannot_start_fails_requests_instead_of_holding_them(make, monkeypatch, tmp_path):
    (tmp_path / "broken").touch()
    (tmp_path / "program.py").write_text(
        f"import os, runpy, sys\nif os.path.exists({str(tmp_path / 'broken')!r}): sys.exit(1)\n"
        f"sys.argv[0] = {DOUBLE!r}\nrunpy.run_path({DOUBLE!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(compile_pool, "PROGRAM", str(tmp_path / "program.py"))
    one = make()
    assert settled(one, one.submit(spec("ok"))).error.code == "grammar_compiler_lost"
    (tmp_path / "broken").unlink()
    assert one.supervisor.wait_ready(PATIENCE_S)
    assert settled(one, one.submit(spec("ok"))).state == "ready"


def a_stopped_fork_server_is_replaced_and_what_waits_is_compiled(make):
    one = make()
    settled(one, one.submit(spec("ok")))
    (pid,) = fork_servers()
    os.kill(pid, signal.SIGSTOP)
    assert settled(one, one.submit(spec("ok 2"))).state == "ready"
    wait_for(lambda: not is_running(pid))
    assert settled(one, one.submit(spec("ok 3"))).state == "ready"


def test_no_process_file_or_descriptor_is_left(make, tmp_path):
    descriptors_are_given_back(make)
    for number, check in enumerate((no_file_on_a_disk_is_written, close_leaves_no_process)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(make, folder)


def close_leaves_no_process(make, tmp_path):
    one = make()
    one.submit(spec(f"sleep {tmp_path}/a"))
    one.submit(spec(f"spin {tmp_path}/b"))
    pids = {pid_in(tmp_path / "a", one), pid_in(tmp_path / "b", one), *fork_servers()}
    assert pids <= set(processes())
    pids.update(processes())  # one may wait for what is next
    one.close()
    wait_for(lambda: not processes() and not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def no_file_on_a_disk_is_written(make, tmp_path):
    one = make()
    one.submit(spec(f"sleep {tmp_path}/a"))
    for pid in (pid_in(tmp_path / "a", one), *fork_servers()):
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            info = (link.parent.parent / "fdinfo" / link.name).read_text()
            is_read_only = int(info.split("flags:")[1].split()[0], 8) & os.O_ACCMODE == os.O_RDONLY
            in_memory = target.startswith(("/memfd:", "/dev/null", "pipe:", "socket:", "anon_inode:[pidfd]"))
            assert is_read_only or in_memory or int(link.name) <= 2, target


def descriptors_are_given_back(make):
    one = make()
    settled(one, one.submit(spec("ok")))
    before = len(os.listdir("/proc/self/fd"))
    for text in ("ok 1", "refuse", "crash", "ok 2"):
        settled(one, one.submit(spec(text)))
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)


BYTES = Vocabulary(tokens=(*(bytes([i]) for i in range(256)), b""), eos_token_ids=(256,), size=257)


@pytest.fixture(scope="module")
def real():
    one = Compiler(lambda: BYTES, lambda text: list(text.encode()), timeout_s=PATIENCE_S)
    yield one
    one.close()


def first_bytes(compiled):
    mask = np.zeros(9, np.uint32)
    compiled.start().fill_mask(mask)
    return {token for token in range(257) if mask[token // 32] >> (token % 32) & 1}


OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": [1, "x"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_a_real_worker_compiles_and_hostile_constraints_change_nothing(real):
    a_real_worker_is_made_ready_refuses_what_nothing_matches_and_has_one_thread(real)
    hostile_constraints_change_nothing(real)


def a_real_worker_is_made_ready_refuses_what_nothing_matches_and_has_one_thread(real):
    got = settled(real, real.submit(spec(json.dumps(OBJECT), "json_schema")))
    assert got.error is None
    assert first_bytes(got.compiled) == {ord("{")}
    got = settled(real, real.submit(spec("[ab]|c?")))
    assert first_bytes(got.compiled) == {*b"abc", 256}
    nothing = settled(real, real.submit(spec('{"enum": ["a"], "type": "integer"}', "json_schema")))
    assert nothing.error.code == "invalid_json_schema"
    assert len(os.listdir(f"/proc/{real.supervisor.pid}/task")) == 1  # so that it can fork


def begun(one):
    return [worker for worker in one.supervisor.workers if worker.has_begun]


@pytest.mark.skipif(not seccomp.is_supported(), reason="there is no seccomp filter for this system")
def test_a_real_worker_that_compiles_is_sealed(real):
    settled(real, real.submit(spec("x")))
    wait_until(lambda: begun(real), "a worker in advance")
    for worker in begun(real):
        assert "Seccomp:\t2\n" in Path(f"/proc/{worker.pid}/status").read_text()


HOSTILE = [
    ("json_schema", '{"a":' * 30_000 + "1" + "}" * 30_000),
    ("json_schema", '{"enum": [' + ", ".join(f'"{i:x}"' for i in range(100_000)) + "]}"),
    ("json_schema", '{"$ref": "#"}'),
    ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    ("regex", "(((a{1,999}){1,999}){1,999}){1,999}"),
    ("ebnf", 'root ::= root "a" | "a"'),
    ("ebnf", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    ("structural_tag", "[" * 30_000),
    ("choice", json.dumps(["x" * 100_000] * 10)),
]


def hostile_constraints_change_nothing(real):
    wrong = []
    for kind, text in HOSTILE:
        got = settled(real, real.submit(spec(text, kind)))
        after = settled(real, real.submit(spec(f"after-{kind}-{len(text)}")))
        if (got.error is not None and got.error.status != 400) or after.state != "ready":
            wrong.append((kind, text[:50], got.error, after.error))
    assert wrong == []
