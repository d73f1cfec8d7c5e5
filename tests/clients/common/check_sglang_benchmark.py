"""SGLang's serving benchmark, version 0.4.1, measures the server through both APIs that it knows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CLIENT = "SGLang's benchmark"
PACKAGES = ("sglang",)

NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """A data set in ShareGPT's form."""
    file = tmp_path_factory.mktemp("data") / "sharegpt.json"
    turns = [
        ({"value": f"Tell me about the number {n} and where it is used."}, {"value": "It is used in many places. " * 2})
        for n in range(NUM_PROMPTS)
    ]
    file.write_text(json.dumps([{"conversations": list(pair)} for pair in turns]))
    return str(file)


@pytest.mark.parametrize("how", [("sglang",), ("sglang", "--disable-stream"), ("sglang-oai",), ("vllm",)], ids="".join)
def test_all_requests_succeed(url, tokenizer_folder, conversations, tmp_path, how):
    report = tmp_path / "report.jsonl"
    backend, *more = how
    asked = ["--backend", backend, *more, "--base-url", url, "--tokenizer", tokenizer_folder, "--disable-tqdm"]
    data = ["--dataset-name", "sharegpt", "--dataset-path", conversations, "--num-prompts", str(NUM_PROMPTS)]
    command = [sys.executable, "-m", "sglang.bench_serving", *asked, *data, "--output-file", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [line] = report.read_text().splitlines()
    result = json.loads(line)
    assert result["completed"] == NUM_PROMPTS
    assert result["total_output_tokens"] > NUM_PROMPTS
    assert result["median_ttft_ms"] > 0
