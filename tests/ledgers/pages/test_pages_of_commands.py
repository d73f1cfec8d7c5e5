"""The commands of docs/several-models.md, docs/models-by-name.md and docs/terminal.md do what the pages say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator

import httpx
import pytest
from page_blocks import ROOT, block_with
from page_commands import completed
from server_process import ServerProcess

GUARDS = (
    "docs/tutorial.md",
    "docs/several-models.md",
    "docs/models-by-name.md",
    "docs/terminal.md",
    "cli",
    "multi_model",
    "fetching",
)


TIMEOUT_S = 240


def curl(server: ServerProcess, block: str) -> httpx.Response:
    """Sends what a curl command of a page sends."""
    words = shlex.split(block.replace("\\\n", " "))
    path = words[1].removeprefix("http://127.0.0.1:30000")
    content = words[words.index("-d") + 1] if "-d" in words else None
    headers = {"Content-Type": "application/json"} if "-H" in words else {}
    method = "GET" if content is None else "POST"
    return httpx.request(method, f"{server.url}{path}", content=content, headers=headers, timeout=TIMEOUT_S)


def models(server: ServerProcess) -> list[str]:
    return [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]


@pytest.fixture(scope="module")
def several() -> Iterator[ServerProcess]:
    flags = shlex.split(re.search("ARGS='(.*)'", block_with("several-models.md", "make serve ARGS='--model"))[1])
    with ServerProcess(*flags) as running:
        yield running.wait_ready()


def test_a_second_model_embeds_when_it_is_asked_for(several):
    answer = curl(several, block_with("several-models.md", "/v1/embeddings"))
    assert len(answer.json()["data"][0]["embedding"]) == 384
    loaded = {
        model["name"]: model["status"]
        for model in curl(several, block_with("several-models.md", "/status\n")).json()["models"]
    }
    assert set(loaded.values()) == {"loaded"}
    assert len(loaded) == 2


def test_a_model_that_the_server_was_not_started_with_joins_it(several):
    before = models(several)
    assert curl(several, block_with("several-models.md", "/models/load")).status_code == 200
    (new,) = set(models(several)) - set(before)
    body = {
        "model": new,
        "text": "The capital of France is",
        "sampling_params": {"temperature": 0, "max_new_tokens": 3},
    }
    assert "Paris" in httpx.post(f"{several.url}/generate", json=body, timeout=TIMEOUT_S).json()["text"]


def test_the_tables_of_a_file_are_models_with_settings_of_their_own(tmp_path):
    file = tmp_path / "models.toml"
    file.write_text(block_with("several-models.md", "[[models]]"))
    with ServerProcess("--config", str(file), cwd=ROOT) as server:
        listed = models(server.wait_ready())
        assert {"smol", "smol-short"} <= set(listed)
        assert any("whisper" in name for name in listed)
        body = {"model": "smol-short", "text": "Hi", "sampling_params": {"max_new_tokens": 1}}
        assert httpx.post(f"{server.url}/generate", json=body, timeout=TIMEOUT_S).status_code == 200
        cards = {card["id"]: card["max_model_len"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert cards["smol-short"] == 512


def test_a_message_on_standard_input_is_answered_with_nothing_but_the_answer(tmp_path):
    done = completed(block_with("terminal.md", "| tureen chat"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_a_file_of_prompts_is_answered_line_by_line_and_not_again(tmp_path):
    script = block_with("terminal.md", "prompts.jsonl --output")
    done = completed(script, tmp_path)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sorted(answer["line"] for answer in answers) == [1, 2]
    (counted,) = [answer for answer in answers if answer.get("custom_id") == "count"]
    assert "three" in counted["text"]
    assert all(answer["meta_info"]["completion_tokens"] <= 8 for answer in answers)
    kept = (tmp_path / "answers.jsonl").read_bytes()
    assert "every line is answered already" in completed(script, tmp_path).stderr
    assert (tmp_path / "answers.jsonl").read_bytes() == kept


def test_a_model_is_shown_with_what_it_needs_and_whether_it_fits(tmp_path):
    done = completed("tureen show smollm2:135m", tmp_path)
    needs = re.search(
        r"needs +\d+ MiB of memory: weights 92 MiB, KV cache 186 MiB \(8,192 tokens at 23 KiB each\)", done.stdout
    )
    assert needs, done.stdout
    assert re.search(r"memory +[\d.]+ GiB free of [\d.]+ GiB: it fits", done.stdout)


def test_a_model_is_pulled_served_and_removed_by_its_name(default_model_source, tmp_path):
    """In a cache of its own, where pulling finds it whole."""
    package = default_model_source.path.parent
    shutil.copytree(package, tmp_path / "cache" / "tureen" / package.parent.name / package.name)
    own = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_RUNTIME_DIR": str(tmp_path)}
    lines = block_with("models-by-name.md", "tureen pull").splitlines()
    place = {line.split()[1]: line for line in lines}
    assert list(place) == ["pull", "show", "serve", "list", "ps", "stop", "rm"]

    def says(word: str) -> str:
        done = completed(place[word], tmp_path, **own)
        assert done.returncode == 0, done.stderr
        return done.stdout

    says("pull")
    assert "92 MiB" in says("show")
    command = shlex.split(place["serve"], comments=True)[1:]
    with ServerProcess("--port", "0", command=command, env=own) as server:
        url = server.wait_ready().url
        assert "smollm2:135m" in says("list")
        assert url in says("ps")
        assert says("stop").endswith("stopped\n")
        assert server.process.wait(TIMEOUT_S) == 0
    says("rm")
    assert json.loads(completed("tureen list --json", tmp_path, **own).stdout)["models"] == []
    assert default_model_source.path.exists()


def test_the_tutorial_s_file_of_settings_gives_keys_to_clients(tmp_path, monkeypatch):
    done = completed(block_with("tutorial.md", "cat > keys.txt"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "context-length" in done.stdout.replace("_", "-")
    monkeypatch.chdir(tmp_path)
    flags = shlex.split(block_with("tutorial.md", "tureen serve --config"))[2:]
    with ServerProcess(*flags) as running:
        running.wait_ready()
        [key] = re.findall("Bearer (\\w+)`", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
        sent = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{running.url}/v1/models", headers=sent).json()["data"][0]["max_model_len"] == 4096
        assert httpx.get(f"{running.url}/v1/models").status_code == 401
