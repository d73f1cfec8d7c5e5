"""`tureen chat` in a real terminal, with a real server: what is typed, what is shown, what the server is asked."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import httpx
import jsonschema
from server_process import ServerProcess, metric
from terminal_session import TerminalSession
from timeouts import PATIENCE_S, wait_until

ABORTED = "sglang:num_aborted_requests_total"
QUESTION = "What is the capital of France?"
GREEDY = ("--temperature", "0", "--max-new-tokens", "12")


def chat(server: ServerProcess, tmp_path, *flags: str) -> TerminalSession:
    return TerminalSession("chat", "--url", server.url, "--download-dir", str(tmp_path), *flags)


def answer_over_http(server: ServerProcess, *texts: str, **fields) -> str:
    """Answers a chat whose turns are the texts."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    body = {"messages": turns, "temperature": 0, "max_tokens": 12} | fields
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    return answer["choices"][0]["message"]["content"]


def num_running(server: ServerProcess) -> int:
    return httpx.get(f"{server.url}/v1/loads").json()["loads"][0]["num_running_reqs"]


def test_a_conversation_in_a_terminal_is_answered_interrupted_saved_edited_and_gone_on_with(server, tmp_path):
    what_is_typed_is_answered_with_the_turns_before_it(server, tmp_path)
    a_conversation_is_saved_edited_and_gone_on_with(server, tmp_path)
    ctrl_c_ends_the_answer_on_the_server_too_and_the_chat_goes_on(server, tmp_path)


def what_is_typed_is_answered_with_the_turns_before_it(server, tmp_path):
    first = answer_over_http(server, QUESTION)
    second = answer_over_http(server, QUESTION, first, "And of Spain?")
    with chat(server, tmp_path, *GREEDY) as terminal:
        terminal.type(QUESTION)
        terminal.wait_for(first.split("\n")[0][:60])
        terminal.type("And of Spain?")
        terminal.wait_for(second.split("\n")[0][:60])
        terminal.wait_for_prompt()
        terminal.keys("\x04")
        wait_until(lambda: terminal.process.poll() is not None, "the end of the chat")
        assert terminal.process.returncode == 0


def a_conversation_is_saved_edited_and_gone_on_with(server, tmp_path):
    kept = tmp_path / "kept.json"
    with chat(server, tmp_path, *GREEDY, "--system", "Be brief.") as terminal:
        terminal.type("Say hello")
        terminal.wait_for("(cut short)")
        terminal.type("/edit")
        terminal.type(" to me")  # behind what is in the prompt again
        terminal.wait_for("(cut short)")
        terminal.type(f"/save {kept}")
        terminal.wait_for("saved in")
        saved = json.loads(kept.read_text())
        assert [turn["role"] for turn in saved["messages"]] == ["user", "assistant"]
        assert saved["messages"][0]["content"] == "Say hello to me"
        system = {"role": "system", "content": "Be brief."}
        body = {
            "messages": [system, {"role": "user", "content": "Say hello to me"}],
            "temperature": 0,
            "max_tokens": 12,
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert saved["messages"][1]["content"] == answer["choices"][0]["message"]["content"]
    with chat(server, tmp_path) as terminal:
        terminal.type(f"/load {kept}")
        terminal.wait_for("2 messages")
        terminal.type("/regen")
        terminal.wait_for("(cut short)")
        terminal.type(f"/save {kept}")
        terminal.wait_for("saved in")
        assert json.loads(kept.read_text())["messages"] == saved["messages"]


def ctrl_c_ends_the_answer_on_the_server_too_and_the_chat_goes_on(server, tmp_path):
    begins = answer_over_http(server, QUESTION).split("\n")[0][:20]
    wait_until(lambda: num_running(server) == 0, "nothing of other tests runs")
    before = metric(server.url, ABORTED)
    with chat(server, tmp_path, "--temperature", "0", "--ignore-eos", "--max-new-tokens", "6000") as terminal:
        terminal.type(QUESTION)
        terminal.wait_for(begins)
        terminal.keys("\x03")
        wait_until(lambda: num_running(server) == 0, "the end of the answer")
        wait_until(lambda: metric(server.url, ABORTED) == before + 1, "it is counted")
        terminal.wait_for("(cut short)")
        terminal.type("/stats")
        terminal.wait_for("all: 1 answer, ")  # of an answer that was cut, too


MISTAKES = {
    "/nonsense": "/nonsense is not a command",
    "/set temprature 1": "did you mean temperature?",
    "/set temperature": "needs a value",
    "/set temperature abc": "temperature must be a number, got abc",
    "/set top_p 7": "top_p must be a number <= 1.0, got 7",
    "/schema nowhere.json": "cannot read nowhere.json",
    "/load nowhere.json": "cannot read nowhere.json",
    "/edit 7": "you have sent no messages yet",
    "/edit x": "the number of one of your messages",
    "/regen": "you have sent no messages yet",
    "/save": "needs the name of a file",
}


def test_a_mistake_is_answered_with_what_to_do_and_the_chat_goes_on(server, tmp_path):
    with chat(server, tmp_path, *GREEDY) as terminal:
        for typed, shown in MISTAKES.items():
            terminal.type(typed)
            terminal.wait_for(shown)
        terminal.type('/set logit_bias {"999999": 1}')
        terminal.wait_for("logit_bias {")
        terminal.type("Hello")
        terminal.wait_for("! logit_bias")
        terminal.type("\x15/set logit_bias off")  # in place of the message, which is in the prompt again
        terminal.type("Hello")
        terminal.wait_for("Hello!")


def run_chat(*arguments: str, said: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tureen", "chat", *arguments]
    return subprocess.run(command, input=said, capture_output=True, text=True, check=False)


def test_without_a_terminal_an_answer_or_one_line_about_a_fault_is_all_that_is_printed(server, tmp_path):
    without_a_terminal_standard_input_is_the_message_and_the_answer_is_all_that_is_printed(server, tmp_path)
    what_cannot_be_is_one_line(server, tmp_path)


def without_a_terminal_standard_input_is_the_message_and_the_answer_is_all_that_is_printed(server, tmp_path):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    (tmp_path / "city.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    done = run_chat("--url", server.url, "--schema", str(tmp_path / "city.json"), said=QUESTION)
    jsonschema.validate(json.loads(done.stdout), schema)
    expected = answer_over_http(server, QUESTION) + "\n"
    for end in ("", "\n"):  # as printf and echo write it
        assert run_chat("--url", server.url, *GREEDY, said=QUESTION + end).stdout == expected


def what_cannot_be_is_one_line(server, tmp_path):
    url = ("--url", server.url)
    told = {
        ("--url", "ftp://here"): "must be http://HOST:PORT",
        ("--url", "http://127.0.0.1:9"): "no server answers at http://127.0.0.1:9",
        (*url, "--quantization", "int8"): "--quantization is for a new server",
        (*url, "--temperature", "warm"): "--temperature 'warm'",
        (str(tmp_path / "nowhere.gguf"),): "nowhere.gguf",
    }
    done = {flags: run_chat(*flags, said="Hi") for flags in told}
    wrong = {
        flags: each.stderr
        for flags, each in done.items()
        if each.returncode != 1 or told[flags] not in each.stderr or each.stderr.count("\n") != 1
    }
    assert wrong == {}
    assert done[str(tmp_path / "nowhere.gguf"),].stderr.startswith("tureen: ")


class HostileServer(http.server.BaseHTTPRequestHandler):
    """Answers every chat with text that would paint over a terminal."""

    TEXT = "a\x1b[2J\x1b]0;owned\x07b\u202ec\rd"

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "m", "max_model_len": 9}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = {"choices": [{"delta": {"content": self.TEXT}, "finish_reason": "stop"}]}
        self._answer(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def chat_with(answers: type[HostileServer], tmp_path: Path) -> Iterator[TerminalSession]:
    """A chat with a server that is none of ours."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ["chat", "--url", f"http://127.0.0.1:{server.server_port}", "--download-dir", str(tmp_path)]
        with TerminalSession(*command) as terminal:
            yield terminal
        server.shutdown()


def test_hostile_silent_and_slow_servers_do_no_harm_to_a_terminal_and_what_is_typed_is_kept(tmp_path):
    control_characters_of_an_answer_are_shown_as_text(tmp_path)
    a_message_whose_answer_is_ended_before_anything_came_is_in_the_prompt_again(tmp_path)
    what_is_typed_while_an_answer_comes_is_in_the_next_prompt_and_not_in_the_answer(tmp_path)


def control_characters_of_an_answer_are_shown_as_text(tmp_path):
    with chat_with(HostileServer, tmp_path) as terminal:
        terminal.type("Hello")
        terminal.wait_for(r"a\x1b[2J\x1b]0;owned\x07b\u202ec\rd")
        assert "\x1b]0;owned" not in terminal.raw


class SilentServer(HostileServer):
    """Takes every chat and answers nothing until the client has gone."""

    asked: ClassVar[queue.Queue[str]] = queue.Queue()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.put(body["messages"][-1]["content"])
        self.connection.recv(1)


def a_message_whose_answer_is_ended_before_anything_came_is_in_the_prompt_again(tmp_path):
    with chat_with(SilentServer, tmp_path) as terminal:
        terminal.type("Count")
        assert SilentServer.asked.get(timeout=PATIENCE_S) == "Count"
        terminal.keys("\x03")
        terminal.type(" to three")  # behind what is in the prompt again
        assert SilentServer.asked.get(timeout=PATIENCE_S) == "Count to three"


class HalfwayServer(HostileServer):
    """Answers every chat with a half, and with the other half when it may."""

    goes_on: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for text, reason in (("one two ", None), ("three ", "stop")):
            chunk = {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.flush()
            assert self.goes_on.wait(PATIENCE_S)
        self.wfile.write(b"data: [DONE]\n\n")


def what_is_typed_while_an_answer_comes_is_in_the_next_prompt_and_not_in_the_answer(tmp_path):
    with chat_with(HalfwayServer, tmp_path) as terminal:
        terminal.type("Count")
        terminal.wait_for("one two")
        terminal.keys("and then")
        HalfwayServer.goes_on.set()
        assert "and" not in terminal.wait_for("three")
        terminal.wait_for("and then")


def servers_of_chats(folder: Path) -> set[int]:
    """Processes of servers that a chat has started whose environment names this folder: others may chat, too."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if b"tureen_chat_" in (process / "cmdline").read_bytes():
                environment = (process / "environ").read_bytes().split(b"\0")
                found |= {int(process.name)} if f"CHAT_OF={folder}".encode() in environment else set()
    return found


def test_a_model_that_is_named_is_served_for_this_chat_and_ends_with_it(server, default_model_source, tmp_path):
    a_named_model_is_loaded_for_this_chat_and_gone_after_it(server, default_model_source, tmp_path)
    a_chat_that_is_killed_takes_its_server_along_even_if_that_is_stopped(default_model_source, tmp_path)


def a_named_model_is_loaded_for_this_chat_and_gone_after_it(server, default_model_source, tmp_path):
    command = [
        sys.executable,
        "-m",
        "tureen",
        "chat",
        str(default_model_source.path),
        "--context-length",
        "512",
        *GREEDY,
    ]
    env = os.environ | {"CHAT_OF": str(tmp_path)}
    done = subprocess.run(command, input=QUESTION, capture_output=True, text=True, check=True, env=env)
    assert done.stdout == answer_over_http(server, QUESTION) + "\n"
    assert not servers_of_chats(tmp_path)


def a_chat_that_is_killed_takes_its_server_along_even_if_that_is_stopped(default_model_source, tmp_path):
    command, env = ["chat", str(default_model_source.path), "--download-dir", str(tmp_path)], {"CHAT_OF": str(tmp_path)}
    with TerminalSession(*command, env=env) as terminal:
        terminal.wait_for_prompt()
        wait_until(lambda: len(servers_of_chats(tmp_path)) == 1, "one server, and no fork that becomes another program")
        [server] = servers_of_chats(tmp_path)
        os.kill(server, signal.SIGSTOP)
        terminal.process.kill()
        wait_until(lambda: not servers_of_chats(tmp_path), "the end of the server")
