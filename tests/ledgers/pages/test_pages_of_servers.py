"""The blocks of pages that start a server with settings of their own, or change it, do what the pages say."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from followers import MAX_ATTEMPTS
from free_ports import free_port
from page_blocks import block_with
from page_commands import check_statuses, commands, flags_of, run
from server_process import PATIENT_SANDBOX, ServerProcess
from timeouts import wait_until

GUARDS = ("docs/*.md", "README.md", "cli", "app", "api_workers", "http", "dialects", "storage", "engine")

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def operated(default_model_source, tmp_path_factory) -> Iterator[ServerProcess]:
    """A server that this file alone asks, with what several pages start one with."""
    blocks = [
        block_with("streams.md", "--resume-grace"),
        block_with("operations.md", "--log-format json\n"),
        block_with("processors.md", "tureen serve"),
    ]
    folder = tmp_path_factory.mktemp("operated")
    flags = [flag for block in blocks for flag in flags_of(block)]
    with ServerProcess(*flags, cwd=folder, env=PATIENT_SANDBOX) as running:
        yield running.wait_ready()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("operations.md", "/v1/loads"),
        ("operations.md", "/release_memory_occupation"),
        ("operations.md", '"output_dir": "traces"'),
        ("security.md", "Host: [::1].evil.example"),
        ("security.md", '["a"] * 1000'),
    ],
)
def test_the_commands_of_an_operator_are_answered_as_the_page_says(operated, page, words, tmp_path):
    check_statuses(block_with(page, words), operated, tmp_path)


def test_a_request_is_a_line_of_json_with_the_fields_on_the_page(operated):
    httpx.post(f"{operated.url}/v1/completions", json={"prompt": "Paris is", "max_tokens": 4}, timeout=120)
    shown = json.loads(block_with("operations.md", "--log-format json\n").partition("# ")[2])
    wait_until(lambda: any("/v1/completions" in line for line in operated.lines), "the line")  # read by a thread
    [written] = [json.loads(line) for line in operated.lines if "/v1/completions" in line]
    assert set(shown) == set(written)


def test_a_lost_stream_is_taken_up_behind_the_event_that_the_client_has(operated, tmp_path):
    block = block_with("streams.md", "--resume-grace")
    for attempt in range(MAX_ATTEMPTS):
        begin, resume = commands(block.replace("my-request", f"my-request-{attempt}"), operated)
        first = run(f"({begin.partition(chr(10))[0]}) 2> {tmp_path}/cut | head -9 || true", tmp_path)
        last = re.findall(r"^id: (\S+)$", first, re.MULTILINE)[-1]
        rest = run(re.sub(r"Last-Event-ID: \S+'", f"Last-Event-ID: {last}'", resume), tmp_path)
        texts = [json.loads(data)["text"] for data in re.findall(r"^data: (\{.*)$", first + rest, re.MULTILINE)]
        if len(texts) > 3:  # a server that is held up gathers tokens
            break
    assert len(texts) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert "[DONE]" in rest


def test_the_processor_on_the_page_lets_only_digits_pass(operated):
    space: dict[str, Any] = {}
    exec(block_with("processors.md", "class OnlyDigits"), space)
    ids = httpx.post(f"{operated.url}/tokenize", json={"prompt": "0123456789"}, timeout=60).json()["tokens"]
    body = {
        "text": "A number:",
        "custom_logit_processor": space["OnlyDigits"].to_str(),
        "sampling_params": {"max_new_tokens": 6, "custom_params": {"digit_ids": sorted(set(ids))}},
    }
    answer = httpx.post(f"{operated.url}/generate", json=body, timeout=240)
    assert re.fullmatch(r"\d{6}", answer.json()["text"]), answer.text


def test_a_key_opens_what_the_page_says(default_model_source, tmp_path):
    block = block_with("security.md", "--admin-api-key s3cret")
    run(block.partition("tureen serve")[0], tmp_path)
    (tmp_path / "keys").write_text(block_with("security.md", "# NAME KEY"))
    with ServerProcess(*flags_of(block), cwd=tmp_path) as server:
        check_statuses(block, server.wait_ready(), tmp_path)
        bob = {"authorization": "Bearer Zr7uQ9pLx3Vn6Tb4"}
        assert httpx.get(f"{server.url}/v1/models", headers=bob).status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_a_client_with_a_certificate_is_answered_and_a_certificate_can_be_revoked(default_model_source, tmp_path):
    block = block_with("security.md", "openssl req -x509")
    make, _, rest = block.partition("tureen serve")
    run(make, tmp_path)
    run("openssl verify -x509_strict -CAfile ca.pem server.pem client.pem", tmp_path)  # as Python does from 3.13 on
    with ServerProcess(*flags_of(block), cwd=tmp_path) as server:
        port = re.search(r"https://\S+:(\d+)", server.wait_started().output)[1]
        ask = rest.partition("\n")[2].replace("localhost:30000", f"localhost:{port}")
        assert json.loads(run(ask.replace("curl ", "curl -sS --retry 9 --retry-all-errors "), tmp_path))["text"]
    run(block_with("security.md", "-gencrl -out crl.pem"), tmp_path)
    assert "Serial Number" in run("openssl crl -in crl.pem -noout -text", tmp_path)


def test_a_client_with_quotas_is_answered_and_what_it_used_is_a_table(default_model_source, tmp_path):
    first, second = block_with("quotas.md", "max_requests=4 weight=0.5"), block_with("quotas.md", "--usage-db usage.db")
    run(first.partition("tureen serve")[0], tmp_path)
    with ServerProcess(*flags_of(second), "--admin-api-key", "ADMIN-KEY", cwd=tmp_path) as server:
        [ask] = commands(first, server.wait_ready())
        answer = run(ask.replace("curl -i", "curl -si"), tmp_path)
        assert re.match(r"HTTP/1\.1 200 ", answer)
        [usage] = commands(second, server)
        heading, *rows = run(usage.replace("curl ", "curl -s "), tmp_path).splitlines()
    assert heading.startswith("day,")
    assert [row for row in rows if ",batch," in row], rows


def test_a_unix_socket_is_asked_by_its_path(default_model_source, tmp_path):
    block = block_with("command-line.md", "--uds").replace("/run/user/1000", str(tmp_path))
    with ServerProcess(*flags_of(block), command=("serve",)) as server:
        server.wait_started()
        assert json.loads(run(block.partition("\n")[2], tmp_path))["data"]


def test_two_fronts_are_listed_and_answer_with_a_template_of_the_page(default_model_source, tmp_path):
    block = block_with("scaling.md", "--api-workers 2 &")
    (tmp_path / "mine.json").write_text(block_with("chat.md", '"name": "my_model"'))
    with ServerProcess(*flags_of(block), "--chat-template", str(tmp_path / "mine.json")) as server:
        [status] = commands(block, server.wait_ready())
        assert len(json.loads(run(status.replace("curl ", "curl -s "), tmp_path))["fronts"]) == 2
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_request_is_the_same_among_others(server, tmp_path):
    block = block_with("reproducibility.md", "cmp alone among").replace("http://127.0.0.1:30000", server.url)
    assert run(block, tmp_path).splitlines()[-1] == "the same"
    assert len(json.loads((tmp_path / "among").read_text().partition(":")[2])) == 64


def test_a_request_is_the_same_where_the_engine_is_killed_in_between(default_model_source, tmp_path):
    block = block_with("reproducibility.md", "cmp whole killed")
    for _ in range(MAX_ATTEMPTS):
        printed = run(block.replace("30001", str(free_port())), tmp_path)
        assert "the same" in printed.splitlines()
        if re.search(r"^sglang:engine_replacements_total\S* 1\.0$", printed, re.MULTILINE):
            return
    raise AssertionError(f"the answer had ended before the engine was killed, {MAX_ATTEMPTS} times")


def test_settings_come_from_flags_variables_and_files(tmp_path):
    block = block_with("settings.md", "TUREEN_CONTEXT_LENGTH")
    shown = run(block.replace("tureen serve", "tureen config show --changed"), tmp_path)
    assert len(re.findall(r"context.length\W+4096", shown)) == 3, shown


def test_settings_are_shown_with_where_they_come_from(tmp_path):
    (tmp_path / "tureen.toml").write_text("context-length = 2048\n")
    shown = run(block_with("command-line.md", "tureen config show"), tmp_path)
    assert "8000" in shown
    assert "2048" in shown


def test_flags_are_completed_searched_and_translated(tmp_path):
    completion = block_with("command-line.md", "tureen completion bash").replace("~", str(tmp_path))
    (tmp_path / ".config" / "fish" / "completions").mkdir(parents=True)
    assert "tureen" in run(f"{completion}\ncomplete -p tureen", tmp_path)
    assert "tureen" in next(tmp_path.rglob("tureen.fish")).read_text()
    _, *lines = block_with("command-line.md", "tureen migrate").splitlines()
    shown = run("\n".join(lines), tmp_path)
    assert "--kv-cache-dtype" in shown
    assert "tureen serve" in shown


def test_the_commands_of_the_readme_answer(server, tmp_path):
    lines = [line for line in block_with("README.md", "pip install .").splitlines() if line.startswith("tureen ")]
    wanted = {"generate": r"\w{3}", "check": "tok/s of a prompt", "models": "LlamaForCausalLM"}
    for word, shown in wanted.items():
        [line] = [line for line in lines if line.startswith(f"tureen {word}")]
        assert re.search(shown, run(line, tmp_path)), line
    assert "LlamaForCausalLM" in run(block_with("models.md", "tureen models").splitlines()[0], tmp_path)


def test_the_programs_of_the_pages_print_answers(server, tmp_path):
    for page, words, shown in (
        ("README.md", "import tureen", "Paris"),
        ("clients.md", "from openai import OpenAI", "ChatCompletion"),
        ("sessions.md", "import requests", r"\w"),
    ):
        program = re.sub(r"http://(127\.0\.0\.1|localhost):30000", server.url, block_with(page, words))
        (tmp_path / "program.py").write_text(program)
        assert re.search(shown, run(f"{sys.executable} program.py", tmp_path)), page


@pytest.mark.parametrize("words", ['"triggers": ["<function="], "structures"', '"at_least_one": true'])
def test_a_structural_tag_of_the_page_is_followed(server, words):
    tag = block_with("structured-outputs.md", words)
    params = {"structural_tag": tag, "temperature": 0, "max_new_tokens": 60}
    body = {"text": "The call is <function=weather>{}</function>. The call is", "sampling_params": params}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    for inside in re.findall(r"<function=weather>(.*?)</function>", answer.json()["text"], re.DOTALL):
        assert isinstance(json.loads(inside), dict)
    if "at_least_one" in words:
        assert answer.json()["text"].startswith("<function=weather>")
