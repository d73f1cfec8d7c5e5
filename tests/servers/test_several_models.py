"""Three models in one server that has room for two, asked by many at once: each answers as it does alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from server_process import ServerProcess
from timeouts import PATIENCE_S, wait_until

LIMIT_BYTES = 600_000_000
NAMES = ("long", "embedder", "short")
PROMPTS = ("The capital of France is", "Once upon a time", "One, two, three,", "The sky is")
TEXTS = ("A cat sleeps on the sofa.", "Stocks fell sharply today.")
SMAP = re.compile(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )")
"""Where /proc/PID/smaps begins to tell of another mapping."""
ADMIN = {"Authorization": "Bearer admin-secret"}


def generate(url: str, prompt: str, **fields: str) -> str:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 12}} | fields
    return answered(httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S))["text"]


def embed(url: str, text: str, model: str) -> list[float]:
    answer = httpx.post(f"{url}/v1/embeddings", json={"input": text, "model": model}, timeout=PATIENCE_S)
    return answered(answer)["data"][0]["embedding"]


def answered(answer: httpx.Response) -> dict:
    assert answer.status_code == 200, answer.text
    return answer.json()


def loads(url: str) -> dict[str, int]:
    return {model["name"]: model["num_loads"] for model in httpx.get(f"{url}/status").json()["models"]}


@pytest.fixture(scope="module")
def several(default_model_source, minilm_source, tmp_path_factory):
    """The size of the KV cache is set for all: it is for those that have one."""
    folder = tmp_path_factory.mktemp("several")
    table = '[[models]]\nmodel-path = "{}"\nserved-model-name = "{}"\ncontext-length = {}\n'
    file = folder / "models.toml"
    file.write_text(
        f'models-memory = {LIMIT_BYTES}\nmax-total-tokens = 2048\nbatch-path = "{folder / "batches"}"\n'
        f'responses-store = "{folder / "responses.sqlite"}"\n'
        'admin-api-key = "admin-secret"\n'
        + table.format(default_model_source.path, "long", 1024)
        + table.format(minilm_source.path, "embedder", 256)
        + table.format(default_model_source.path, "short", 512)
    )
    with ServerProcess("--config", str(file)) as running:
        yield running.wait_ready()


def test_each_answers_as_it_does_alone_whatever_is_loaded_and_unloaded_meanwhile(server, minilm_source, several):
    alone = {prompt: generate(server.url, prompt) for prompt in PROMPTS}
    with ServerProcess(str(minilm_source.path)) as embedder:
        vectors = {text: embed(embedder.wait_ready().url, text, "default") for text in TEXTS}
    asked = [(model, prompt) for prompt in PROMPTS for model in ("long", "short")]
    asked += [("embedder", text) for _ in range(2) for text in TEXTS]
    asked = asked[::3] + asked[1::3] + asked[2::3]

    def ask(model: str, text: str) -> tuple[object, object, int]:
        if model == "embedder":
            pair = embed(several.url, text, model), vectors[text]
        else:
            pair = generate(several.url, text, model=model), alone[text]
        return *pair, httpx.get(f"{several.url}/status").json()["memory"]["used_bytes"]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, *zip(*asked, strict=True)))
    for (model, text), (answer, expected, used_bytes) in zip(asked, answers, strict=True):
        assert answer == expected, (model, text)
        assert used_bytes <= LIMIT_BYTES
    assert min(loads(several.url).values()) >= 1
    for name in NAMES:  # there is room for two
        answered(httpx.post(f"{several.url}/models/load", json={"model": name}, headers=ADMIN, timeout=PATIENCE_S))
    standing = [model["status"] for model in httpx.get(f"{several.url}/status").json()["models"]]
    assert sorted(standing) == ["loaded", "loaded", "unloaded"]
    assert sum(loads(several.url).values()) > len(NAMES)


def test_batches_and_kept_responses_go_to_the_models_they_name_and_a_new_one_joins(
    server, several, default_model_source, tmp_path
):
    all_models_are_named_in_the_banner_and_where_a_name_is_none(several)
    lines_of_a_batch_and_kept_responses_are_answered_by_the_models_that_they_name(server, several)
    a_model_that_is_named_by_where_it_is_joins_the_running_server(several, default_model_source, tmp_path)


def all_models_are_named_in_the_banner_and_where_a_name_is_none(several):
    wait_until(lambda: "  also " in several.output, "the line below the address")
    [line] = [line for line in several.lines if line.startswith("  also ")]
    assert "embedder, short" in line
    chat = {"model": "nope", "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{several.url}/v1/chat/completions", json=chat)
    assert answer.status_code == 404
    assert all(name in answer.json()["error"]["message"] for name in ("nope", *NAMES))


def lines_of_a_batch_and_kept_responses_are_answered_by_the_models_that_they_name(server, several):
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": chat | {"model": name}}
        for name in ("long", "short", "nope")
    ]
    lines[0]["body"]["max_tokens"] = lines[1]["body"]["max_tokens"] = 8
    upload = {"file": ("lines.jsonl", "\n".join(json.dumps(line) for line in lines))}
    with httpx.Client(base_url=f"{several.url}/v1", timeout=PATIENCE_S) as client:
        file = answered(client.post("/files", data={"purpose": "batch"}, files=upload))
        order = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = answered(client.post("/batches", json=order))
        wait_until(lambda: client.get(f"/batches/{batch['id']}").json()["status"] == "completed", "the batch")
        batch = client.get(f"/batches/{batch['id']}").json()
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        results = [
            json.loads(line) for line in client.get(f"/files/{batch['output_file_id']}/content").text.splitlines()
        ]
        bodies = {line["custom_id"]: line["response"]["body"] for line in results}
        assert {name: body["model"] for name, body in bodies.items()} == {"long": "long", "short": "short"}
        expected = httpx.post(
            f"{server.url}/v1/chat/completions", json=chat | {"model": "default", "max_tokens": 8}, timeout=PATIENCE_S
        )
        texts = {body["choices"][0]["message"]["content"] for body in bodies.values()}
        assert texts == {answered(expected)["choices"][0]["message"]["content"]}

        first = answered(client.post("/responses", json={"model": "short", "input": "Say hi.", "max_output_tokens": 4}))
        assert first["model"] == "short"
        then = {"model": "short", "input": "Again.", "previous_response_id": first["id"], "max_output_tokens": 4}
        second = answered(client.post("/responses", json=then))
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def a_model_that_is_named_by_where_it_is_joins_the_running_server(several, default_model_source, tmp_path):
    copy = tmp_path / "newcomer.gguf"
    copy.symlink_to(default_model_source.path)
    assert httpx.post(f"{several.url}/models/load", json={"model": str(copy)}).status_code in (401, 403)
    missing = httpx.post(f"{several.url}/models/load", json={"model": str(tmp_path / "none.gguf")}, headers=ADMIN)
    assert missing.status_code == 404
    assert "none.gguf" in missing.json()["error"]["message"]
    added = httpx.post(f"{several.url}/models/load", json={"model": str(copy)}, headers=ADMIN, timeout=PATIENCE_S)
    assert answered(added)["name"] == "newcomer"
    cards = httpx.get(f"{several.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [*NAMES, "newcomer"]
    prompt = PROMPTS[0]
    assert generate(several.url, prompt, model="newcomer") == generate(several.url, prompt, model="short")


class Pages(NamedTuple):
    """What an engine has in memory, in KiB, as the system counts it."""

    shared: int  # weights that it has in common with others
    part: int  # of these, when each page is divided among those that have it
    private: int


def engines(running: ServerProcess) -> dict[int, Pages]:
    """The engines that have weights in common, by process id."""
    found = {}
    for pid in running.children():
        try:
            maps = SMAP.split(Path(f"/proc/{pid}/smaps").read_text())
        except OSError:  # it has ended
            continue
        sizes = [(text, dict(re.findall(r"(?m)^(\w+): +(\d+) kB$", text))) for text in maps if "Pss:" in text]
        weights = [kib for text, kib in sizes if "tureen-weights" in text]
        if weights:
            shared, part = (sum(int(kib[name]) for kib in weights) for name in ("Rss", "Pss"))
            found[pid] = Pages(shared, part, sum(int(kib["Private_Dirty"]) for _, kib in sizes))
    return found


def test_models_of_the_same_file_have_its_weights_in_memory_once(server, default_model_source, tmp_path):
    """By the system's own count of the pages of real processes; also after one of them was killed."""
    other_name = tmp_path / "linked.gguf"
    other_name.symlink_to(default_model_source.path)
    with ServerProcess(
        "--model", str(default_model_source.path), "--model", str(other_name), "--max-total-tokens", "2048"
    ) as running:
        running.wait_ready()
        alone = {prompt: generate(server.url, prompt) for prompt in PROMPTS}

        def check() -> list[int]:
            for prompt in PROMPTS:
                for model in ("default", "linked"):
                    assert generate(running.url, prompt, model=model) == alone[prompt]
            weights = shared_bytes(running) >> 10
            found = engines(running)
            assert len(found) == 2, running.output
            assert weights > 80_000
            assert sum(pages.part for pages in found.values()) < 1.05 * weights
            for pages in found.values():
                assert pages.shared > 0.95 * weights
                assert pages.private < weights
            return sorted(found)

        first, second = check()
        status = httpx.get(f"{running.url}/status").json()
        needs = [model["memory_bytes"] for model in status["models"]]
        assert status["memory"]["used_bytes"] == sum(needs) - shared_bytes(running)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(engines(running)) == 2 and first not in engines(running), "another engine")
        assert second in check()
        for name in ("linked", default_model_source.path.stem):
            answered(httpx.post(f"{running.url}/models/unload", json={"model": name}, timeout=PATIENCE_S))
        assert blocks_of_weights(running) == [0]
        assert generate(running.url, PROMPTS[0], model="linked") == alone[PROMPTS[0]]


def blocks_of_weights(running: ServerProcess) -> list[int]:
    """Of each file of weights that the server holds open, the blocks of memory that it takes."""
    found = []
    for file in Path(f"/proc/{running.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found += [file.stat().st_blocks] if "weights" in str(file.readlink()) else []
    return found


def shared_bytes(running: ServerProcess) -> int:
    [num_bytes] = {model["shared_weights_bytes"] for model in httpx.get(f"{running.url}/status").json()["models"]}
    return num_bytes
