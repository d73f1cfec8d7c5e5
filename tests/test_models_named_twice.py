"""Several models are for `tureen serve`; everything that takes one refuses more by name."""

from __future__ import annotations

import pytest

from tureen.build import find_model
from tureen.cli.commands import chat, generate, serve
from tureen.cli.flags import CommandParser, load_config
from tureen.config import Config
from tureen.errors import StartupError


def config_of(command, *flags: str) -> Config:
    parser = CommandParser()
    command.add_flags(parser)
    return load_config(parser.parse_args(flags))


@pytest.mark.parametrize(
    "flags",
    [
        ("A", "--model", "B"),
        ("--model", "A", "--model", "B"),
        ("A", "--model", "A", "--model", "B"),
    ],
)
def test_serve_takes_the_models_in_the_order_in_which_they_are_named(flags):
    config = config_of(serve, *flags)
    assert config.models == ({"model_path": "A"}, {"model_path": "B"})
    assert config.model_path == "A"


@pytest.mark.parametrize("flags", [("A",), ("A", "--model", "A"), ("--model", "A")])
def test_serve_with_a_model_named_takes_it_and_not_those_of_the_file(flags, tmp_path):
    file = tmp_path / "tureen.toml"
    file.write_text('[[models]]\nmodel_path = "C"\n[[models]]\nmodel_path = "D"\n')
    config = config_of(serve, *flags, "--config", str(file))
    assert (config.model_path, config.models) == ("A", ())


@pytest.mark.parametrize("command", [generate, chat])
def test_a_command_that_takes_one_model_refuses_two_by_name(command):
    config = config_of(command, "--model", "A", "--model", "B")
    with pytest.raises(StartupError, match="models: 2 models are named, but only one can be loaded here"):
        find_model(config)


def test_chat_refuses_two_models_one_of_them_without_a_flag():
    with pytest.raises(StartupError, match="2 models are named"):
        find_model(config_of(chat, "A", "--model", "B"))


def test_the_engine_in_process_refuses_a_file_that_names_two():
    with pytest.raises(StartupError, match="2 models are named") as refusal:
        find_model(Config(models=({"model_path": "A"}, {"model_path": "B"})))
    assert refusal.value.field == "models"
