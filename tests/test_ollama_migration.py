"""`tureen migrate -- ollama …`: every variable, instruction and parameter has a verdict that does what it says."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
from pathlib import Path

import jinja2
import pytest

from tureen.cli import command_line as cli
from tureen.cli.flags import CommandParser, load_config, subparsers
from tureen.cli.modelfile import INSTRUCTIONS, MAX_BYTES, read_modelfile
from tureen.cli.ollama import MARKS
from tureen.cli.peer_tables import load_peer
from tureen.cli.translation import Given, translate_settings
from tureen.config import Config
from tureen.errors import InvalidRequest, StartupError
from tureen.text.chat_template import BUILT_IN
from tureen.text.tokenizer import Tokenizer
from tureen.weights.source import ModelSource, load_tokenizer

LISTED = json.loads((Path(__file__).parent / "data" / "peers" / "ollama.json").read_text())
PEER = load_peer("ollama")
VERDICTS = list({id(verdict): verdict for verdict in PEER.verdicts.values()}.values())
SAMPLES = ("7", "x", "0.5", "a=b", "http://a", "4096")


@functools.cache
def parser() -> CommandParser:
    return cli.parser(["serve"])


@functools.cache
def serve_parser() -> CommandParser:
    return subparsers(parser())[1]


def started(arguments: list[str]) -> Config:
    return load_config(parser().parse_args(["serve", *arguments]))


def migrated(capsys, *words: str) -> tuple[int, list[str], str]:
    """Returns the status, the reasons and the command."""
    status = cli.main(["migrate", "--", *words])
    printed = capsys.readouterr()
    *reasons, command = (printed.out or printed.err).splitlines()
    return status, reasons, command


def migrated_error(capsys, *words: str) -> str:
    """Returns what a command that fails prints to stderr."""
    with contextlib.suppress(SystemExit):
        assert cli.main([*words]) != 0
    return capsys.readouterr().err


def described(capsys, folder: Path, text: str, *before: str) -> tuple[int, list[str], str]:
    """Returns what becomes of a Modelfile."""
    (folder / "Modelfile").write_text(text)
    return migrated(capsys, *before, "ollama", "create", "mine", "-f", str(folder / "Modelfile"))


def test_each_variable_and_parameter_of_ollama_s_own_lists_is_in_the_table():
    assert [name for name in LISTED["variables"] + LISTED["parameters"] if PEER.find(name) is None] == []
    assert set(LISTED["instructions"]) == set(INSTRUCTIONS)
    assert (PEER.written.version, PEER.written.command) == (LISTED["version"], LISTED["command"])


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: verdict.names[0])
def test_a_verdict_does_what_it_says(verdict, capsys):
    """The settings that a row names change, others do not; a refusal has its reason."""
    own = serve_parser().own_flags()
    named = [*(verdict.row.only or ()), *(value for value in verdict.row.values if value != "*")]
    for name in verdict.names:
        outcomes = []
        for value in named if verdict.row.only is not None else (*named, *SAMPLES):
            given = Given(name, name, value if verdict.takes != "nothing" else None, line=f"{name} {value}")
            result = translate_settings([given], own, PEER)
            if verdict.kind == "refused":
                assert verdict.row.why in result.faults[0]
                break
            assert result.faults == []
            [note] = result.notes
            assert note.theirs == given.line
            try:
                found = started(result.arguments)
            except (SystemExit, StartupError):  # this sample is no value of the setting
                continue
            changed = {field for field in Config.__struct_fields__ if getattr(found, field) != getattr(Config(), field)}
            flags = serve_parser()._option_string_actions
            assert changed <= {flags[word].dest for word in note.ours if word in flags}
            outcomes.append(changed)
        capsys.readouterr()
        assert verdict.kind == "refused" or (outcomes and (verdict.kind == "told" or any(outcomes))), "no sample fits"


def test_a_value_that_is_not_off_is_refused_by_name(capsys, tmp_path):
    status, reasons, _ = described(capsys, tmp_path, "FROM smollm2\nPARAMETER mirostat 2\nPARAMETER sparkle 1\n")
    assert status == 1
    faults = [reason for reason in reasons if "NOT SUPPORTED" in reason]
    assert any("PARAMETER mirostat 2" in fault and "min_p" in fault for fault in faults)
    assert any("PARAMETER sparkle" in fault for fault in faults)


def test_quotes_and_lines_are_read_as_ollama_reads_them(tmp_path):
    file = tmp_path / "Modelfile"
    file.write_text(
        '\ufeff# comment\nfrom\t./a.gguf\n\nPARAMETER stop "a b"\nparameter \t temperature\t0.5\n'
        'SYSTEM """\nSay "hi".\n# kept\n"""\n'
        'MESSAGE user Is it "so"?\nTEMPLATE "one\ntwo"\nLICENSE """MIT"""\n'
    )
    assert [tuple(each) for each in read_modelfile(file)] == [
        ("FROM", "", "./a.gguf"),
        ("PARAMETER", "stop", "a b"),
        ("PARAMETER", "temperature", "0.5"),
        ("SYSTEM", "", '\nSay "hi".\n# kept\n'),
        ("MESSAGE", "user", 'Is it "so"?'),
        ("TEMPLATE", "", "one\ntwo"),
        ("LICENSE", "", "MIT"),
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("PARAMETER a 1\n", "has no FROM line"),
        ("FROM a\nSYSTEN x\n", r"line 2: 'SYSTEN' is none of FROM, PARAMETER"),
        ('FROM a\nSYSTEM """x\n', "line 2: SYSTEM has no closing quote"),
        ("FROM\n", "line 1: FROM names no model"),
        ("FROM a\nMESSAGE boss x\n", "line 2: MESSAGE 'boss' must be one of system, user, assistant"),
        ("FROM a\nPARAMETER --host 0.0.0.0\n", "line 2: '--host' is not an Ollama parameter"),
        ("FROM a\nPARAMETER OLLAMA_HOST 0.0.0.0\n", "line 2: 'OLLAMA_HOST' is not an Ollama parameter"),
        (None, "No such file"),
    ],
)
def test_a_modelfile_that_cannot_be_read_is_one_sentence(tmp_path, text, fault):
    if text is not None:
        (tmp_path / "Modelfile").write_text(text)
    with pytest.raises(InvalidRequest, match=fault):
        read_modelfile(tmp_path / "Modelfile")


def test_a_modelfile_of_a_million_lines_is_read_once(tmp_path):
    """Looking at all lines so far for each line takes minutes."""
    lines = "\n" * (MAX_BYTES - 100)
    (tmp_path / "Modelfile").write_text(f'FROM a\nSYSTEM """{lines}"""\n')
    assert read_modelfile(tmp_path / "Modelfile")[1].value == lines


@pytest.mark.parametrize("text", ['PARAMETER stop """\nrm -rf x"""', 'LICENSE "a\rrm -rf x"', 'FROM """y\nrm -rf x"""'])
def test_what_a_modelfile_says_cannot_end_the_comment_that_repeats_it(capsys, tmp_path, text):
    _, reasons, _ = described(capsys, tmp_path, f"FROM smollm2\n{text}\n")
    assert [reason for reason in reasons if not reason.startswith("# ")] == []


def test_commands_in_reasons_have_their_values_quoted(capsys, tmp_path):
    _, reasons, _ = described(capsys, tmp_path, "FROM hf.co/org/a;touch b\nSYSTEM Be kind.\n")
    assert any("run tureen pull 'org/a;touch b', then" in reason for reason in reasons)
    blob = tmp_path / "a;touch b"
    blob.write_bytes(b"GGUF")
    _, reasons, _ = described(capsys, tmp_path, f"FROM {blob}\n")
    assert any(f"ln -s '{blob}' './a;touch b.gguf'" in reason for reason in reasons)


def test_the_value_of_a_variable_is_quoted_and_its_name_is_not(capsys):
    _, _, command = migrated(capsys, "A=b c", "B=", "vllm", "serve", "m")
    assert command.startswith("A='b c' B= tureen serve m ")


@pytest.mark.parametrize("name", ["~no-such-user/x", "a" * 400])
def test_a_name_that_no_file_can_have_is_one_sentence(capsys, tmp_path, name):
    status, reasons, _ = described(capsys, tmp_path, f"FROM {name}\n")
    assert (status, sum("NOT SUPPORTED: FROM" in reason for reason in reasons)) == (1, 1)
    assert "no such file or folder" in migrated_error(capsys, "show", name)


def test_a_line_whose_quotes_are_open_is_refused(capsys):
    assert "No closing quotation" in migrated_error(capsys, "migrate", "--", "ollama run 'x")


def test_a_modelfile_and_variables_become_settings(capsys, tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    text = "FROM ./tiny.gguf\nPARAMETER num_ctx 512\nPARAMETER temperature 0\nPARAMETER stop a\nPARAMETER stop -b\n"
    text += "PARAMETER repeat_penalty 1.1\nPARAMETER repeat_last_n 64\n"
    variables = ("HTTPS_PROXY=p", "OLLAMA_HOST=0.0.0.0:81", "OLLAMA_NUM_PARALLEL=3", "OLLAMA_KEEP_ALIVE=5m")
    status, reasons, command = described(capsys, tmp_path, text, *variables)
    proxy, *words = shlex.split(command)
    assert (status, proxy, words[:2]) == (0, "HTTPS_PROXY=p", ["tureen", "serve"])
    found = started(words[2:])
    assert (found.model_path, found.served_model_name) == (str(tmp_path / "tiny.gguf"), "mine")
    assert (found.host, found.port, found.max_running_requests, found.context_length) == ("0.0.0.0", 81, 3, 512)
    assert json.loads(found.preferred_sampling_params) == {
        "temperature": 0, "stop": ["a", "-b"], "repetition_penalty": 1.1, "repeat_last_n": 64,
    }  # fmt: skip
    assert any(reason.startswith("# OLLAMA_KEEP_ALIVE=5m is left out") for reason in reasons)


def test_the_context_of_a_modelfile_goes_before_that_of_the_environment(capsys, tmp_path):
    status, reasons, command = described(
        capsys, tmp_path, "FROM smollm2\nPARAMETER num_ctx 64\n", "OLLAMA_CONTEXT_LENGTH=9"
    )
    assert (status, "--context-length 64" in command, "--context-length 9" in command) == (0, True, False)
    assert any("OLLAMA_CONTEXT_LENGTH=9 is left out: num_ctx" in reason for reason in reasons)


def test_a_system_message_for_a_model_that_is_not_here_says_what_to_do(capsys, tmp_path):
    status, reasons, command = described(capsys, tmp_path, "FROM hf.co/org/not-here\nSYSTEM Be kind.\n")
    assert (status, "--chat-template" in command) == (1, False)
    assert any("run tureen pull org/not-here, then this command again" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("value", "listens"),
    [
        ("", ("127.0.0.1", 11434)),
        ("0.0.0.0", ("0.0.0.0", 11434)),
        (":8080", ("127.0.0.1", 8080)),
        ("http://10.0.0.1:80/x", ("10.0.0.1", 80)),
        ("[::1]:9", ("::1", 9)),
        ("::1", ("::1", 11434)),
    ],
)
def test_an_address_becomes_host_and_port(capsys, value, listens):
    _, _, command = migrated(capsys, f"OLLAMA_HOST={value}", "ollama", "serve")
    found = started(shlex.split(command)[2:])
    assert (found.host, found.port) == listens


def test_a_container_listens_where_it_is_published(capsys):
    line = "docker run -d --gpus=all -v o:/root/.ollama -e OLLAMA_CONTEXT_LENGTH=64 -p 80:11434 ollama/ollama"
    _, _, command = migrated(capsys, *line.split())
    assert command == "tureen serve --host 0.0.0.0 --context-length 64 --port 80"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("ollama pull hf.co/org/name:Q8_0", "tureen pull org/name:Q8_0"),
        ("ollama pull llama3.2", "tureen pull bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"),
        ("ollama run llama3.2:1b-instruct-q4_K_M", "tureen run bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        ("/usr/bin/ollama run smollm2:135m --verbose", "tureen run smollm2:135m"),
        ("ollama show smollm2:latest", "tureen show smollm2:135m"),
        ("ollama ls", "tureen list"),
        ("ollama ps", "tureen ps"),
        ("ollama stop smollm2", "tureen stop"),
    ],
)
def test_a_command_has_its_counterpart(capsys, line, command):
    status, _, found = migrated(capsys, *line.split())
    assert (status, found) == (0, command)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("ollama run no-such-model:7b", "no name on the hub is known"),
        ("ollama run llama3.2:90b", "no name on the hub is known"),
        ("ollama run someone/model", "Ollama's registry is not read: give hf.co/ORG/NAME"),
        ("ollama push mine", "there is no such command here; these are translated: serve, create, run"),
    ],
)
def test_what_cannot_be_carried_over_is_named(capsys, line, fault):
    status, reasons, last = migrated(capsys, *line.split())
    assert status == 1
    assert any(fault in text for text in [*reasons, last])


def test_variables_of_a_server_are_reported_for_other_commands(capsys):
    _, reasons, command = migrated(capsys, "OLLAMA_HOST=10.0.0.1", "ollama", "run", "smollm2")
    assert command == "tureen run smollm2:135m"
    assert any("# OLLAMA_HOST=10.0.0.1 is left out" in reason and "--url" in reason for reason in reasons)


def test_a_prompt_is_given_on_standard_input(capsys):
    _, reasons, _ = migrated(capsys, "ollama", "run", "smollm2", "Why is the sky blue?")
    assert any("echo 'Why is the sky blue?' | tureen run smollm2:135m" in reason for reason in reasons)


def test_a_blob_of_ollama_s_store_is_linked_first(capsys, tmp_path):
    blob = tmp_path / "sha256-0123456789abcdef"
    blob.write_bytes(b"GGUF")
    _, reasons, command = described(capsys, tmp_path, f"FROM {blob}\n")
    assert "--model-path ./456789abcdef.gguf" in command
    assert any(f"ln -s {blob} ./456789abcdef.gguf" in reason for reason in reasons)


def test_adapters_are_folders_and_have_the_model_s_name(capsys, tmp_path):
    (tmp_path / "lora").mkdir()
    status, _, command = described(capsys, tmp_path, "FROM smollm2\nADAPTER ./lora\n")
    assert (status, "--served-model-name" in command) == (0, False)
    assert f"--lora-paths mine={tmp_path}/lora" in command
    status, reasons, _ = described(capsys, tmp_path, "FROM smollm2\nADAPTER ./lora.gguf\n")
    assert status == 1
    assert any("not from GGUF files" in reason for reason in reasons)


def test_a_draft_model_is_named_as_the_model_is(capsys, tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    status, reasons, command = described(capsys, tmp_path, "FROM smollm2\nDRAFT ./small.gguf\n")
    assert status == 0
    assert f"--draft-model {tmp_path}/small.gguf" in command
    assert any("DRAFT ./small.gguf" in reason and "same vocabulary" in reason for reason in reasons)
    _, _, command = described(capsys, tmp_path, "FROM smollm2\nDRAFT hf.co/a/b\n")
    assert "--draft-model a/b" in command
    status, reasons, _ = described(capsys, tmp_path, "FROM smollm2\nDRAFT ./missing.gguf\n")
    assert status == 1
    assert any("DRAFT ./missing.gguf: no such file" in reason for reason in reasons)


def test_known_marks_are_those_of_the_built_in_templates():
    assert [mark for mark, name in MARKS.items() if name and mark not in BUILT_IN[name]] == []


def test_a_template_of_no_known_family_is_reported(capsys, tmp_path):
    status, reasons, _ = described(capsys, tmp_path, 'FROM smollm2\nTEMPLATE """### User: {{ .Prompt }}\n### Bot:"""\n')
    assert status == 1
    assert any("NOT SUPPORTED: TEMPLATE" in reason and "Jinja" in reason for reason in reasons)


def test_a_template_for_a_model_that_is_not_here_is_said_to_be_unchecked(capsys, tmp_path):
    _, reasons, _ = described(capsys, tmp_path, 'FROM hf.co/org/not-here\nTEMPLATE "[INST] {{ .Prompt }} [/INST]"\n')
    (reason,) = (reason for reason in reasons if reason.startswith("# TEMPLATE"))
    assert "probably uses [INST]" in reason
    assert "run tureen pull" in reason


@pytest.mark.model
def test_a_system_message_and_examples_begin_the_model_s_own_template(
    capsys, tmp_path, monkeypatch, default_model_source: ModelSource
):
    """What the written template makes of a chat is what the model's own makes of the chat with these messages."""
    monkeypatch.chdir(tmp_path)
    system = '\nYou are "Jack" {{ %} é 😀.\n'
    text = (
        f'FROM {default_model_source.path}\nTEMPLATE """<|im_start|>user\n{{{{ .Prompt }}}}<|im_end|>"""\n'
        f'SYSTEM """{system}"""\nMESSAGE user Hi\nMESSAGE assistant Arrr!\n'
    )
    status, reasons, command = described(capsys, tmp_path, text)
    assert status == 0
    assert any(re.match("# TEMPLATE is left out: the model's own", reason) for reason in reasons)
    assert "--chat-template ./mine.jinja" in command
    tokenizer: Tokenizer = load_tokenizer(default_model_source)
    written, own = (
        jinja2.Template(source) for source in ((tmp_path / "mine.jinja").read_text(), tokenizer.chat_template)
    )
    examples = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arrr!"}]
    chat = [{"role": "user", "content": "Who?"}]
    for sent, content in ((chat, system), ([{"role": "system", "content": "S"}, *chat], "S")):
        first = {"role": "system", "content": content}
        expected = own.render(messages=[first, *examples, *chat], add_generation_prompt=True)
        assert written.render(messages=sent, add_generation_prompt=True) == expected
    (tmp_path / "mine.jinja").write_text("another")
    assert described(capsys, tmp_path, text)[2].endswith("move it away")
