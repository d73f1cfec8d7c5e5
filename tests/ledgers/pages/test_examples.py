"""Every file under examples/ runs against a real server and prints what its page promises."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import shape_drawings
from followers import MAX_ATTEMPTS
from server_process import PATIENT_SANDBOX, ServerProcess
from throwaway_ca import Authority
from timeouts import PATIENCE_S

GUARDS = ("examples/*", "cli", "app", "http", "dialects", "sampling")


EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))
LOCAL = "http://localhost:30000"


@pytest.fixture(scope="module")
def open_server(default_model_source) -> Iterator[ServerProcess]:
    with ServerProcess("--enable-custom-logit-processor", env=PATIENT_SANDBOX) as running:
        yield running.wait_ready()


def run(name: str, folder: Path, changes: dict[str, str]) -> str:
    """What a copy of the example prints in which these texts are replaced."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    copy = folder / name
    copy.write_text(text, encoding="utf-8")
    if name.endswith(".sh") and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = [sys.executable, str(copy)] if name.endswith(".py") else ["sh", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_every_example_has_a_test_here_and_a_line_in_the_list():
    source = Path(__file__).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in FILES:
        assert f'run("{name}"' in source, name
        assert f"`{name}`" in listed, name


def test_recompute(open_server, tmp_path):
    lines = run("recompute.py", tmp_path, {LOCAL: open_server.url}).splitlines()
    assert len(lines) >= 1
    assert all(line.endswith(" True") for line in lines)


def test_generate(open_server, tmp_path):
    answer = ast.literal_eval(run("generate.py", tmp_path, {LOCAL: open_server.url}))
    assert "Paris" in answer["text"]
    assert answer["meta_info"]["completion_tokens"] <= 32


def test_streams_print_the_text_of_the_whole_answer(open_server, tmp_path):
    printed = {
        32: run("stream.py", tmp_path, {LOCAL: open_server.url}),
        256: run("stream_long.py", tmp_path, {LOCAL: open_server.url}),
    }
    for num_tokens, text in printed.items():
        params = {"temperature": 0, "max_new_tokens": num_tokens}
        body = {"text": "The capital of France is", "sampling_params": params}
        whole = httpx.post(f"{open_server.url}/generate", json=body).json()["text"]
        assert text.strip() == whole.strip()
        assert len(whole) > 20


def test_a_custom_logit_processor_decides_every_token(open_server, tmp_path):
    answer = ast.literal_eval(run("custom_logit_processor.py", tmp_path, {LOCAL: open_server.url}))
    assert answer["output_ids"] == [5] * 32


def test_structured_outputs_match_their_schema_pattern_and_grammar(open_server, tmp_path):
    lines = run("structured_outputs.py", tmp_path, {LOCAL: open_server.url}).splitlines()
    city, country, greeting = (ast.literal_eval(line) for line in lines)
    assert re.match(r'\{"name": "\w+", "population": -?\d+[,}]', city["text"])  # it may go on with keys of its own
    assert country["text"] in ("France", "England")
    assert greeting["text"] in ("Hello", "Hi", "Hey")


def test_a_session_reuses_what_was_said(open_server, tmp_path):
    lines = run("session.py", tmp_path, {LOCAL: open_server.url}).splitlines()
    assert len(lines) == 3
    assert "(0 of" in lines[0]
    assert all("(0 of" not in line for line in lines[1:])
    assert lines[1] != lines[2]


@pytest.mark.model
def test_a_picture_is_described_in_either_format(seeing_server, tmp_path):
    drawing = shape_drawings.load().draw(shape_drawings.UNSEEN, "one")
    answer = ast.literal_eval(run("image.py", tmp_path, {LOCAL: seeing_server.url}))
    assert answer["text"].strip() == drawing.sentence
    answer = ast.literal_eval(run("image_vicuna.py", tmp_path, {LOCAL: seeing_server.url}))
    assert 1 <= answer["meta_info"]["completion_tokens"] <= 32
    assert answer["meta_info"]["prompt_tokens"] > 64  # the picture's are among them


def test_mindie(open_server, tmp_path):
    answer = json.loads(run("mindie.sh", tmp_path, {LOCAL: open_server.url}))
    [text] = answer["text"]
    assert text.startswith("My name is Olivier and I ")
    assert len(text) > len("My name is Olivier and I ")


def test_tgi(open_server, tmp_path):
    answer = json.loads(run("tgi.sh", tmp_path, {LOCAL: open_server.url}))
    assert 1 <= answer["details"]["generated_tokens"] <= 20
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == answer["generated_text"]


def test_mindie_over_tls_with_a_client_certificate(default_model_source, tmp_path):
    ca = Authority(tmp_path)
    own, client = ca.issue("server", for_server=True), ca.issue("client")
    with ServerProcess("--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", ca.cert) as server:
        server.wait_started()
        (url,) = re.findall(r"ready at https://127.0.0.1(:\d+)", server.output)
        changes = {
            "/home/runs/static_conf/ca/ca.pem": ca.cert,
            "/home/runs/static_conf/cert/client.pem": client.cert,
            "/home/runs/static_conf/cert/client.key.pem": client.key,
            "https://localhost:30000": f"https://localhost{url}",
        }
        for _ in range(MAX_ATTEMPTS):
            lines = run("mindie_stream_tls.sh", tmp_path, changes).splitlines()
            if len(lines) > 3:  # a server that is held up gathers tokens
                break
    assert "by client" in server.output
    assert len(lines) > 3
    assert all(list(json.loads(line)) == ["text"] for line in lines)
