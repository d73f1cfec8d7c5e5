"""Helpers of the pages: starting and stopping servers, and joining the pieces of a stream."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

POLL_S = 0.2


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Start a server with a command of the pages, on a free port. Return its process and its port."""
    if port is None:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
    words = shlex.split(command.replace("\\\n", " "))
    if words[:1] in (["python"], ["python3"]):
        words[0] = sys.executable
    return subprocess.Popen([*words, "--port", str(port)], text=True), port


def wait_for_server(base_url: str, timeout: float | None = None, process: subprocess.Popen[str] | None = None) -> None:
    """Return when the server answers. Raises TimeoutError, and RuntimeError if its process has ended."""
    started = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"{base_url}/v1/models", timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                return  # it answers, and wants a key
        except OSError:
            pass
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it answered")
        if timeout is not None and time.monotonic() - started > timeout:
            raise TimeoutError(f"the server did not answer within {timeout} s")
        time.sleep(POLL_S)


def terminate_process(process: subprocess.Popen[str]) -> None:
    """End a server that `launch_server_cmd` has started."""
    process.terminate()
    process.wait()


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """Return a chunk without its longest beginning that the text before already ends with."""
    longest = min(len(existing_text), len(new_chunk))
    overlap = next((size for size in range(longest, 0, -1) if existing_text.endswith(new_chunk[:size])), 0)
    return new_chunk[overlap:]


def stream_and_merge(llm: Any, prompt: str, sampling_params: dict[str, Any]) -> str:
    """Return the text of a stream of an engine, whether its chunks are whole texts or pieces."""
    text = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        text += trim_overlap(text, chunk["text"])
    return text


async def async_stream_and_merge(llm: Any, prompt: str, sampling_params: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the new text of each chunk of a stream of an engine."""
    text = ""
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        new = trim_overlap(text, chunk["text"])
        text += new
        yield new


def print_highlight(html_content: object) -> None:
    """Print a result of the pages."""
    print(html_content)  # noqa: T201 - it is what the function is for
