"""`tureen models`: models on disk and architectures that run; `tureen models build` makes one."""

from __future__ import annotations

import argparse
import importlib
import shlex

from tureen.cli.flags import CommandParser, load_config
from tureen.config import cache_dir
from tureen.extras import require
from tureen.log import size

HELP = "list models on disk and supported architectures"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds where models are, and the subcommand `build`."""
    _add_places(parser)
    actions = parser.add_subparsers(dest="action", metavar="build", parser_class=CommandParser)
    build = actions.add_parser("build", help="build a model from published weights")
    build.add_argument("name", choices=["shapes-vlm"], help="shapes-vlm: describes drawn shapes")
    _add_places(build)
    build.set_defaults(run=_build)


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("--download-dir", default=argparse.SUPPRESS, help="folder of downloaded models")


def run(options: argparse.Namespace) -> int:
    """Prints both lists. Raises StartupError."""
    build = importlib.import_module("tureen.build")
    config = load_config(options)
    print("on disk:")
    for model in importlib.import_module("tureen.fetching.on_disk").kept_models(config):
        print(f"  {model.name}  {size(model.num_bytes)}")
    print("architectures that run:")
    for name in build.architectures():
        print(f"  {name}")
    return 0


def _build(options: argparse.Namespace) -> int:
    terminal = importlib.import_module("tureen.terminal")
    require(f"{options.name}, a vision model,", "PIL")
    shapes_vlm = importlib.import_module("tureen.recipes.shapes_vlm")
    with terminal.PhaseDisplay() as display:
        folder = shapes_vlm.build(cache_dir(load_config(options)), display)
    print(f"built. Serve it with:\n  tureen serve --model-path {shlex.quote(str(folder))}")
    return 0
