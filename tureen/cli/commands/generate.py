"""`tureen generate`: continues a prompt in this process."""

from __future__ import annotations

import argparse
import importlib
import sys

import msgspec

from tureen.cli.flags import add_config, add_params, load_config, params_type

HELP = "continue a prompt without a server"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the prompt, and a flag for each sampling parameter and each setting."""
    parser.add_argument("prompt", nargs="?", help="text to continue; read from standard input when absent")
    add_params(parser)
    add_config(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the continuation as it comes. Raises TureenError."""
    offline = importlib.import_module("tureen.offline")
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    values = {name.removeprefix("param_"): value for name, value in vars(options).items() if name.startswith("param_")}
    params = msgspec.to_builtins(msgspec.convert(values, params_type(), strict=False))
    with offline.OfflineEngine(load_config(options)) as engine:
        shown = 0
        for answer in engine.generate(prompt, params, stream=True):
            print(answer["text"][shown:], end="", flush=True)
            shown = len(answer["text"])
    print()
    return 0
