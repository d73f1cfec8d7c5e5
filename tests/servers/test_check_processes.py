"""Outputs are judged in real, sealed processes, which end where they compute for ever or are killed."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
from pathlib import Path

import pytest
from timeouts import wait_until

from tureen.grammar.base import GrammarSpec
from tureen.grammar_service import check as module
from tureen.grammar_service.check import Checker, Unverified, check
from tureen.sandbox import seccomp

LOOP = "(a|a)*(?=b)b"  # every judge that backtracks is lost in it
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value, after=""):
    return GrammarSpec("json_schema", json.dumps(value), after)


def judged(checker, spec, text):
    """Return the checker's complaint. None if the text is valid or could not be verified."""
    verdict = checker.check(spec, text)
    return verdict.complaint if verdict.is_verified else None


@pytest.fixture
def patient(monkeypatch):
    """Whatever can be told is told, however slow the machine is."""
    monkeypatch.setattr(module, "CHECK_TIMEOUT_S", 120.0)
    monkeypatch.setattr(module, "START_TIMEOUT_S", 120.0)
    monkeypatch.setattr(module, "MAX_WAIT_S", 120.0)


def doubling(depth):
    """A schema that takes 2 ** depth steps to apply to anything."""
    rules = {f"r{i}": {"allOf": [{"$ref": f"#/$defs/r{i + 1}"}] * 2} for i in range(depth)}
    return schema({"$ref": "#/$defs/r0", "$defs": rules | {f"r{depth}": {"type": "integer"}}})


FOR_EVER = ((doubling(80), "1"), (schema({"pattern": f"^{LOOP}$"}), json.dumps("a" * 60)))


def test_what_computes_for_ever_is_ended_and_the_next_check_works(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 120.0)
    monkeypatch.setattr(module, "START_TIMEOUT_S", 120.0)
    checker = Checker()
    try:
        for count, (spec, text) in enumerate(FOR_EVER, 1):
            monkeypatch.setattr(module, "CHECK_TIMEOUT_S", 0.1)
            assert judged(checker, spec, text) is None
            assert checker.unverified == count
            monkeypatch.setattr(module, "CHECK_TIMEOUT_S", 120.0)
            assert judged(checker, schema({"type": "null"}), "1") is not None
            assert judged(checker, schema({"type": "null"}), "null") is None
    finally:
        checker.close()


class Listener(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(404)
        self.end_headers()


def test_nothing_that_a_schema_names_is_fetched(tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), Listener)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (tmp_path / "local.json").write_text('{"type": "null"}')
    address = f"http://127.0.0.1:{server.server_port}/schema.json"
    try:
        for uri in (address, f"file://{tmp_path}/local.json"):
            assert check(schema({"$schema": uri}), "1") is None
            for value in ({"$ref": uri}, {"$dynamicRef": uri}, {"$id": uri, "$ref": "other.json"}):
                with pytest.raises(Unverified):
                    check(schema(value), "1")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert server.asked == []


@pytest.mark.usefixtures("patient")
def test_a_checker_is_sealed_replaced_when_it_was_killed_and_leaves_no_process():
    a_checker_that_was_killed_is_replaced()
    close_leaves_no_process_and_later_checks_tell_nothing()


def a_checker_that_was_killed_is_replaced():
    checker = Checker()
    try:
        assert judged(checker, schema({"type": "null"}), "1") is not None
        if seccomp.is_supported():
            assert "Seccomp:\t2\n" in Path(f"/proc/{checker._worker.pid}/status").read_text()
        for pid in (checker._worker.pid, checker.supervisor.pid):
            os.kill(pid, signal.SIGKILL)
            assert judged(checker, schema({"type": "null"}), "1") is not None  # judged by another one
        assert checker.unverified == 0
    finally:
        checker.close()


def close_leaves_no_process_and_later_checks_tell_nothing():
    checker = Checker()
    assert judged(checker, schema(PERSON), "1") is not None
    pids = checker.supervisor.pid, checker._worker.pid
    checker.close()
    assert not os.path.exists(f"/proc/{pids[0]}")
    wait_until(lambda: not os.path.exists(f"/proc/{pids[1]}"), "the worker's end")
    assert judged(checker, schema(PERSON), "1") is None
    assert checker.unverified == 1
