"""Batches on a real server that is killed in the middle, and on the page's own words."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import httpx
from server_process import ServerProcess
from timeouts import wait_until

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "batches.md").read_text(encoding="utf-8")
ROUTE = "/v1/completions"
NUM_LINES = (80, 800, 8000)
"""Lines of a batch whose server is killed and stopped in the middle. If one ends too early, a longer one is tried."""


def body_of(index: int) -> dict:
    return {"prompt": f"{index} plus {index} is", "max_tokens": 1 + index % 9, "temperature": 0}


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def start(folder: Path) -> ServerProcess:
    return ServerProcess("--batch-path", str(folder), "--max-running-requests", "4").wait_ready()


def test_a_batch_whose_server_is_killed_and_stopped_has_each_line_once_and_the_page_s_commands_work(
    default_model_source, tmp_path
):
    for num_lines in NUM_LINES:
        folder = tmp_path / str(num_lines)
        batch_id, before = killed_and_stopped(folder, num_lines)
        if before[1].count(b"\n") < num_lines:
            break
    assert before[1].startswith(before[0])
    assert before[1].count(b"\n") < num_lines, "stopped too late each time"
    with start(folder) as server:
        wait_until(lambda: batch(server, batch_id)["status"] == "completed", "the end")
        ended = batch(server, batch_id)
        assert ended["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
        content = httpx.get(f"{server.url}/v1/files/{ended['output_file_id']}/content").content
        assert content.startswith(before[1])
        answers = [json.loads(line) for line in content.splitlines()]
        assert sorted(answer["custom_id"] for answer in answers) == sorted(f"r{index}" for index in range(num_lines))
        for answer in answers[: NUM_LINES[0]]:
            alone = httpx.post(f"{server.url}{ROUTE}", json=body_of(int(answer["custom_id"][1:])), timeout=60).json()
            assert text_of(answer["response"]["body"]) == text_of(alone)
        the_commands_of_the_page_work(server, tmp_path)
        with ServerProcess("--batch-path", str(folder)) as other:  # a folder is for one server
            assert other.process.wait() == 1
            wait_until(lambda: "--batch-path" in other.output, "why")


def the_commands_of_the_page_work(server: ServerProcess, folder: Path) -> None:
    [_, commands] = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    begin, end = commands.replace("localhost:30000", server.url).split("curl -s " + server.url + "/v1/batches/$batch")
    begun = subprocess.run(["bash", "-c", begin + "echo $batch"], capture_output=True, text=True, cwd=folder)
    batch_id = begun.stdout.strip()
    wait_until(lambda: batch(server, batch_id)["status"] == "completed", "the end")
    rest = f"batch={batch_id}\ncurl -s {server.url}/v1/batches/$batch" + end
    shown = subprocess.run(["bash", "-ec", rest], capture_output=True, text=True, cwd=folder, check=True).stdout
    for answer in ('"custom_id":"a"', '"custom_id":"b"', "Paris"):
        assert answer in shown


def killed_and_stopped(folder: Path, num_lines: int) -> tuple[str, list[bytes]]:
    """Begin a batch, kill its server, and stop the next one, each in the middle of it.

    Return the batch's id and what each wrote. A server that ends does not wait for batches.
    """
    lines = [
        {"custom_id": f"r{index}", "method": "POST", "url": ROUTE, "body": body_of(index)} for index in range(num_lines)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with start(folder) as server:
        files = {"file": ("in.jsonl", text)}
        file = httpx.post(f"{server.url}/v1/files", data={"purpose": "batch"}, files=files).json()
        body = {"input_file_id": file["id"], "endpoint": ROUTE, "completion_window": "24h"}
        batch_id = httpx.post(f"{server.url}/v1/batches", json=body).json()["id"]
        wait_answered(server, batch_id, 10)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    written = [whole_lines(folder)]
    with start(folder) as server:
        wait_answered(server, batch_id, min(len(written[0].splitlines()) + 10, num_lines))
        assert server.stop() == 0
        assert "did not finish in time" not in server.output
    return batch_id, [*written, whole_lines(folder)]


def batch(server: ServerProcess, batch_id: str) -> dict:
    return httpx.get(f"{server.url}/v1/batches/{batch_id}").json()


def wait_answered(server: ServerProcess, batch_id: str, num_answered: int) -> None:
    wait_until(lambda: batch(server, batch_id)["request_counts"]["completed"] >= num_answered, "some answers")


def whole_lines(folder: Path) -> bytes:
    [output] = folder.glob("files/*-output")
    content = output.read_bytes()
    return content[: content.rfind(b"\n") + 1]
