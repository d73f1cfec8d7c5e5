"""Answers a file of prompts, a JSON value a line, into a file of answers.

A run that was killed goes on where it was: each answer is appended in one write, and says by number and digest which
line it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from tureen.cli.places import counted
from tureen.errors import InvalidRequest, RequestFailed, StartupError
from tureen.files import open_regular

if TYPE_CHECKING:
    from tqdm import tqdm

    from tureen.offline import OfflineEngine

DIGEST_CHARS = 12


@contextlib.contextmanager
def open_job(source: Path, target: Path, params: dict[str, Any]) -> Iterator[PromptFile]:
    """Opens both files, and finds out what is answered already. `params`: sampling parameters of all lines, over which
    a line's own go. Raises StartupError."""
    try:
        if target.exists() and not target.is_file():
            raise StartupError(f"--output {target}: must be a file, so that an interrupted run can be resumed")
        with open_regular(source) as lines, target.open("a+b") as answers:
            try:
                fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StartupError(f"--output {target}: another process is writing it") from None
            yield PromptFile(lines, answers, params, _answered(answers, target))
    except OSError as error:
        raise StartupError(f"{error.filename or target}: {error.strerror}") from None


def _answered(answers: BinaryIO, target: Path) -> dict[int, str]:
    """Returns the digest of each line that has its answer, by number, and cuts off an answer that is not whole."""
    answers.seek(0)
    digests, end = {}, 0
    for line in answers:
        if not line.endswith(b"\n"):
            break
        try:
            answer = msgspec.json.decode(line)
            digests[int(answer["line"])] = str(answer["digest"])
        except (ValueError, TypeError, KeyError, msgspec.DecodeError):
            raise StartupError(f"--output {target}: was not written by this command") from None
        end += len(line)
    answers.truncate(end)
    return digests


class PromptFile:
    """The lines of one file, and where their answers go."""

    def __init__(self, lines: BinaryIO, answers: BinaryIO, params: dict[str, Any], answered: dict[int, str]) -> None:
        """`answered`: digests by line number. Raises StartupError where what was answered is not what is asked."""
        self._lines, self._answers, self._params, self._answered = lines, answers, params, answered
        self._num_failed = self._num_tokens = 0
        self.num_left = sum(1 for _ in self._unanswered())

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def run(self, engine: OfflineEngine, concurrency: int) -> int:
        """Answers what is left, a number of lines at a time. Returns the number of those that could not be answered."""
        if self._answered:
            self.tell(f"answered already: {counted(len(self._answered), 'line')}")
        try:
            with _bar(self.num_left) as bar:
                asyncio.run(self._run(engine, concurrency, bar))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        except KeyboardInterrupt:
            self.tell("interrupted; the same command resumes")
            raise
        counts = ((self.num_left, "line"), (self._num_tokens, "token"), (self._num_failed, "error"))
        self.tell(", ".join(counted(number, noun) for number, noun in counts))
        return self._num_failed

    async def _run(self, engine: OfflineEngine, concurrency: int, bar: tqdm[Any]) -> None:
        lines = self._unanswered()

        async def work() -> None:
            for number, line in lines:
                self._write(number, line, await self._answer(engine, line))
                bar.set_postfix_str(f"{self._num_tokens:,} tokens", refresh=False)
                bar.update()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, self.num_left)):
                group.create_task(work())

    def _unanswered(self) -> Iterator[tuple[int, bytes]]:
        """Yields number (from 1) and text of each line that has no answer yet. Raises StartupError."""
        self._lines.seek(0)
        for number, line in enumerate(self._lines, 1):
            if number in self._answered:
                if self._answered[number] != self._digest(line):
                    raise StartupError(
                        f"--output has an answer to another line {number}, or with other sampling parameters: name "
                        "another file"
                    )
            elif line.strip():
                yield number, line

    async def _answer(self, engine: OfflineEngine, line: bytes) -> dict[str, Any]:
        """Returns what stands in the answer's line. A line that is wrong is an answer, too."""
        try:
            body = _body(line)
            own = body.pop("sampling_params", None)
            name = {"custom_id": body.pop("custom_id")} if "custom_id" in body else {}
            answer = await engine.async_generate(body.pop("text", None), self._params | (own or {}), **body)
        except (InvalidRequest, RequestFailed) as error:
            self._num_failed += 1
            return {"error": {"message": error.message, "field": error.field, "code": error.code}}
        samples = answer if isinstance(answer, list) else [answer]
        self._num_tokens += sum(sample["meta_info"]["completion_tokens"] for sample in samples)
        return name | (answer if isinstance(answer, dict) else {"samples": answer})

    def _write(self, number: int, line: bytes, answer: dict[str, Any]) -> None:
        text = json.dumps({"line": number, "digest": self._digest(line)} | answer, ensure_ascii=False)
        os.write(self._answers.fileno(), text.encode("utf-8", "surrogatepass") + b"\n")

    def _digest(self, line: bytes) -> str:
        """Returns what tells the question from another."""
        params = json.dumps(self._params, sort_keys=True).encode()
        return hashlib.sha256(params + line.strip()).hexdigest()[:DIGEST_CHARS]


def _body(line: bytes) -> dict[str, Any]:
    """Returns the fields of /generate that a line has. Raises InvalidRequest."""
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the line is not JSON: {error}") from None
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise InvalidRequest("the line must be a JSON string or an object with the fields of /generate")
    if "stream" in value:
        raise InvalidRequest("stream: a line's answer is written when it is whole; leave it out", field="stream")
    if "prompt" in value and "text" not in value:
        value["text"] = value.pop("prompt")
    if not isinstance(value.get("sampling_params", {}), dict):
        raise InvalidRequest("sampling_params must be an object", field="sampling_params")
    return value


def _bar(total: int) -> tqdm[Any]:
    from tqdm import tqdm  # noqa: PLC0415 - for this command only

    tqdm.monitor_interval = 0  # it would start a thread
    return tqdm(
        total=total,
        desc="lines",
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        bar_format="{desc} {bar:28} {n_fmt}/{total_fmt}{postfix} {elapsed}, {remaining} left",
    )
