"""`tureen serve`: starts the HTTP server."""

from __future__ import annotations

import argparse
import gc
import importlib
import signal

from tureen.cli.flags import CommandParser, add_config, load_config, tell_unknown_variables

HELP = "start the HTTP server"


def add_flags(parser: CommandParser) -> None:
    """Adds the model, and a flag for each setting."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the model, as in --model-path")
    add_config(parser, takes_lists=True)


def run(options: argparse.Namespace) -> int:
    """Serves until a signal ends the server. Raises StartupError."""
    gc.disable()  # what start-up makes stays: `tureen.server` has it collected from when it is ready
    on_ctrl_c = signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import may swallow KeyboardInterrupt
    try:
        tell_unknown_variables()
        server = importlib.import_module("tureen.server")  # heavy imports only for the command that needs them
        return int(server.serve(load_config(options)))
    finally:
        signal.signal(signal.SIGINT, on_ctrl_c)
        gc.enable()
