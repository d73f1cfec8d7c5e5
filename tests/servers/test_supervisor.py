"""Fork servers and their workers, real ones: limits hold, and whatever dies or stops is replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox_double import LIMITS
from timeouts import wait_until

from tureen.sandbox import seccomp, stacks
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.supervisor import Supervisor, is_stopped
from tureen.sandbox.worker import OWN_BYTES, Lost

DOUBLE = str(Path(__file__).with_name("sandbox_double.py"))
PATIENCE_S = 120.0


@pytest.fixture
def make():
    made = []

    def make_supervisor(kind="open", program=DOUBLE, **options):
        one = Supervisor("doubles", program, LIMITS[kind], setup=f"{kind} words".encode(), **options)
        made.append(one)
        return one

    yield make_supervisor
    for one in made:
        one.close()
        for worker in one.workers:
            one.end(worker)


@pytest.fixture(scope="module", params=["open", "sealed"])
def running(request):
    one = Supervisor("doubles", DOUBLE, LIMITS[request.param], setup=f"{request.param} words".encode())
    assert one.wait_ready(PATIENCE_S)
    yield one
    one.close()


sealed_only = pytest.mark.parametrize("running", ["sealed"], indirect=True)


@contextlib.contextmanager
def a_worker(supervisor, descriptors=()):
    assert supervisor.wait_ready(PATIENCE_S)
    worker = supervisor.fork(descriptors)
    try:
        worker.begin(time.monotonic() + PATIENCE_S)
        yield worker
    finally:
        supervisor.end(worker)


def children_of(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ask(worker, text):
    return worker.call(text.encode(), timeout_s=PATIENCE_S).decode()


class Watched:
    """A process whose end can be waited for."""

    def __init__(self, pid):
        self._end = os.pidfd_open(pid)

    def has_ended(self):
        """Waits for it."""
        ended = bool(select.select([self._end], [], [], PATIENCE_S)[0])
        os.close(self._end)
        return ended


def wait_replaced(supervisor, before):
    """Until there is another fork server, which is ready."""
    with supervisor._changed:
        assert supervisor._changed.wait_for(
            lambda: supervisor.condition == "ready" and supervisor.num_replaced > before, PATIENCE_S
        )


def test_a_worker_answers_within_its_limits_and_how_it_ended_is_known(running, patient, monkeypatch):
    a_worker_is_a_process_of_its_own_that_answers_message_after_message_and_large_ones(running)
    memory_past_the_limit_is_refused_and_below_it_given_and_a_reply_that_is_too_large_is_not_read(running)
    one_that_does_not_answer_in_time_is_late_and_what_the_server_ends_is_not_ended_from_outside(running)
    a_worker_that_is_ended_from_outside_is_told_from_one_that_ends_by_itself(running, monkeypatch)


def a_worker_is_a_process_of_its_own_that_answers_message_after_message_and_large_ones(running):
    with a_worker(running) as worker:
        assert [ask(worker, f"echo {number}") for number in range(20)] == [str(number) for number in range(20)]
        assert ask(worker, "echo " + "x" * (3 << 20)) == "x" * (3 << 20)
        assert ask(worker, f"size {5 << 20}") == "x" * (5 << 20)
    with a_worker(running) as one, a_worker(running) as other:
        assert ask(one, "setup").endswith("words")
        assert int(ask(one, "pid")) == one.pid != other.pid == int(ask(other, "pid"))
        assert os.getpid() not in (one.pid, other.pid, running.pid)


def test_a_worker_has_what_it_was_sent_its_own_environment_and_a_small_stack(make, tmp_path, monkeypatch, caplog):
    descriptors_reach_the_worker_they_were_sent_to(make, tmp_path)
    the_environment_of_a_fork_server_is_its_own(make, monkeypatch)
    a_worker_has_less_stack_than_the_threads_that_load_what_it_made(make)
    where_there_is_no_filter_the_log_says_at_the_start_which_workers_have_none(make, monkeypatch, caplog)


def descriptors_reach_the_worker_they_were_sent_to(make, tmp_path):
    file = tmp_path / "file"
    file.write_text("from outside")
    with file.open("rb") as opened, a_worker(make(), [opened.fileno()]) as worker:
        assert ask(worker, "descriptor") == "from outside"


def memory_past_the_limit_is_refused_and_below_it_given_and_a_reply_that_is_too_large_is_not_read(running):
    with a_worker(running) as worker:
        assert ask(worker, f"memory {16 << 20}") == str(16 << 20)
        assert ask(worker, f"memory {80 << 20}") == "MemoryError"
        assert ask(worker, "echo on") == "on"
        worker.send(b"size 1000", until_s=time.monotonic() + PATIENCE_S)
        with pytest.raises(Lost, match="1000 bytes"):
            worker.receive(time.monotonic() + PATIENCE_S, 999)


def one_that_does_not_answer_in_time_is_late_and_what_the_server_ends_is_not_ended_from_outside(running):
    with a_worker(running) as worker:
        with pytest.raises(Lost) as caught:
            worker.call(b"sleep", timeout_s=0.05)
        assert caught.value.is_late
        watched = Watched(worker.pid)
    assert watched.has_ended()
    with a_worker(running) as worker:
        assert not lost(worker, "sleep", worker.kill).is_outside


@pytest.fixture
def patient(monkeypatch):
    """How a worker ended is waited for, however long a busy machine takes to say so."""
    monkeypatch.setattr("tureen.sandbox.worker.STATUS_TIMEOUT_S", PATIENCE_S)


def lost(worker, text, do=lambda: None):
    """How it is lost that was asked, when something is done meanwhile."""
    worker.begin(time.monotonic() + PATIENCE_S)
    worker.send(text.encode(), until_s=math.inf)
    do()
    with pytest.raises(Lost) as caught:
        worker.receive(math.inf)
    return caught.value


def a_worker_that_is_ended_from_outside_is_told_from_one_that_ends_by_itself(running, monkeypatch):
    outside = {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}
    told = {}
    with a_worker(running):  # another one, which nothing happens to
        for text in (*outside, "exit", "spin", "crash", "close"):
            patience_s = 0.2 if text == "close" else PATIENCE_S  # nothing comes that could be waited for
            monkeypatch.setattr("tureen.sandbox.worker.STATUS_TIMEOUT_S", patience_s)
            with a_worker(running) as worker:
                watched = Watched(worker.pid)
                if text in outside:
                    error = lost(worker, "sleep", lambda pid=worker.pid, text=text: os.kill(pid, outside[text]))
                else:
                    error = lost(worker, text)
                told[text] = error.is_outside, error.is_blameless, error.has_begun, "was killed" in str(error)
            assert watched.has_ended()
    assert running.num_replaced == 0
    by_itself = dict.fromkeys(("exit", "spin", "crash", "close"), (False, False, True, False))
    assert told == dict.fromkeys(outside, (True, False, True, True)) | by_itself


@sealed_only
def test_a_sealed_worker_is_watched_cleared_away_and_granted_time_for_each_message(running, patient, monkeypatch):
    a_worker_that_cannot_be_looked_at_for_want_of_descriptors_counts_as_running(running, monkeypatch)
    workers_leave_no_process_behind_that_nobody_has_asked_about(running)
    each_message_grants_new_processor_time(running, monkeypatch)


def a_worker_that_cannot_be_looked_at_for_want_of_descriptors_counts_as_running(running, monkeypatch):
    with a_worker(running) as worker, monkeypatch.context() as patch:
        patch.setattr("builtins.open", no_descriptor)
        assert not is_stopped(worker.pid)
        assert worker.memory_bytes == OWN_BYTES


def no_descriptor(*_, **more):
    raise OSError(errno.EMFILE, "Too many open files")


def workers_leave_no_process_behind_that_nobody_has_asked_about(running):
    with a_worker(running) as worker:
        lost(worker, "exit")
        assert worker.pid not in children_of(running.pid)


FORBIDDEN = ("open", "dup", "socket", "fork", "exec", "kill", "raise a limit", "stop the alarm", "ignore the limit")


@pytest.mark.skipif(not seccomp.is_supported(), reason="there is no seccomp filter for this system")
def test_a_sealed_worker_has_no_rights(make):
    supervisor = make("sealed")
    with a_worker(supervisor) as worker:
        assert {what: ask(worker, f"attempt {what}") for what in FORBIDDEN} == dict.fromkeys(FORBIDDEN, "refused")
        assert ask(worker, "environment") == "{}"


def each_message_grants_new_processor_time(running, monkeypatch):
    """So one that is used for long gets the time that it needs."""
    with a_worker(running) as worker:
        for used_s in (7.0, 100.0):
            monkeypatch.setattr(type(worker), "cpu_s", used_s)
            assert ask(worker, "echo x") == "x"
            assert resource.prlimit(worker.pid, resource.RLIMIT_CPU)[0] == used_s + worker.limits.cpu_s


@pytest.fixture
def only_high_descriptors():
    """Descriptors from 2000 on, which select(2) does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 2000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_workers_take_no_descriptors_and_work_where_thousands_are_open(make, patient, only_high_descriptors):
    many_workers_leave_no_descriptor_behind(make)
    a_server_with_thousands_of_connections_still_starts_and_watches_workers(make, only_high_descriptors)


def a_server_with_thousands_of_connections_still_starts_and_watches_workers(make, only_high_descriptors):
    one = make()
    for end in ("_wake_read", "_wake"):
        low = getattr(one, end)
        setattr(one, end, only_high_descriptors(low))
        os.close(low)
    with a_worker(one) as worker:
        low, worker._process = worker._process, only_high_descriptors(worker._process)
        os.close(low)
        connection = worker._connection
        worker._connection = socket.socket(fileno=only_high_descriptors(connection.fileno()))
        connection.close()
        assert worker.is_alive
        assert ask(worker, "echo x") == "x"
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.wait_readable(PATIENCE_S)
        with pytest.raises(Lost) as lost:
            ask(worker, "echo x")
        assert lost.value.is_outside
        assert not worker.is_alive
    assert one.num_replaced == 0


def where_there_is_no_filter_the_log_says_at_the_start_which_workers_have_none(make, monkeypatch, caplog):
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    make("open")
    assert caplog.messages == []
    make("sealed")
    assert [message.partition(",")[0] for message in caplog.messages] == ["doubles run without a seccomp filter"]


def is_lost(worker):
    with pytest.raises(Lost):
        ask(worker, "sleep")
    return True


def test_a_fork_server_that_dies_stops_or_cannot_start_is_replaced_and_nothing_waits_for_it(make, tmp_path):
    a_fork_server_that_dies_or_stops_is_replaced_and_later_workers_work(make)
    while_one_is_replaced_it_says_so_and_nothing_waits(make, tmp_path)
    one_that_cannot_start_is_tried_again_and_close_does_not_wait_for_it(make)


def a_fork_server_that_dies_or_stops_is_replaced_and_later_workers_work(make):
    supervisor = make()
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV):
        with a_worker(supervisor) as worker:
            assert ask(worker, "echo before") == "before"
            pid, before = supervisor.pid, supervisor.num_replaced
            watched, workers = Watched(pid), Watched(worker.pid)
            with ThreadPoolExecutor(1) as threads, a_worker(supervisor) as other:
                waiting = threads.submit(is_lost, other)
                os.kill(pid, number)
                assert watched.has_ended()
                assert workers.has_ended()  # it dies with the one that it came from
                assert waiting.result(PATIENCE_S)
            wait_replaced(supervisor, before)
            with pytest.raises(Lost) as caught:
                ask(worker, "echo after")
            assert caught.value.is_blameless
        assert supervisor.pid != pid


def while_one_is_replaced_it_says_so_and_nothing_waits(make, tmp_path):
    gate = tmp_path / "gate"
    waits = tmp_path / "double.py"  # ready at once, and after that not before the gate opens
    waits.write_text(
        "import os, runpy, sys\n"
        f"if os.path.exists({str(gate)!r}): open({str(gate)!r}).read()\n"
        f"sys.argv[0] = {DOUBLE!r}\nrunpy.run_path({DOUBLE!r}, run_name='__main__')\n"
    )
    supervisor = make(program=str(waits))
    assert not supervisor.is_down
    assert supervisor.wait_ready(PATIENCE_S)
    os.mkfifo(gate)
    os.kill(supervisor.pid, signal.SIGKILL)
    with supervisor._changed:
        assert supervisor._changed.wait_for(lambda: supervisor.is_down, PATIENCE_S)
    with pytest.raises(Lost, match="being replaced") as caught:
        supervisor.fork()
    assert caught.value.is_blameless
    with open(gate, "w"):
        pass
    assert supervisor.wait_ready(PATIENCE_S)
    assert not supervisor.is_down


def one_that_cannot_start_is_tried_again_and_close_does_not_wait_for_it(make):
    supervisor = make(program="tureen.no_such_program")
    supervisor.start()
    with supervisor._changed:
        assert supervisor._changed.wait_for(lambda: supervisor.num_replaced >= 2, PATIENCE_S)
    assert supervisor.condition == "starting"
    with pytest.raises(Lost):
        supervisor.fork()


def test_no_process_is_left_after_close_or_when_the_engine_is_killed(make):
    close_leaves_no_process(make)
    nothing_outlives_an_engine_that_is_killed_while_its_fork_server_is_stopped()


def close_leaves_no_process(make):
    supervisor = make()
    with a_worker(supervisor) as one, a_worker(supervisor) as other:
        watched = [Watched(pid) for pid in (supervisor.pid, one.pid, other.pid)]
        supervisor.close()
        assert all(each.has_ended() for each in watched)
        with pytest.raises(Lost):
            ask(one, "echo on")
    supervisor.close()
    assert supervisor.condition == "closed"


ENGINE = """
import sys, time
from sandbox_double import LIMITS
from tureen.sandbox.supervisor import Supervisor
one = Supervisor("doubles", sys.argv[1], LIMITS["open"], setup=b"open")
assert one.wait_ready(120)
worker = one.fork()
worker.begin(time.monotonic() + 120)
worker.send(b"spin", until_s=time.monotonic() + 120)
print(one.pid, worker.pid, flush=True)
sys.stdin.read()
"""


def nothing_outlives_an_engine_that_is_killed_while_its_fork_server_is_stopped():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, DOUBLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as engine:
        pids = [int(word) for word in engine.stdout.readline().split()]
        watched = [Watched(pid) for pid in pids]
        os.kill(pids[0], signal.SIGSTOP)
        engine.kill()
        assert all(each.has_ended() for each in watched)


def many_workers_leave_no_descriptor_behind(make):
    supervisor = make()
    with a_worker(supervisor) as worker:
        ask(worker, "echo x")
    folders = "/proc/self/fd", f"/proc/{supervisor.pid}/fd"
    wait_until(lambda: children_of(supervisor.pid) == [], "the end of the first worker")
    before = [len(os.listdir(one)) for one in folders]
    for number in range(20):
        with a_worker(supervisor) as worker:
            if number % 2:
                with pytest.raises(Lost):
                    ask(worker, "exit")
            else:
                assert ask(worker, "echo x") == "x"
    wait_until(lambda: children_of(supervisor.pid) == [], "the end of the last worker")
    wait_until(
        lambda: all(len(os.listdir(one)) <= num for one, num in zip(folders, before, strict=True)), "no more files"
    )
    assert supervisor.workers == []


def test_workers_keep_within_a_budget_of_memory(make):
    a_worker_s_memory_is_counted_and_past_the_budget_it_is_ended(make)
    a_burst_of_real_workers_waits_for_each_other_and_all_work(make)


def a_worker_s_memory_is_counted_and_past_the_budget_it_is_ended(make):
    supervisor = make()
    with a_worker(supervisor) as worker:
        assert worker.memory_bytes < 64 << 20
        budget = MemoryBudget(1)
        supervisor.share(budget)
        watched = Watched(worker.pid)
        assert watched.has_ended()  # the watching thread enforces it
        with pytest.raises(Lost):
            ask(worker, "echo on")


def a_burst_of_real_workers_waits_for_each_other_and_all_work(make):
    supervisor = make()
    supervisor.share(MemoryBudget(40 << 20))  # two have room at once, by what is reserved for them
    assert supervisor.wait_ready(PATIENCE_S)

    def work(number):
        with a_worker(supervisor) as worker:
            return ask(worker, f"echo {number}")

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(work, range(12))) == [str(number) for number in range(12)]


THREADS = ("OPENBLAS", "OMP", "MKL", "RAYON")
ENVIRONMENT = {"PATH", "PYTHONPATH", "LC_CTYPE", *(f"{library}_NUM_THREADS" for library in THREADS)}


def the_environment_of_a_fork_server_is_its_own(make, monkeypatch):
    monkeypatch.setenv("TUREEN_API_KEY", "secret")
    with a_worker(make()) as worker:
        assert set(json.loads(ask(worker, "environment"))) <= ENVIRONMENT


def a_worker_has_less_stack_than_the_threads_that_load_what_it_made(make):
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (before[1], before[1]))  # as `ulimit -s unlimited` does
    try:
        with a_worker(make()) as worker:
            allowed = resource.prlimit(worker.pid, resource.RLIMIT_STACK)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)
    assert allowed == (stacks.WORKER_BYTES, stacks.WORKER_BYTES)
