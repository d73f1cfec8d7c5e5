"""Code of clients in its sealed workers: real processes, one pool for all."""

from __future__ import annotations

import os
import select
import signal

import numpy as np
import pytest
import torch

from tureen.errors import TooManyRequests
from tureen.logit_processor import CustomLogitProcessor
from tureen.sampling import processor_pool
from tureen.sampling.processor_pool import ProcessorBatch, ProcessorError, ProcessorPool, Tracked

pytestmark = pytest.mark.usefixtures("patient_sandbox")

ROWS, VOCAB, PATIENCE_S = 4, 50, 120
HANG = "while True: pass"
ADD_ONE = "return logits + 1"


def sent(body: str, method="__call__", arguments="logits, custom_param_list") -> str:
    """The payload of a client's script whose class does this when it is called."""
    scope = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor, "torch": torch, "np": np}
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    exec(f"class Mine(CustomLogitProcessor):\n    def {method}(self, {arguments}):\n{lines}\n", scope)
    return scope["Mine"].to_str()


@pytest.fixture(scope="module")
def pool():
    """Nothing is left running when it is closed."""
    running = ProcessorPool(ROWS, VOCAB)
    yield running
    lease = load(running, sent(ADD_ONE), "last")
    ends = [os.pidfd_open(pid) for pid in (running.supervisor.pid, lease.processor.worker.pid)]
    running.close()
    assert [ended(end) for end in ends] == [True, True]


def load(pool, text, client=""):
    lease = pool.acquire(client, text)
    assert lease.is_settled.wait(PATIENCE_S)
    return lease


def step(pool, *leases):
    """What becomes of a row of zeros of each."""
    batches = [
        ProcessorBatch(lease.key, np.zeros((1, VOCAB), np.float32), [Tracked(number, {}, [1], [])])
        for number, lease in enumerate(leases)
    ]
    return [result.copy() if isinstance(result, np.ndarray) else result for result in pool.run(batches)]


def is_one(result):
    return isinstance(result, np.ndarray) and bool((result == 1).all())


def ended(pid_descriptor):
    """Waits for the end of a process."""
    has_ended = bool(select.select([pid_descriptor], [], [], PATIENCE_S)[0])
    os.close(pid_descriptor)
    return has_ended


FORGE = """
import os
from tureen.sampling import processor_messages as messages
from tureen.sandbox.framing import HEADER
for descriptor in range(64):
    for number in range(10):
        made = messages.reply(number, messages.DONE)
        try: os.write(descriptor, HEADER.pack(len(made)) + made)
        except OSError: pass
return logits
"""
HOSTILE = {
    "ends the process": ("import os\nos._exit(0)", "ended its process"),
    "allocates": ("x = []\nwhile True: x.append(bytearray(1 << 26))", "MemoryError"),
    "opens a file": ("open('/etc/passwd')", "PermissionError"),
    "starts a process": ("import os\nos.fork()", "PermissionError"),
    "prints": ("print('x' * 10**6)\nraise ValueError", "ValueError"),
    "writes everywhere": (
        "import os\nfor fd in range(99):\n    try: os.write(fd, b'\\xff' * 999)\n    except OSError: pass",
        "",
    ),
}


def test_hostile_code_fails_alone_and_ends_with_its_call(pool, monkeypatch):
    hostile_code_fails_alone_whatever_it_does_in_its_process(pool)
    a_reply_made_up_beforehand_ends_the_worker(pool)
    a_worker_cannot_compute_on_when_its_call_is_over(pool, monkeypatch)
    code_that_hangs_is_ended_its_client_is_refused_and_others_are_served(pool, monkeypatch)


def hostile_code_fails_alone_whatever_it_does_in_its_process(pool):
    good = load(pool, sent(ADD_ONE), "good")
    wrong = {}
    for name, (body, complaint) in HOSTILE.items():
        result, other = step(pool, load(pool, sent(body), name), good)
        if not (isinstance(result, ProcessorError) and complaint in str(result) and is_one(other)):
            wrong[name] = (result, other)
    assert wrong == {}
    pool.release(good)


def a_reply_made_up_beforehand_ends_the_worker(pool):
    lease = load(pool, sent(FORGE), "forger")
    end = os.pidfd_open(lease.processor.worker.pid)
    results = step(pool, lease) + step(pool, lease)
    assert any(isinstance(result, ProcessorError) and "out of order" in str(result) for result in results)
    assert ended(end)


def code_that_hangs_is_ended_its_client_is_refused_and_others_are_served(pool, monkeypatch):
    leases = [load(pool, sent(HANG), "bob"), load(pool, sent(ADD_ONE), "alice")]
    monkeypatch.setattr(processor_pool, "CALL_TIMEOUT_S", 1.0)
    hung, other = step(pool, *leases)
    assert "within 1 s" in str(hung)
    assert is_one(other)
    monkeypatch.setattr(processor_pool, "LOAD_CPU_S", 0.2)
    lease = load(pool, sent(HANG, "__init__", "*given"), "carol")
    assert "not loaded within" in str(lease.error)
    for client in ("bob", "carol"):
        with pytest.raises(TooManyRequests):
            pool.acquire(client, sent(ADD_ONE))


NUMPY = """
m = np.ones((400, 400))
np.linalg.svd(np.ones((60, 60)))
print('y', flush=True)
return logits + float((m @ m)[0, 0]) - 400 + float(np.random.default_rng(0).integers(1, 2))
"""


def test_code_works_in_the_jail_also_when_the_server_is_told_to_end(pool):
    numpy_torch_and_printing_work_in_the_jail(pool)
    what_stops_the_server_does_not_stop_the_workers_before_it(pool)


def numpy_torch_and_printing_work_in_the_jail(pool):
    assert [is_one(result) for result in step(pool, load(pool, sent(NUMPY), "numpy"))] == [True]


def what_stops_the_server_does_not_stop_the_workers_before_it(pool):
    lease, pid = load(pool, sent(ADD_ONE), "quiet"), pool.supervisor.pid
    assert os.getpgid(pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for one in (pid, lease.processor.worker.pid):
            os.kill(one, number)
        assert [is_one(result) for result in step(pool, lease)] == [True]
    assert pool.supervisor.pid == pid


COMPUTES_ON = """
import os, signal
from tureen.sampling import processor_messages as messages
from tureen.sandbox.framing import HEADER
made = messages.reply(1, messages.DONE)
for number in (signal.SIGXCPU, signal.SIGPROF):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
try: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXCPU])
except OSError: pass
for descriptor in range(64):
    try: os.write(descriptor, HEADER.pack(len(made)) + made)
    except OSError: pass
while True: pass
"""


def a_worker_cannot_compute_on_when_its_call_is_over(pool, monkeypatch):
    lease = load(pool, sent(COMPUTES_ON), "computes on")
    worker = lease.processor.worker
    monkeypatch.setattr(worker, "limits", worker.limits._replace(cpu_s=1))
    end = os.pidfd_open(worker.pid)
    step(pool, lease)
    assert ended(end)  # at the limit of its processor time
