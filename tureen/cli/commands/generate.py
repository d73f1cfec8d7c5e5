"""`tureen generate`: continues prompts in this process, one or a file of them."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tureen.cli.flags import CommandParser, add_config, add_params, load_config, params_of
from tureen.errors import InvalidRequest

HELP = "continue a prompt, or a file of prompts, without a server"

GROUPS = ("model", "sampling", "scheduling")
"""Settings that act without a server."""


def add_flags(parser: CommandParser) -> None:
    """Adds the prompt, the files, a flag for each sampling parameter, and for each setting that acts here."""
    parser.add_argument("prompt", nargs="?", help="text to continue; read from standard input when absent")
    parser.add_argument("--input", metavar="FILE.jsonl", help="a prompt a line: a JSON string, or a body of /generate")
    parser.add_argument("--output", metavar="FILE.jsonl", help="file of answers; an interrupted run is resumed")
    parser.add_argument("--concurrency", type=int, metavar="N", help="most lines at a time [32]")
    add_params(parser)
    add_config(parser, groups=GROUPS)


def run(options: argparse.Namespace) -> int:
    """Prints the continuation as it comes, or answers the file. Raises TureenError."""
    config, params = load_config(options), params_of(options)
    if options.input or options.output or options.concurrency is not None:
        return _run_file(options, config, params)
    if options.prompt is None and sys.stdin.isatty():
        print("reads the prompt from the terminal; Ctrl+D ends it", file=sys.stderr)
    prompt = options.prompt if options.prompt is not None else sys.stdin.read().removesuffix("\n")
    if options.prompt is None and not prompt:
        raise InvalidRequest("standard input is empty: give a text, as in tureen generate 'Once upon'", field="prompt")
    with _engine(config) as engine:
        if params.get("n", 1) > 1:
            _print_samples(engine.generate(prompt, params))
        else:
            _print_stream(engine.generate(prompt, params, stream=True))
    return 0


def _engine(config: Any) -> Any:
    """Makes the engine; standard error shows its phases."""
    terminal, offline = (importlib.import_module(f"tureen.{name}") for name in ("terminal", "offline"))
    with terminal.PhaseDisplay() as display:
        return offline.OfflineEngine(config, progress=display)


def _print_stream(answers: Iterator[dict[str, Any]]) -> None:
    shown = 0
    for answer in answers:
        print(answer["text"][shown:], end="", flush=True)
        shown = len(answer["text"])
    print()


def _print_samples(answers: list[dict[str, Any]]) -> None:
    for number, answer in enumerate(answers, 1):
        print(f"--- {number} of {len(answers)}\n{answer['text']}")


def _run_file(options: argparse.Namespace, config: Any, params: dict[str, Any]) -> int:
    """Answers each line of --input. Returns 1 where some could not be answered. Raises TureenError."""
    for flag in ("input", "output"):
        if getattr(options, flag) is None:
            raise InvalidRequest(f"--{flag} is missing: --input and --output go together", field=flag)
    if options.prompt is not None:
        raise InvalidRequest("a prompt and --input: give only one", field="prompt")
    concurrency = 32 if options.concurrency is None else options.concurrency
    if concurrency < 1:
        raise InvalidRequest(f"--concurrency {concurrency}: must be at least 1", field="concurrency")
    lines = importlib.import_module("tureen.cli.lines")
    with lines.open_job(Path(options.input), Path(options.output), params) as job:
        if not job.num_left:
            job.tell("every line is answered already")
            return 0
        with _engine(config) as engine:
            return 1 if job.run(engine, concurrency) else 0
