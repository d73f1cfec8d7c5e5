"""The threads of a pool, each in a process of its own: they sleep, end, and are lost with a fork."""

import random
import signal
import subprocess
import sys
import time

import pytest

GUARDS = ("kernels",)

native = pytest.importorskip("tureen.kernels.cpu._native")


SPIN = 200e-6
"""Seconds after which a thread that finds nothing to do sleeps, at most."""


FALL_ASLEEP = """
def fall_asleep():
    for task in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        while open(f"/proc/self/task/{task}/stat").read().rsplit(")", 1)[1].split()[0] != "S":
            os.sched_yield()
"""
"""Until all threads but the first do."""


def _make_script_run(code):
    program = f"import os, sys\nimport tureen.kernels.cpu._native as native\n{FALL_ASLEEP}\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_that_are_not_in_use_sleep(count):
    asleep = _make_script_run(
        """
pool = native.Pool(4)
native.exercise_pool(pool, 1, 1)
native.exercise_pool(pool, 1, 1, 0, COUNT)
workers = sorted(os.listdir("/proc/self/task"), key=int)[COUNT:]
def sleeps():
    lines = [line for worker in workers for line in open(f"/proc/self/task/{worker}/status")]
    return [line for line in lines if line.startswith("voluntary")]
fall_asleep()
before = sleeps()
for _ in range(100):
    native.exercise_pool(pool, 10, 5, 0, COUNT)
    fall_asleep()  # so that those in use are woken
print(before == sleeps(), len(workers))
""".replace("COUNT", str(count))
    )
    assert asleep.stdout.strip() == f"True {4 - count}", asleep.stderr


def test_no_call_is_lost_while_threads_fall_asleep():
    pool = native.Pool(3)
    chance = random.Random(5)
    for _ in range(400):
        time.sleep(chance.uniform(0, 2 * SPIN))
        assert native.exercise_pool(pool, rounds=1, phases=1) == ([1, 1, 1], 0)


def test_threads_end_with_their_pool_awake_or_asleep():
    run = _make_script_run("""
def come_to(count):
    while len(os.listdir("/proc/self/task")) != count:  # who was joined may be listed a while
        os.sched_yield()
pools = [native.Pool(3) for _ in range(20)]
seen = [native.exercise_pool(pool, 20, 2) == ([20] * 3, 0) for pool in pools]
come_to(41)
del pools[:10]  # awake
come_to(21)
fall_asleep()
del pools[:]
for _ in range(50):
    native.Pool(4)  # never used
come_to(1)
print(all(seen))
""")
    assert run.stdout.strip() == "True", run.stderr


def test_more_threads_than_processors_share_them():
    run = _make_script_run(
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(native.exercise_pool(native.Pool(4), 50, 5))"
    )
    assert run.stdout.strip() == "([50, 50, 50, 50], 0)", run.stderr


def test_a_forked_process_is_told_that_the_threads_are_not_in_it():
    run = _make_script_run("""
pools = [native.Pool(2), native.Pool(3)]
for pool in pools:
    native.exercise_pool(pool, 5, 2)
fall_asleep()
child = os.fork()
if child == 0:
    for pool in pools:
        try:
            native.exercise_pool(pool, 1, 1)
        except RuntimeError as error:
            print(error)
    print(native.exercise_pool(native.Pool(2), 5, 2), flush=True)
    del pool, pools
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("parent:", [native.exercise_pool(pool, 5, 2) for pool in pools])
""")
    *told, fresh, parent = run.stdout.splitlines()
    assert len(told) == 2, run.stderr
    assert all("process that forked this one" in line for line in told)
    assert fresh == "([5, 5], 0)"
    assert parent == "parent: [([5, 5], 0), ([5, 5, 5], 0)]"


@pytest.mark.parametrize("thread", [0, 1])
def test_a_body_that_throws_ends_the_process(thread):
    run = _make_script_run(f"native.throw_in_pool(native.Pool(2), {thread})")
    assert run.returncode == -signal.SIGABRT
    assert "thrown in a pool" in run.stderr


def test_threads_that_cannot_be_started_leave_none_behind():
    run = _make_script_run("""
import resource
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20),) * 2)
try:
    native.Pool(1000)
except RuntimeError:
    print(len(os.listdir("/proc/self/task")), native.exercise_pool(native.Pool(2), 5, 2))
""")
    assert run.stdout.strip() == "1 ([5, 5], 0)", run.stderr
