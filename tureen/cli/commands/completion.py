"""`tureen completion`: what makes a shell complete commands and flags."""

from __future__ import annotations

import argparse
import importlib

HELP = "print the shell completion of commands and flags"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the shell."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help='bash and zsh: eval "$(tureen completion bash)"')


def run(options: argparse.Namespace) -> int:
    """Prints the shell's code."""
    print(importlib.import_module("argcomplete").shellcode(["tureen"], shell=options.shell))
    return 0
