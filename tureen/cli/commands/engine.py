"""`tureen engine`: an engine for the servers of other machines."""

from __future__ import annotations

import argparse
import importlib
import signal
from typing import get_args

from tureen.cli.flags import CommandParser, add_config, load_config, tell_unknown_variables
from tureen.contract.types import EngineRole

HELP = "run an engine for servers on other machines (tureen serve --replicas tcp://HOST:PORT)"
GROUPS = ("model", "sampling", "scheduling", "logging")
TLS = {
    "--tls-cert": "PEM file with the engine's certificate chain",
    "--tls-key": "PEM file with the private key of --tls-cert",
    "--tls-key-password-file": "file with the password of --tls-key",
    "--tls-ca": "PEM file with the CA that signs the servers' certificates",
    "--tls-crl": "PEM file with certificates that --tls-ca has revoked",
}


def add_flags(parser: CommandParser) -> None:
    """Adds the model, where to listen, and a flag for each setting of an engine."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the model, as in --model-path")
    parser.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:7000", help="where servers find it")
    parser.add_argument(
        "--role", choices=get_args(EngineRole), default="both", help="what servers give it: docs/scaling.md"
    )
    for flag, text in TLS.items():
        parser.add_argument(flag, dest=flag[2:].replace("-", "_"), metavar="FILE", default=argparse.SUPPRESS, help=text)
    add_config(parser, takes_lists=True, groups=GROUPS)


def run(options: argparse.Namespace) -> int:
    """Runs the engine until a signal ends it. Raises StartupError."""
    on_ctrl_c = signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import may swallow KeyboardInterrupt
    try:
        tell_unknown_variables()
        command = importlib.import_module("tureen.data_parallel.engine_command")
        return int(command.serve_engine(load_config(options), options.listen, options.role))
    finally:
        signal.signal(signal.SIGINT, on_ctrl_c)
