"""`tureen chat`: a chat in the terminal, with a server that runs or with a model that it loads itself."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from tureen.cli.chat import screen, slash
from tureen.cli.chat.connection import ServerAddress
from tureen.cli.chat.conversation import Conversation, Message
from tureen.cli.chat.own_server import own_server
from tureen.cli.flags import (
    CommandParser,
    OneOfModels,
    add_config,
    add_params,
    as_flags,
    load_config,
    params_of,
    settings_of,
)
from tureen.config import Config, cache_dir
from tureen.errors import InvalidRequest, StartupError

HELP = "chat in the terminal"

OURS = frozenset(("host", "port", "api_key", "download_dir"))
"""Settings that say where a running server is, or where the chat keeps its history."""


def add_flags(parser: CommandParser) -> None:
    """Adds the model, the server, what the chat begins with, and the flags of `generate`."""
    text = "model to load. Default: the server on --port, if one runs, otherwise the default model"
    once: dict[str, Any] = {"action": OneOfModels, "nargs": "?", "default": argparse.SUPPRESS, "metavar": "MODEL"}
    parser.add_argument("model_path", help=text, **once)
    parser.add_argument("--url", help="a running server: http://HOST:PORT or unix:PATH")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument("--schema", metavar="FILE", help="JSON schema that the answers follow")
    add_params(parser)
    add_config(parser)


def run(options: argparse.Namespace) -> int:
    """Chats until the user ends it; without a terminal answers the text of standard input. Raises TureenError."""
    config = load_config(options)
    conversation = Conversation(system=options.system, settings=params_of(options))
    if options.schema:
        slash.do_schema(conversation, options.schema)
    model = str(settings_of(options).get("model_path", ""))
    if model.startswith(("http://", "https://", "unix:")):
        raise StartupError(f"{model} is an address, not a model: tureen chat --url {model}")
    said = None if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    if said == "":
        raise InvalidRequest("standard input is empty: write a message to it, or run tureen chat in a terminal")
    with _server(options, config) as server:
        [model, *_] = server.ask("GET", "/v1/models")["data"]
        conversation.model = model["id"]
        if said is None:
            screen.say(f"{model['id']} at {server.url}")
            screen.chat(conversation, server, cache_dir(config) / "chat_history", model.get("max_model_len") or 0)
        else:
            conversation.messages.append(Message("user", said))
            screen.show(conversation.answer(server))
    return 0


@contextlib.contextmanager
def _server(options: argparse.Namespace, config: Config) -> Iterator[ServerAddress]:
    """Finds the server to talk to, or starts one. Raises StartupError."""
    settings = settings_of(options)
    running = ServerAddress(options.url or f"http://{config.host}:{config.port}", api_key=config.api_key)
    if options.url is None and ("model_path" in settings or not running.answers()):
        with importlib.import_module("tureen.terminal").PhaseDisplay() as display:
            importlib.import_module("tureen.build").find_model(config, progress=display)  # downloads it in sight
        screen.say(f"loading {config.model_path} …")
        with own_server(as_flags(options), api_key=config.api_key) as own:
            yield own
        return
    if vain := [name for name in settings if name not in OURS]:
        flag = vain[0].replace("_", "-")
        raise StartupError(
            f"--{flag} is for a new server, but one already runs at {running.url}: leave it out, or name "
            "a MODEL to load"
        )
    if not running.answers():
        raise StartupError(f"no server answers at {running.url}; start one with: tureen serve")
    yield running
