"""GuideLLM measures the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CLIENT = "GuideLLM"
PACKAGES = ("guidellm",)
NOTES = (
    "On a busy machine its report may lack the last request, which the server answered: it leaves when its workers are "
    "done, without the result that is still on its way from them (scheduler/worker_group.py of 0.8.1).",
    'Exchange: POST /v1/chat/completions with `"stream": true, "max_completion_tokens": 16` gets 200 and '
    "all chunks up to `data: [DONE]`, which the report does not count.",
)


def test_a_benchmark_has_no_failed_request(url, tokenizer_folder, tmp_path):
    report = tmp_path / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={url}",
        "--profile": "kind=synchronous",
        "--constraint": "kind=max_requests,count=4",
        "--tokenizer": f"kind=huggingface_auto,model={tokenizer_folder}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output": f"kind=json,path={report}",
    }
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console-interactive"]
    command += [part for option in options.items() for part in option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests = {state: len(of_it or ()) for state, of_it in benchmark["requests"].items()}
    assert (requests["errored"], requests["incomplete"]) == (0, 0)
    assert requests["successful"] >= 3  # see NOTES
