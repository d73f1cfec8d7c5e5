"""The command line: flags that follow the settings, where a setting comes from, exit statuses."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from tureen import config
from tureen.cli import command_line as cli
from tureen.cli.commands import serve as serve_command
from tureen.cli.flags import load_config, params_of, subparsers
from tureen.cli.translation import hint
from tureen.config import Config
from tureen.config_sources import load, unknown_variables
from tureen.contract.params import SamplingParams
from tureen.errors import InvalidRequest, StartupError


def serve_config(*flags: str) -> Config:
    return load_config(cli.parser().parse_args(["serve", *flags]))


def flags_of(command: str) -> set[str]:
    parser = cli.parser()
    subparsers(parser)
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return set(found[0].choices[command]._option_string_actions)


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch):
    for name in (field.name for field in msgspec.structs.fields(Config)):
        monkeypatch.delenv(f"{config.ENV_PREFIX}{name.upper()}", raising=False)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_every_setting_has_a_flag(command):
    flags = flags_of(command)
    for field in msgspec.structs.fields(Config):
        if field.name == "models":  # tables in a file; on the command line --model is repeated
            continue
        assert "--" + field.name.replace("_", "-") in flags
    assert {"--config", "--model"} <= flags


def test_what_needs_no_server_has_no_flags_of_one():
    flags = flags_of("generate")
    assert {"--config", "--model", "--context-length", "--grammar-backend"} <= flags
    assert not {"--host", "--port", "--api-key", "--tls-cert", "--log-level", "--batch-path"} & flags


def test_every_sampling_parameter_that_fits_a_flag_has_one():
    left_out = {"logit_bias", "allowed_token_ids", "repetition_detection", "custom_params", "stream_interval"}
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in left_out:
            assert "--" + field.name.replace("_", "-") in flags_of("generate")


def test_a_flag_of_a_parameter_whose_name_begins_with_no_turns_it_on():
    options = cli.parser().parse_args(["generate", "a", "--no-stop-trim", "--ignore-eos"])
    assert params_of(options) == {"no_stop_trim": True, "ignore_eos": True}


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--model", "/m"], "model_path", "/m"),
        (["--model-path=/m"], "model_path", "/m"),
        (["--port", "8000"], "port", 8000),
        (["--mem-fraction-static", "0.5"], "mem_fraction_static", 0.5),
        (["--disable-radix-cache"], "disable_radix_cache", True),
        (["--no-disable-radix-cache"], "disable_radix_cache", False),
        (["--schedule-policy", "lpm"], "schedule_policy", "lpm"),
        (["--context-length", "512"], "context_length", 512),
        (["--api-key", "k"], "api_key", "k"),
        (["--quantization", "int4"], "quantization", "int4"),
        (["--kv-cache-dtype", "int8"], "kv_cache_dtype", "int8"),
        (["--kernels", "torch"], "kernels", "torch"),
        (["--lora-paths", "a=b", "c", "--lora-paths", "d=e"], "lora_paths", ("a=b", "c", "d=e")),
    ],
)
def test_a_flag_sets_its_setting_and_nothing_else(flags, name, value):
    assert serve_config(*flags) == msgspec.structs.replace(Config(), **{name: value})


def test_no_flags_are_the_defaults():
    assert serve_config() == Config()


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path, monkeypatch):
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nhost = "file"\nlog-level = "debug"\nmax_queued_requests = 9\n')
    monkeypatch.setenv("TUREEN_PORT", "2")
    monkeypatch.setenv("TUREEN_HOST", "environment")
    monkeypatch.setenv("TUREEN_SOMETHING_ELSE", "x")
    found = serve_config("--config", str(file), "--port", "3")
    assert (found.port, found.host, found.log_level, found.max_queued_requests) == (3, "environment", "debug", 9)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("port = 70000", "--port"),
        ('port = "x"', "--port"),
        ("prot = 1", "prot"),
        ("port = ", "not valid TOML"),
        ('engine = "thred"', "--engine"),
        ("log-level = true", "--log-level"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_and_the_setting_s(tmp_path, text, named):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(StartupError) as refused:
        load({}, file=str(file), environment={})
    assert named in refused.value.message
    assert "settings.toml" in refused.value.message
    assert "\n" not in refused.value.message


def test_a_missing_file_and_a_wrong_variable_are_refused_by_name(tmp_path):
    with pytest.raises(StartupError, match=r"nowhere\.toml"):
        load({}, file=str(tmp_path / "nowhere.toml"), environment={})
    with pytest.raises(StartupError, match="--page-size"):
        load({}, environment={"TUREEN_PAGE_SIZE": "0"})


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["serve", "--max-totl-tokens=5"], "did you mean --max-total-tokens?"),
        (["generate", "hello", "--temprature", "0"], "did you mean --temperature?"),
        (["serve", "--zzz"], "unknown argument --zzz"),
        (["serve", "--engine", "thred"], "thred"),
        (["srve"], "there is no command srve; did you mean serve?"),
        (["-c", "conf.toml"], "-c comes before a command: tureen serve -c conf.toml"),
        (["--port", "80"], "--port comes before a command: tureen serve --port 80"),
        (["bench", "--json"], "--json"),
        (["check", "--jsn"], "tureen check: unknown argument --jsn; did you mean --json?"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(capsys, arguments, hint):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert hint in printed.err


def test_an_abbreviated_flag_is_not_taken_for_the_whole_one():
    with pytest.raises(SystemExit):
        cli.main(["serve", "--por", "1"])


@pytest.mark.parametrize(("name", "words"), [("quantization", ("int4", "int8")), ("dtype", ("auto", "float32"))])
def test_a_word_that_a_setting_does_not_know_is_answered_with_those_it_does(name, words):
    with pytest.raises(StartupError, match=f"--{name} 'nonsense': it must be ") as refused:
        load({}, environment={f"TUREEN_{name.upper()}": "nonsense"})
    assert all(word in str(refused.value) for word in words)


def test_a_setting_out_of_range_is_one_line_and_status_1(capsys):
    assert cli.main(["serve", "--port", "99999"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("tureen: ")
    assert "--port" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("port", "abc", "a whole number from 0 to 65535"),
        ("port", "-1", "a whole number from 0 to 65535"),
        ("context-length", "1.5", "a whole number of at least 1"),
        ("mem-fraction-static", "much", "a number of more than 0 and less than 1"),
        ("disable-radix-cache", "perhaps", "true, false"),
    ],
)
def test_a_value_that_a_setting_cannot_have_is_named_with_what_it_may_be(flag, value, allowed):
    with pytest.raises(StartupError) as refused:
        load({}, environment={f"TUREEN_{flag.upper().replace('-', '_')}": value})
    assert str(refused.value) == f"setting in the environment: --{flag} '{value}': it must be {allowed}"


@pytest.mark.parametrize("address", ["http://127.0.0.1:30000", "https://models.example", "unix:/run/tureen.sock"])
def test_a_chat_with_an_address_for_a_model_is_told_the_flag(capsys, address):
    assert cli.main(["chat", address]) == 1
    assert f"tureen chat --url {address}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "status"),
    [(StartupError("the disk is full"), 1), (InvalidRequest("bad"), 1), (KeyboardInterrupt(), 130)],
)
def test_how_the_command_ends_tells_the_status(monkeypatch, capsys, raised, status):
    def serve(_):
        raise raised

    monkeypatch.setattr(serve_command, "run", serve)
    assert cli.main(["serve"]) == status
    assert capsys.readouterr().err == ("" if status == 130 else f"tureen: {raised.message}\n")


def help_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_says_how_to_see_more(capsys):
    shown = help_of(capsys, "serve", "--help")
    assert shown.count("\n") < 60
    assert [name for name in config.COMMON if f"--{name.replace('_', '-')}" not in shown] == []
    assert "--responses-ttl" not in shown
    assert "--help=all shows every flag" in shown


@pytest.mark.parametrize("word", ["cache", "CACHE"])
def test_help_of_a_word_shows_the_flags_that_have_it_and_no_others(capsys, word):
    shown = help_of(capsys, "serve", f"--help={word}")
    assert "--kv-cache-dtype" in shown
    assert "--max-total-tokens" in shown  # its text has the word
    assert "--port" not in shown
    assert "no flag has a word starting with 'zebra'" in help_of(capsys, "serve", "--help=zebra")


@pytest.mark.parametrize(("command", "same"), [("help", "--help"), ("help serve", "serve --help")])
def test_help_is_what_the_flag_prints(capsys, command, same):
    assert help_of(capsys, *command.split()) == help_of(capsys, *same.split())


def test_a_word_is_searched_for_from_its_beginning(capsys):
    shown = help_of(capsys, "serve", "--help=port")
    assert "--port PORT" in shown
    assert "eported" not in shown
    assert "upported" not in shown
    assert "--port PORT" in help_of(capsys, "serve", "--help=--po")


def test_help_names_what_a_value_is(capsys):
    shown = help_of(capsys, "serve", "--help=all")
    for usage in (
        "--port PORT", "--max-body-bytes BYTES", "--drain-timeout-s SECONDS", "--download-dir PATH", "--api-key KEY",
        "--tls-cert, --ssl-certfile FILE", "--helper-memory-mib MIB", "--max-n N", "--engine auto|thread|process",
    ):  # fmt: skip
        assert usage in shown
    assert "VALUE" not in shown


def test_tureen_alone_shows_what_to_do_first(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert shown.index("tureen serve") < shown.index("tureen generate") < shown.index("commands:")
    assert "  bench " in shown
    assert help_of(capsys, "--help") == shown


@pytest.mark.parametrize("arguments", [["MODEL", "--port", "7"], ["--port", "7", "MODEL"]])
def test_the_model_may_be_given_as_the_command_s_argument(arguments):
    assert serve_config(*arguments) == msgspec.structs.replace(Config(), model_path="MODEL", port=7)


def test_a_model_beside_the_command_s_argument_is_one_more():
    assert serve_config("a", "--model-path", "b").models == ({"model_path": "a"}, {"model_path": "b"})


@pytest.mark.parametrize(("name", "same"), [("--port", "--port"), ("port", "port")])
def test_a_hint_is_never_the_word_itself(name, same):
    assert same not in hint(name, {same: None})


def test_all_settings_that_are_wrong_are_named_at_once_with_where_they_come_from(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('prot = 1\nengine = "thred"\n')
    with pytest.raises(StartupError) as refused:
        load({"port": "99999"}, file=str(file), environment={"TUREEN_PAGE_SIZE": "0"})
    lines = refused.value.message.split("\n")
    assert ["prot" in lines[0], "--engine" in lines[1], "--page-size" in lines[2], "--port" in lines[3]] == [True] * 4
    assert "did you mean port?" in lines[0]
    assert "environment" in lines[2]


@pytest.mark.parametrize(
    ("line", "faulty"),
    [
        ("--page-size x --port y --dtype q", ["--page-size x", "--port y", "--dtype q"]),
        ("--port 99999 --engine thred --prot 1", ["--port 99999", "--engine thred", "unknown argument --prot"]),
        ("--max-n=-1 --dtype=float33 --log-interval-s soon", ["--max-n -1", "--dtype float33", "--log-interval-s"]),
    ],
)
def test_all_bad_values_of_a_line_are_named_at_once(capsys, line, faulty):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *line.split()])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [fault in line for fault, line in zip(faulty, lines, strict=True)] == [True] * len(faulty)


def test_run_is_another_name_of_chat(monkeypatch, capsys):
    taken = []
    monkeypatch.setattr("tureen.cli.commands.chat.run", lambda options: taken.append(options) or 0)
    for command in ("chat", "run"):
        assert cli.main([command, "smollm2:135m", "--temperature", "0"]) == 0
    chat, run = ({name: value for name, value in vars(one).items() if name != "command"} for one in taken)
    assert chat == run
    assert cli.main([]) == 0
    assert "chat (run) " in capsys.readouterr().out


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("tureen ")


def test_models_lists_an_empty_folder(tmp_path, capsys):
    assert cli.main(["models", "--download-dir", str(tmp_path)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("TUREEN_API_KEYS", "API_KEY"), ("TUREEN_PRTO", "PORT"), ("TUREEN_HSOT", "HOST"), ("TRUEEN_PORT", "PORT")],
)
def test_a_mistyped_variable_is_refused_with_its_setting_and_nothing_else_is_said_of_it(wrong, right, capsys):
    environment = {wrong: "k", "TURN_PORT": "3478", "TURBINE_HOST": "b"}
    with pytest.raises(StartupError) as refused:
        load({}, environment=environment)
    assert refused.value.message == f"{wrong} is not a setting; did you mean TUREEN_{right}?"
    assert unknown_variables(environment) == []


def test_a_variable_that_is_like_no_setting_is_left_alone():
    assert load({}, environment={"TUREEN_TEST_DEVICE": "cuda", "TUREEN_HOME": "/x"}) == Config()


def test_a_mistyped_variable_does_not_hide_other_faults():
    with pytest.raises(StartupError) as refused:
        load({"port": "y"}, environment={"TUREEN_API_KEYS": "k", "TUREEN_PAGE_SIZE": "0"})
    lines = refused.value.message.split("\n")
    assert ["API_KEYS" in lines[0], "--page-size" in lines[1], "--port" in lines[2]] == [True] * 3
