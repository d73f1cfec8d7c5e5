"""docs/adding-a-….md: each diff applies to the package as it is, and then does what its page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from page_diffs import ROOT, apply_diff, copy_repository
from server_process import ServerProcess

GUARDS = ("docs/adding-a-*.md", "contract", "models", "dialects", "attention", "sampling")

pytestmark = pytest.mark.model

KINDS = ("parameter", "model", "dialect", "backend")
JSON = {"content-type": "application/json"}


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def run(changed: tuple[Path, dict[str, str]], *arguments: str) -> None:
    """Runs the changed copy's Python."""
    folder, paths = changed
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | paths
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def ask(server: ServerProcess, page: str, path: str) -> Any:
    """Sends what the curl command of a page sends to a path. Returns the answer."""
    [body] = re.findall(
        rf"^curl http://127\.0\.0\.1:30000{path} -H '[^']*' -d '(.*?)'$", text_of(page), re.MULTILINE | re.DOTALL
    )
    answer = httpx.post(f"{server.url}{path}", content=body, headers=JSON)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A copy of the repository with the diffs of all four pages and its pages written anew; the environment of it."""
    folder = tmp_path_factory.mktemp("changed")
    env = copy_repository(folder)
    for kind in KINDS:
        apply_diff(f"adding-a-{kind}.md", folder)
    run((folder, env), "tools/docs.py")
    return folder, env


@pytest.fixture(scope="module")
def changed_server(changed, default_model_source) -> Iterator[ServerProcess]:
    folder, env = changed
    with ServerProcess(env=env, cwd=folder) as running:
        yield running.wait_ready()


def test_the_tests_that_the_pages_name_pass(changed):
    """All in one process, which imports transformers once."""
    files, words = [], []
    for kind in KINDS:
        for line in re.findall(r"^\.venv/bin/python -m pytest -n0 (.*)$", text_of(f"adding-a-{kind}.md"), re.MULTILINE):
            *names, last = shlex.split(line)
            files += [name for name in (*names, last) if name.startswith("tests/")]
            words.append(f"({last})" if "-k" in names else Path(last).stem)
    assert len(words) == 3
    run(changed, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *files, "-k", " or ".join(words))


WITH_WINDOWS = """
import sys, tempfile
from pathlib import Path
sys.path[:0] = ["tests", "tests/models"]
import test_layer_kinds as engines
engines.write(folder := Path(tempfile.mkdtemp()), "mistral-sliding")
own, native = engines.make_engine(folder, "torch", attention="float64"), engines.make_engine(folder, "native")
assert type(own.rows._runner.forward._attention).__name__ == "Float64Attention"
assert own.cache.windows.pool.num_pages < own.cache.pool.num_pages
for seed in range(6):  # until they are in pages whose numbers the window pages do not have
    request = engines.make_request(str(seed), engines.random_tokens(300, seed, 250), 8, logprobs=None)
    assert engines.run(own, request)[0][0] == engines.run(native, request)[0][0], seed
"""


def test_the_backend_finds_layers_with_a_window_in_their_own_pages(changed):
    run(changed, "-c", WITH_WINDOWS)


def test_the_pages_that_derive_from_the_code_have_all_of_them(changed):
    parameters, architectures = (
        (changed[0] / "docs" / name).read_text(encoding="utf-8") for name in ("parameters.md", "architectures.md")
    )
    assert "| `epsilon_cutoff` | number ≥ 0 < 1 | `0.0` | Keep tokens with p >= epsilon_cutoff. |" in parameters
    assert "| `most` | integer ≥ 1 | `4` | Most tokens that the toy writes. |" in parameters
    assert "| `HeliumForCausalLM` | Helium 1 (Kyutai, 2025)" in architectures


def test_the_parameter_cuts_what_is_less_probable(changed_server):
    explanations = ask(changed_server, "adding-a-parameter.md", "/generate")["meta_info"]["explanations"]
    assert len(explanations) == 4
    for explanation in explanations:
        before, after = (
            stage["probabilities"]
            for name in ("temperature", "epsilon_cutoff")
            for stage in explanation["stages"]
            if stage["stage"] == name
        )
        assert [p > 0 for p in after] == [p >= min(0.01, max(before)) for p in before]


def test_the_parameter_is_in_openapi_and_its_bounds_are_checked_in_all_apis_that_have_it(changed_server):
    schemas = httpx.get(f"{changed_server.url}/openapi.json").json()["components"]["schemas"]
    having = {name for name, schema in schemas.items() if "epsilon_cutoff" in schema.get("properties", {})}
    assert having == {"SamplingParams", "CompletionBody", "ChatBody", "ResponsesBody", "AnthropicBody", "VllmParams"}
    answer = httpx.post(f"{changed_server.url}/v1/completions", json={"prompt": "a", "epsilon_cutoff": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "epsilon_cutoff")


def test_the_dialect_answers_at_its_path_and_is_described(changed_server):
    assert "Paris" in ask(changed_server, "adding-a-dialect.md", "/toy")["toy"]
    apis = httpx.get(f"{changed_server.url}/compat.json").json()["apis"]
    assert "Toy" in {api["api"] for api in apis}
