"""`tureen config show`, unknown variables, and what shells are told to complete."""

from __future__ import annotations

import json
import os
import tomllib

import msgspec
import pytest

from tureen.cli import command_line as cli
from tureen.config import ENV_PREFIX, Config
from tureen.config_sources import load, unknown_variables
from tureen.errors import StartupError


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def test_each_setting_is_shown_with_its_value_and_where_it_comes_from(tmp_path, monkeypatch, capsys):
    file = tmp_path / "settings.toml"
    file.write_text('page-size = 32\nport = 1\nhost = "::1"\n')
    monkeypatch.setenv("TUREEN_PORT", "2")
    monkeypatch.setenv("TUREEN_LOG_LEVEL", "debug")
    command = ["config", "show", "--json", "m", "--config", str(file), "--log-level", "error"]
    assert cli.main(command) == 0
    shown = {each["name"]: (each["value"], each["source"]) for each in json.loads(capsys.readouterr().out)}
    assert shown["page_size"] == (32, str(file))
    assert shown["host"] == ("::1", str(file))
    assert shown["port"] == (2, "TUREEN_PORT")
    assert shown["log_level"] == ("error", "a flag")
    assert shown["model_path"] == ("m", "a flag")
    assert shown["max_n"] == (128, "default")
    assert shown.keys() == set(Config.__struct_fields__)
    assert cli.main([*command, "--changed"]) == 0
    changed = {each["name"] for each in json.loads(capsys.readouterr().out)}
    assert changed == {"page_size", "host", "port", "log_level", "model_path"}


def test_where_nothing_is_changed_it_says_so(capsys):
    assert cli.main(["config", "show", "--changed"]) == 0
    assert capsys.readouterr().out == "# every setting is at its default\n"


def test_variables_that_are_no_settings_are_told(monkeypatch, capsys):
    monkeypatch.setenv("TUREEN_PROTT", "3")
    assert cli.main(["config", "show", "--changed"]) == 0
    assert capsys.readouterr().err == "tureen: TUREEN_PROTT is not a setting; ignored\n"


def test_what_is_shown_is_a_file_that_config_takes(tmp_path, capsys):
    given = ["--context-length", "512", "--api-key-file", 'a"b', "--lora-paths", "a=b", "c=d", "--disable-radix-cache"]
    assert cli.main(["config", "show", *given]) == 0
    file = tmp_path / "shown.toml"
    file.write_text(capsys.readouterr().out)
    assert tomllib.loads(file.read_text())["context-length"] == 512
    assert load({}, file=str(file), environment={}) == msgspec.structs.replace(
        Config(), context_length=512, api_key_file='a"b', lora_paths=("a=b", "c=d"), disable_radix_cache=True
    )


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_secrets_are_not_shown(how, monkeypatch, capsys):
    monkeypatch.setenv("TUREEN_ADMIN_API_KEY", "geheim2")
    assert cli.main(["config", "show", "--api-key", "geheim1", *how]) == 0
    shown = capsys.readouterr().out
    assert "geheim" not in shown
    assert shown.count("(hidden)") == 2


def test_a_file_of_what_is_shown_does_not_make_a_secret_of_the_word_that_hides_it(tmp_path, capsys):
    assert cli.main(["config", "show", "--api-key", "geheim", "--port", "5"]) == 0
    file = tmp_path / "shown.toml"
    file.write_text(capsys.readouterr().out)
    assert "# api-key (hidden)" in file.read_text()
    assert load({}, file=str(file), environment={}) == Config(port=5)


def test_a_fault_names_the_file_and_the_value_as_they_are_written(tmp_path):
    file = tmp_path / "my_settings.toml"
    file.write_text('log_level = "very_loud"\n')
    with pytest.raises(StartupError) as fault:
        load({}, file=str(file), environment={})
    assert str(file) in fault.value.message
    assert "--log-level 'very_loud': it must be debug, " in fault.value.message


def test_flags_of_peers_are_shown_as_what_they_are_here(capsys):
    assert cli.main(["config", "show", "--changed", "--max-model-len", "512", "--enforce-eager"]) == 0
    assert capsys.readouterr().out == "context-length = 512  # a flag\n"


def test_a_wrong_setting_is_named_and_nothing_is_shown(capsys):
    assert cli.main(["config", "show", "--port", "99999"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--port" in printed.err


def test_variables_that_are_no_settings_are_told_at_the_start(monkeypatch, capsys):
    monkeypatch.setenv("TUREEN_HOME", "/x")
    monkeypatch.setenv("TUREEN_PORT", "70000")  # ends the start
    assert cli.main(["serve"]) == 1
    assert "TUREEN_HOME" in capsys.readouterr().err
    assert unknown_variables({"TUREEN_PORT": "1", "TUREEN_B": "", "TUREEN_A": "", "OTHER": ""}) == [
        "TUREEN_A",
        "TUREEN_B",
    ]


@pytest.mark.parametrize(("shell", "mark"), [("bash", "complete "), ("zsh", "compdef"), ("fish", "complete ")])
def test_the_code_for_a_shell_is_printed(capsys, shell, mark):
    assert cli.main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert mark in shown
    assert "tureen" in shown
