"""Starts in turn, of servers without a model."""

import argparse
import json
import sys

import pytest
from free_ports import free_port

from tureen.bench import starts
from tureen.bench.command import add_arguments, run
from tureen.bench.process import listener

SERVER = """
import http.server, json, sys
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, data, kind):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self): self.answer(b'{"vocab_size": 100}', "application/json")
    def do_POST(self):
        length = len(json.loads(self.rfile.read(int(self.headers["content-length"])))["input_ids"])
        reason = {"type": "length", "length": 1}
        meta = {"prompt_tokens": length, "completion_tokens": 1, "cached_tokens": 0, "finish_reason": reason}
        event = json.dumps({"text": "x", "output_ids": [7], "meta_info": meta})
        self.answer(f"data: {event}\\n\\ndata: [DONE]\\n\\n".encode(), "text/event-stream")
    def log_message(self, *_): pass
print("started", flush=True)
with open(sys.argv[2], "a") as log: log.write(sys.argv[1] + " ")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


@pytest.fixture
def ports() -> list[int]:
    """Two different ones."""
    found: set[int] = set()
    while len(found) < 2:
        found.add(free_port())
    return sorted(found)


@pytest.fixture
def command(tmp_path, ports):
    """The arguments that measure two servers on two ports, and the file in which each start leaves its port."""
    script, log = tmp_path / "server.py", tmp_path / "log"
    script.write_text(SERVER)
    arguments = ["--workload", "start"]
    for name, port in zip("ab", ports, strict=True):
        arguments += ["--target", f"{name}=tureen@http://127.0.0.1:{port}"]
        arguments += ["--start", f"{name}={sys.executable} {script} {port} {log}"]
    return arguments, log


def _run(*arguments):
    parser = argparse.ArgumentParser(prog="bench")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def test_servers_are_started_in_turn_once_more_than_is_counted(command, ports, tmp_path, capsys):
    arguments, log = command
    file = tmp_path / "out.json"
    assert _run(*arguments, "--rounds", "2", "--json", str(file)) == 0
    assert log.read_text().split() == [str(port) for port in ports] * 3
    found = json.loads(file.read_text())["starts"]
    assert [(one["target"], one["round"]) for one in found] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert all(0 < one["ready_s"] < one["first_token_s"] for one in found)
    assert all(one["cpu_s"] > 0 for one in found)
    assert [listener(port) for port in ports] == [None, None]
    assert "first token a/b:" in capsys.readouterr().out


def test_what_a_server_reads_leaves_the_page_cache_before_each_start_that_counts(command, tmp_path, monkeypatch):
    arguments, log = command
    read = tmp_path / "read"
    read.mkdir()
    (read / "module.py").write_text("pass")
    evicted = []
    monkeypatch.setattr(starts, "_own_folders", lambda: [read])
    monkeypatch.setattr(starts, "evict", lambda path: evicted.append((path, len(log.read_text().split()))))
    assert _run(*arguments, "--rounds", "1", "--cold", "evict") == 0
    assert [started for path, started in evicted if path == read / "module.py"] == [2, 3]
    assert any("libc" in path.name for path, _ in evicted)  # every program has it mapped
