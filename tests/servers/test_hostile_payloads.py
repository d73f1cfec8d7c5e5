"""Whatever a client sends in place of a processor: nothing outside the sandbox hears of it, and the pool goes on."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import dill
import numpy as np
import pytest
import torch

from tureen.logit_processor import CustomLogitProcessor
from tureen.sampling.processor_pool import ProcessorBatch, ProcessorError, ProcessorPool, Tracked, key_of

pytestmark = pytest.mark.usefixtures("patient_sandbox")

ROWS, VOCAB = 4, 50


ADD_ONE = "return logits + 1"
LIE = """
        import os
        for descriptor in range(64):
            try:
                os.write(descriptor, b"\\xff" * 5000)
            except OSError:
                pass
        return logits
"""


def sent(body: str) -> str:
    """The payload of a client's script whose class does this when it is called."""
    scope = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor, "torch": torch}
    head = "class Mine(CustomLogitProcessor):\n    def __call__(self, logits, custom_param_list):\n        "
    exec(head + body.strip() + "\n", scope)
    return scope["Mine"].to_str()


def payload(data: bytes) -> str:
    return json.dumps({"callable": data.hex()})


def batch(text: str, logits: np.ndarray, number: int = 0, params: dict | None = None) -> ProcessorBatch:
    return ProcessorBatch(key_of("", text), logits, [Tracked(number, params or {}, [1], [])])


def run(pool, text, logits, sequences=None):
    """Load it, as the engine does before a request runs, and call it once."""
    lease = pool.acquire("", text)
    assert lease.is_settled.wait(120)
    try:
        [result] = pool.run(
            [batch(text, logits) if sequences is None else ProcessorBatch(lease.key, logits, sequences)]
        )
        return result
    finally:
        pool.release(lease)


@pytest.fixture(scope="module")
def pool():
    running = ProcessorPool(ROWS, VOCAB)
    running.charges.suspend = lambda client, why: None  # what comes of a charge is tested elsewhere
    yield running
    running.close()


@pytest.fixture
def traps(tmp_path):
    """A file that must not appear, and a socket that must not be connected to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        yield str(tmp_path / "canary"), listener


class Gadget:
    """Unpickled, it calls."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def text_gadget(module: str, name: str, argument: str) -> bytes:
    """Protocol 0: calls module.name(argument)."""
    return f"c{module}\n{name}\n(S{argument!r}\ntR.".encode()


def corpus(file: str, port: int) -> dict[str, bytes]:
    touch = f"open({file!r}, 'w').write('x')"
    connect = f"__import__('socket').create_connection(('127.0.0.1', {port}))"
    shell = f"touch {file}"

    def nested():
        open(file, "w").close()

    class Builder:
        def __reduce__(self):
            return (nested, ())

    return {
        "os.system": text_gadget("os", "system", shell),
        "posix.system": text_gadget("posix", "system", shell),
        "eval-open": text_gadget("builtins", "eval", touch),
        "exec-open": text_gadget("builtins", "exec", touch),
        "eval-connect": text_gadget("builtins", "eval", connect),
        "eval-udp": text_gadget("builtins", "eval", "__import__('socket').socket(2, 2)"),
        "subprocess": dill.dumps(Gadget(eval, f"__import__('subprocess').run({shell.split()!r})")),
        "popen": dill.dumps(Gadget(os.popen, shell)),
        "getattr-import": dill.dumps(Gadget(eval, f"getattr(__builtins__, '__imp' + 'ort__')('os').system({shell!r})")),
        "fork": dill.dumps(Gadget(eval, f"__import__('os').fork() or {touch}")),
        "execve": dill.dumps(Gadget(os.execv, "/bin/sh", ["sh", "-c", shell])),
        "spawn": dill.dumps(Gadget(os.posix_spawn, "/bin/touch", ["touch", file], {})),
        "kill-parent": dill.dumps(Gadget(os.kill, os.getpid(), 9)),
        "kill-group": dill.dumps(Gadget(os.kill, 0, 9)),
        "ptrace": dill.dumps(Gadget(eval, f"__import__('ctypes').CDLL(None).ptrace(16, {os.getpid()}, 0, 0)")),
        "mkfifo": dill.dumps(Gadget(os.mkfifo, file)),
        "symlink": dill.dumps(Gadget(os.symlink, "/etc/passwd", file)),
        "mkdir": dill.dumps(Gadget(os.mkdir, file)),
        "read-passwd": dill.dumps(Gadget(eval, "open('/etc/passwd').read()")),
        "environment": dill.dumps(Gadget(eval, "__import__('os').environ['HOME']")),
        "partial": dill.dumps(Gadget(eval, f"__import__('functools').partial(exec, {touch!r})()")),
        "codecs": dill.dumps(Gadget(eval, f"exec(__import__('codecs').decode({touch.encode().hex()!r}, 'hex'))")),
        "nested-code": dill.dumps(Builder(), recurse=True),
        "huge-memory": dill.dumps(Gadget(bytearray, 100 << 30)),
        "huge-list": b"\x80\x04]" + b"(K\x00e" * 10 + b".",
        "memo-bomb": b"\x80\x04" + b"]\x94" + b"h\x00a" * 50_000 + b".",
        "deep": b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".",
        "exit": dill.dumps(Gadget(os._exit, 0)),
        "sys-exit": text_gadget("builtins", "exit", "x"),
        "loop": dill.dumps(Gadget(exec, "while True: pass")),
        "not-a-class": pickle.dumps(5),
        "class-without-call": dill.dumps(type("Plain", (), {"__module__": "__main__"})),
        "init-raises": dill.dumps(type("Bad", (), {"__module__": "__main__", "__init__": lambda self: 1 / 0})),
        "module-that-is-not-there": b"cno.such.module\nThing\n.",
        "truncated": dill.dumps(type("Cut", (), {"__module__": "__main__"}))[:-20],
        "empty": b"",
        "noise": bytes(range(256)) * 20,
    }


def test_a_hostile_payload_touches_nothing_and_the_next_one_works(pool, traps, monkeypatch):
    each_payload_is_refused_and_the_next_one_works(pool, traps, monkeypatch)
    nothing_is_unpickled_on_this_side(pool)
    a_reply_that_is_garbage_fails_the_request_alone(pool)


def each_payload_is_refused_and_the_next_one_works(pool, traps, monkeypatch):
    file, listener = traps
    logits = np.arange(VOCAB, dtype=np.float32)[None]
    wrong = {}
    payloads = corpus(file, listener.getsockname()[1])
    assert len(payloads) >= 20
    for name, data in payloads.items():
        with monkeypatch.context() as patch:
            if name == "loop":
                patch.setattr("tureen.sampling.processor_pool.LOAD_CPU_S", 1.0)
            result = run(pool, payload(data), logits)
        is_rejected = isinstance(result, ProcessorError) and result.is_rejected and len(str(result)) < 300
        if not is_rejected or os.path.lexists(file):
            wrong[name] = (result, os.path.lexists(file))
    assert wrong == {}
    with pytest.raises(TimeoutError):
        listener.accept()
    assert np.array_equal(run(pool, sent(ADD_ONE), logits), logits + 1)


def nothing_is_unpickled_on_this_side(pool):
    seen = []
    active = [True]

    sys.addaudithook(lambda event, _: seen.append(event) if active[0] and event.startswith("pickle.") else None)
    run(pool, payload(text_gadget("os", "system", "true")), np.zeros((1, VOCAB), dtype=np.float32))
    active[0] = False
    assert seen == []


BASES = {
    "0.4.3": """
        class CustomLogitProcessor(ABC):
            @abstractmethod
            def __call__(self, logits, custom_param_list=None): ...

            def to_str(self):
                return json.dumps({"callable": dill.dumps(self).hex()})
    """,
    "0.5": """
        class CustomLogitProcessor(ABC):
            @abstractmethod
            def __call__(self, logits, custom_param_list=None): ...

            @classmethod
            def to_str(cls):
                return json.dumps({"callable": dill.dumps(cls).hex()})
    """,
}
"""SGLang's base class: the first one sent an object, those of today send the class."""


CLIENT = """
import sys, torch
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class Only(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list):
            for row, params in enumerate(custom_param_list):
                logits[row, torch.arange(logits.shape[1]) != params["token_id"]] = -float("inf")
            return logits

    print(Only().to_str())
"""
"""A client's script, for each folder with SGLang's class."""


def test_an_unpickled_name_of_sglang_s_is_our_base_class(pool, tmp_path):
    """What a client's script sends that has SGLang's class: made in a process where that module exists."""
    for version, base in BASES.items():
        module = tmp_path / version / "sglang" / "srt" / "sampling"
        module.mkdir(parents=True)
        for folder in (module, module.parent, module.parents[1]):
            (folder / "__init__.py").touch()
        head = "import json\nfrom abc import ABC, abstractmethod\n\nimport dill\n"
        (module / "custom_logit_processor.py").write_text(head + textwrap.dedent(base))
    (tmp_path / "client.py").write_text(CLIENT)
    command = [sys.executable, str(tmp_path / "client.py"), *(str(tmp_path / version) for version in BASES)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    for version, text in zip(BASES, made, strict=True):
        logits = np.zeros((2, VOCAB), dtype=np.float32)
        sequences = [Tracked(0, {"token_id": 7}, [], []), Tracked(1, {"token_id": 9}, [], [])]
        result = run(pool, text, logits, sequences)
        assert isinstance(result, np.ndarray), (version, str(result))
        assert result.argmax(axis=1).tolist() == [7, 9], version
        assert np.isfinite(result).sum(axis=1).tolist() == [1, 1], version


def a_reply_that_is_garbage_fails_the_request_alone(pool):
    result = run(pool, sent(LIE), np.zeros((1, VOCAB), dtype=np.float32))
    assert isinstance(result, ProcessorError)
    good = run(pool, sent(ADD_ONE), np.zeros((1, VOCAB), dtype=np.float32))
    assert np.array_equal(good, np.ones((1, VOCAB)))


FUZZ = Path(__file__).parents[1] / "fuzz"


def test_pickles_of_the_fuzzer_s_corpus_harm_nothing(monkeypatch):
    """What it began with and what it found, whole and cut."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FUZZ)])
    import processor_target

    files = sorted((FUZZ / "corpus" / "processor").iterdir())
    assert len(files) >= 5
    with processor_target.HELD:
        for path in files:
            data = path.read_bytes()
            processor_target.pickle(data)
            processor_target.pickle(data[: len(data) // 2])
    processor_target.pool.cache_clear()
