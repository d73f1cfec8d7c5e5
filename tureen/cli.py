"""The `tureen` command: serve, generate, bench, check, models. Flags derive from config.py and contract/params.py.

Imports: config, errors; msgspec.
Imported by: __main__, launch_server.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec

from tureen import __version__
from tureen.config import Config, cache_dir, fields, load
from tureen.errors import TureenError


class CommandParser(argparse.ArgumentParser):
    """A parser that suggests the nearest flag for a mistyped one. Flags are added only to the command that runs."""

    add_flags: Callable[[CommandParser], None] | None = None

    def complete(self) -> None:
        """Adds the flags that are still missing."""
        if self.add_flags is not None:
            add_flags, self.add_flags = self.add_flags, None
            add_flags(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            known = [flag for command in _subparsers(self) for flag in command._option_string_actions]
            hints = difflib.get_close_matches(rest[0].split("=")[0], known, n=1)
            self.error(f"unknown argument {rest[0]}" + (f"; did you mean {hints[0]}?" if hints else ""))
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns the exit status; an error of ours is one line on stderr and status 1."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except TureenError as error:
        print(f"tureen: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> CommandParser:
    parser = CommandParser(prog="tureen", description="An LLM serving runtime.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tureen {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)

    serve = commands.add_parser("serve", help="start the HTTP server", allow_abbrev=False)
    serve.add_flags = partial(add_config, takes_lists=True)
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="continue a prompt without a server", allow_abbrev=False)
    generate.add_flags = _add_generate
    generate.set_defaults(run=_generate)

    bench = commands.add_parser("bench", help="measure a running server", allow_abbrev=False)
    bench.add_flags = _add_bench

    check = commands.add_parser("check", help="what is installed, and what this machine allows", allow_abbrev=False)
    check.add_argument("--json", action="store_true", help="for programs")
    check.set_defaults(run=_check)

    models = commands.add_parser("models", help="models on disk and architectures that run", allow_abbrev=False)
    models.add_argument("--config", help=argparse.SUPPRESS)
    models.add_argument("--download-dir", default=argparse.SUPPRESS, help="where downloaded models are kept")
    models.set_defaults(run=_models)
    actions = models.add_subparsers(dest="action", metavar="build", parser_class=CommandParser)
    build = actions.add_parser("build", help="put a model together from published weights", allow_abbrev=False)
    build.add_argument("name", choices=["shapes-vlm"], help="shapes-vlm: says what is drawn in a picture")
    build.add_argument("--config", help=argparse.SUPPRESS)
    build.add_argument("--download-dir", default=argparse.SUPPRESS, help="where downloaded models are kept")
    build.set_defaults(run=_build_model)
    return parser


def _subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    commands = [command for action in actions for command in action.choices.values()]
    for command in commands:
        command.complete()
    return [parser, *commands]


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="text to continue; read from standard input when absent")
    add_params(parser)
    add_config(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    command = importlib.import_module("tureen.bench.command")
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def add_config(parser: argparse.ArgumentParser, *, takes_lists: bool = False) -> None:
    """Adds one flag per field of Config, grouped. `config.load` checks the values.

    takes_lists: whether several values may follow one flag, which would swallow a command's own argument.
    """
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings; flags and TUREEN_* variables win")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in fields():
        kind, meta = get_args(field.type)
        group = groups.setdefault(meta.extra["group"], parser.add_argument_group(meta.extra["group"]))
        flags = [f"--{field.name.replace('_', '-')}"] + ([meta.extra["alias"]] if meta.extra["alias"] else [])
        text = f"{meta.description} [{_show(field.default)}]"
        _add_flag(group, flags, field.name, kind, text, takes_lists=takes_lists)


def add_params(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per sampling parameter. `--dtype` is the model's."""
    group = parser.add_argument_group("sampling")
    for field in msgspec.structs.fields(_params_type()):
        if field.name in ("logit_bias", "allowed_token_ids", "custom_params", "stream_interval", "dtype"):
            continue
        kind, meta = get_args(field.type)
        kind = tuple[str, ...] if field.name == "choice" else kind
        _add_flag(group, [f"--{field.name.replace('_', '-')}"], f"param_{field.name}", kind, meta.description)


def _add_flag(
    group: argparse._ArgumentGroup, flags: list[str], dest: str, kind: Any, text: str, *, takes_lists: bool = False
) -> None:
    text = text.replace("%", "%%")
    if kind is bool:
        group.add_argument(
            *flags, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    elif get_origin(kind) is tuple:
        how: dict[str, Any] = {"action": "extend", "nargs": "+"} if takes_lists else {"action": "append"}
        group.add_argument(*flags, dest=dest, default=argparse.SUPPRESS, metavar="VALUE", help=text, **how)
    else:
        choices = get_args(kind) if get_origin(kind) is Literal else None
        metavar = None if choices else "VALUE"
        group.add_argument(*flags, dest=dest, choices=choices, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _show(default: object) -> str:
    return "auto" if default is None else str(default)


def load_config(options: argparse.Namespace) -> Config:
    """Merges the flags with environment and file. Raises StartupError."""
    names = set(Config.__struct_fields__)
    settings = {name: value for name, value in vars(options).items() if name in names}
    return load(settings, file=options.config)


def _params_type() -> Any:
    return importlib.import_module("tureen.contract.params").SamplingParams


def _serve(options: argparse.Namespace) -> int:
    gc.disable()  # what start-up makes stays: `tureen.server` has it collected from when it is ready
    try:
        server = importlib.import_module("tureen.server")  # heavy imports only for the command that needs them
        return int(server.serve(load_config(options)))
    finally:
        gc.enable()


def _generate(options: argparse.Namespace) -> int:
    offline = importlib.import_module("tureen.offline")
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    values = {name.removeprefix("param_"): value for name, value in vars(options).items() if name.startswith("param_")}
    params = msgspec.to_builtins(msgspec.convert(values, _params_type(), strict=False))
    with offline.OfflineEngine(load_config(options)) as engine:
        shown = 0
        for answer in engine.generate(prompt, params, stream=True):
            print(answer["text"][shown:], end="", flush=True)
            shown = len(answer["text"])
    print()
    return 0


def _check(options: argparse.Namespace) -> int:
    """Prints the report for a bug report, and for whoever wonders how fast this machine could be."""
    check = importlib.import_module("tureen.bench.check")
    report = check.make_report()
    print(msgspec.json.encode(report).decode() if options.json else "\n".join(check.lines_of(report)))
    return 0


def _models(options: argparse.Namespace) -> int:
    build = importlib.import_module("tureen.build")
    config = load_config(options)
    print("on disk:")
    for path, size_bytes in build.downloaded_models(config):
        print(f"  {path}  {size_bytes / 2**20:,.0f} MiB")
    print("architectures that run:")
    for name in build.architectures():
        print(f"  {name}")
    return 0


def _build_model(options: argparse.Namespace) -> int:
    terminal = importlib.import_module("tureen.terminal")
    shapes_vlm = importlib.import_module("tureen.recipes.shapes_vlm")
    with terminal.PhaseDisplay() as display:
        folder = shapes_vlm.build(cache_dir(load_config(options)), display)
    print(f"built. Serve it with:\n  tureen serve --model-path {shlex.quote(str(folder))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
