"""Translates Ollama's commands, its variables and its Modelfiles, by the table `peers/ollama.toml`.

A SYSTEM instruction and MESSAGE instructions become a copy of the model's own chat template that begins with them.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tureen.cli.modelfile import Instruction, read_modelfile
from tureen.cli.peer_tables import Peer
from tureen.cli.translation import Given, Note, OwnFlag, Translation, is_flag, translate_settings
from tureen.config import Config
from tureen.errors import InvalidRequest, StartupError

HUBS: Final = ("hf.co/", "huggingface.co/")
SAME_NAMED: Final = ("run", "pull", "show", "rm", "list", "ls", "ps", "stop")
"""Commands of Ollama that this program has too, serve and create aside."""
MARKS: Final = {
    "<|im_start|>": "chatml",
    "<|start_header_id|>": "",
    "<<SYS>>": "llama-2",
    "[INST]": "",
    "<start_of_turn>": "",
    "<|turn>": "",
    "<|start_of_role|>": "",
    "<|START_OF_TURN_TOKEN|>": "",
    "<｜User｜>": "",
    "<|assistant|>": "",
    "<|start|>": "",
    "ASSISTANT:": "vicuna_v1.1",
}
"""Marks that templates of known families write -> the built-in template that writes the mark too, "" = none."""
PREAMBLE: Final = """{{%- if messages and messages[0]['role'] == 'system' -%}}
{{%- set messages = messages[:1] + {examples} + messages[1:] -%}}
{{%- else -%}}
{{%- set messages = {system} + {examples} + messages -%}}
{{%- endif -%}}
"""
"""Adds a system message, unless a chat has one, and example messages after it."""


class Migrated(NamedTuple):
    """A command of Ollama in this program's words. `templates`: file name -> the text to write into it."""

    words: list[str]
    result: Translation
    templates: dict[str, str]


class _Chat(NamedTuple):
    """The instructions of a Modelfile about the prompt."""

    template: str
    system: str
    examples: list[dict[str, str]]


def migrate_ollama(
    words: Sequence[str], variables: Sequence[str], own: Mapping[str, OwnFlag], peer: Peer, config: Config
) -> Migrated:
    """Translates the words after `ollama`, and the OLLAMA_ variables before it. Raises InvalidRequest."""
    command, arguments = (words[0], list(words[1:])) if words else ("serve", [])
    if command in SAME_NAMED:
        return _same_named("list" if command == "ls" else command, arguments, variables, peer, config)
    if command not in ("serve", "create"):
        known = ", ".join(("serve", "create", *SAME_NAMED))
        raise InvalidRequest(f"ollama {command}: there is no such command here; these are translated: {known}")
    file, arguments = _file_of(arguments)
    positional, settings = _split(arguments, peer)
    settings += _of_variables(variables)
    if command == "serve":
        result = translate_settings(settings, own, peer)
        note = Note(
            "told", "serve", (), "it names no model; add --model NAME for each model, or the default model is served"
        )
        return Migrated(["serve"], _with_address(result, variables, peer, [note]), {})
    name = (positional[0] if positional else "model").removesuffix(":latest")
    return _created(name, file, settings, variables, own, peer, config)


def _same_named(command: str, arguments: list[str], variables: Sequence[str], peer: Peer, config: Config) -> Migrated:
    """Translates a command that has the same name here."""
    positional, settings = _split(arguments, peer)
    result = translate_settings(settings, {}, peer)
    notes, faults, ours = list(result.notes), list(result.faults), list(positional)
    about_servers = [variable for variable in variables if variable.startswith("OLLAMA_")]
    why = "it is about a server: tureen chat --url URL talks to one that runs"
    notes += [Note("told", variable, (), why) for variable in about_servers]
    if positional and command == "stop":
        why = "the command ends a server: if several run, give the port that tureen ps shows"
        notes.append(Note("told", positional[0], (), why))
        ours = []
    elif positional:
        model, note, fault = _model_of(positional[0], Path(), config)
        ours = [model]
        notes += note
        faults += fault
    if len(positional) > 1 and command == "run":
        why = (
            f"give it on standard input: echo {shlex.quote(' '.join(positional[1:]))} | tureen run {shlex.quote(model)}"
        )
        notes.append(Note("told", "the prompt", (), why))
    return Migrated([command], Translation(ours, notes, faults), {})


def _created(
    name: str,
    file: str,
    settings: list[Given],
    variables: Sequence[str],
    own: Mapping[str, OwnFlag],
    peer: Peer,
    config: Config,
) -> Migrated:
    """Translates `ollama create`: a server of the model that the Modelfile describes. Raises InvalidRequest."""
    path = Path(file)
    instructions = read_modelfile(path)
    has_adapter = any(each.name == "ADAPTER" for each in instructions)
    arguments, notes, faults, model = _models(instructions, path.parent, config)
    if not has_adapter:  # else the adapter has the name
        arguments += ["--served-model-name", name]
    if any(each.key == "num_ctx" for each in instructions):
        why = "num_ctx of the Modelfile goes before it"
        notes += [Note("told", each.line, (), why) for each in settings if each.name == "OLLAMA_CONTEXT_LENGTH"]
        settings = [each for each in settings if each.name != "OLLAMA_CONTEXT_LENGTH"]
    settings = [*_settings_of(instructions, name, path.parent), *settings]
    result = _with_address(translate_settings(settings, own, peer), variables, peer, [])
    faults += [f"ADAPTER {each.value}: adapters are read from folders of peft, not from GGUF files"
               for each in instructions if each.name == "ADAPTER" and Path(each.value).suffix]  # fmt: skip
    chat = _chat_of(instructions)
    templates: dict[str, str] = {}
    if chat != _Chat("", "", []):
        own_template = _own_template(model, config) if model else None
        built_in = _judge_template(chat.template, own_template, notes, faults)
        if chat.system or chat.examples:
            base = _built_in(built_in) if built_in else own_template
            if base is None:
                faults.append(
                    "SYSTEM, MESSAGE: they become a copy of the model's own chat template, and none is on this disk: "
                    f"run tureen pull {shlex.quote(model)}, then this command again"
                )
            else:
                file_name = f"{name.replace('/', '-').replace(':', '-')}.jinja"
                templates[file_name] = _preamble(chat) + base
                arguments += ["--chat-template", f"./{file_name}"]
                parts = " and ".join(["SYSTEM"] * bool(chat.system) + ["MESSAGE"] * bool(chat.examples))
                why = "written now: the model's own template, which begins with them"
                notes.append(Note("becomes", parts, ("--chat-template", f"./{file_name}"), why))
        elif built_in:
            arguments += ["--chat-template", built_in]
    every = Translation([*arguments, *result.arguments], [*notes, *result.notes], [*faults, *result.faults])
    return Migrated(["serve"], every, templates)


def _models(
    instructions: Sequence[Instruction], folder: Path, config: Config
) -> tuple[list[str], list[Note], list[str], str]:
    """Returns the flags, notes and faults of the FROM and DRAFT instructions, and the model's name."""
    arguments: list[str] = []
    notes: list[Note] = []
    faults: list[str] = []
    model = ""
    for value in (each.value for each in instructions if each.name == "FROM"):
        named, note, fault = _model_of(value, folder, config, "FROM ")
        is_projector = "mmproj" in Path(value).name
        notes += note
        faults += fault
        if model and not is_projector:
            faults.append(f"FROM {value}: a second model; name the one that is served")
        elif named and not fault:
            arguments += ["--mmproj" if is_projector else "--model-path", named]
            model = model if is_projector else named
    for value in (each.value for each in instructions if each.name == "DRAFT"):
        named, note, fault = _model_of(value, folder, config, "DRAFT ")
        notes += note
        faults += fault
        if not fault:
            arguments += ["--draft-model", named]
            why = "it needs the native CPU kernels and the same vocabulary"
            notes.append(Note("becomes", f"DRAFT {value}", ("--draft-model", named), why))
    return arguments, notes, faults, model


def _model_of(value: str, folder: Path, config: Config, verb: str = "") -> tuple[str, list[Note], list[str]]:
    """Returns what a model of Ollama's is called here, with a note about it, or with a fault."""
    names = importlib.import_module("tureen.fetching.names")
    value = value.removesuffix(":latest")
    path = folder / os.path.expanduser(value)
    theirs = f"{verb}{value}"
    if names.exists(path):
        if path.is_file() and path.suffix != ".gguf":
            link = f"./{path.name[-12:]}.gguf"
            command = shlex.join(["ln", "-s", str(path.resolve()), link])
            why = f"its name must end with .gguf: run first {command}"
            return link, [Note("becomes", theirs, (link,), why)], []
        return str(path), [], []
    hub = next((value.removeprefix(prefix) for prefix in HUBS if value.startswith(prefix)), None)
    if hub is not None:
        return hub, [Note("becomes", theirs, (hub,), "of the Hugging Face hub")], []
    if "/" in value or value.startswith("."):
        return value, [], [f"{theirs}: no such file, and Ollama's registry is not read: give hf.co/ORG/NAME"]
    known = names.on_shelf(value) or names.of_ollama(value)
    if known is None:
        return value, [], [f"{theirs}: no name on the hub is known for it: give hf.co/ORG/NAME:Q4_K_M"]
    if known == value:
        return known, [], []
    return known, [Note("becomes", theirs, (known,), "tureen show says whether it fits")], []


def _settings_of(instructions: Sequence[Instruction], name: str, folder: Path) -> list[Given]:
    """Returns the instructions that the table knows, stop strings as one list."""
    settings = []
    stops = [each.value for each in instructions if each.name == "PARAMETER" and each.key == "stop"]
    for each in instructions:
        if each.name == "PARAMETER" and each.key != "stop":
            settings.append(Given(each.key, f"PARAMETER {each.key}", each.value, line=each.line))
        elif each.name == "ADAPTER":
            settings.append(Given("ADAPTER", "ADAPTER", f"{name}={folder / each.value}", line=each.line))
        elif each.name in ("LICENSE", "REQUIRES", "RENDERER", "PARSER"):
            settings.append(Given(each.name, each.name, each.value, line=each.line))
    if stops:
        settings.append(Given("stop", "PARAMETER stop", json.dumps(stops), line=f"PARAMETER stop {' '.join(stops)}"))
    return settings


def _chat_of(instructions: Sequence[Instruction]) -> _Chat:
    last = {each.name: each.value for each in instructions}
    examples = [{"role": each.key, "content": each.value} for each in instructions if each.name == "MESSAGE"]
    return _Chat(last.get("TEMPLATE", ""), last.get("SYSTEM", ""), examples)


def _judge_template(template: str, own_template: str | None, notes: list[Note], faults: list[str]) -> str:
    """Notes what becomes of a TEMPLATE. Returns the built-in template that takes its place, "" = the model's own."""
    if not template:
        return ""
    mark = next((mark for mark in MARKS if mark in template), None)
    if mark is not None and (own_template is None or mark in own_template):
        why = f"the model's own chat template also uses {mark}; other text of TEMPLATE is not carried over"
        if own_template is None:
            why = (
                f"the model's own chat template probably uses {mark} too; to check this, run tureen pull, then this "
                "command again"
            )
        notes.append(Note("told", "TEMPLATE", (), why))
        return ""
    if mark is not None and MARKS[mark]:
        notes.append(Note("becomes", "TEMPLATE", ("--chat-template", MARKS[mark]), f"it writes {mark}"))
        return MARKS[mark]
    faults.append(
        "TEMPLATE: it is a Go template of no known model family; write it in Jinja, and give "
        "--chat-template FILE (docs/chat.md)"
    )
    return ""


def _own_template(model: str, config: Config) -> str | None:
    """Returns a model's own chat template; None if the model is not here or has none."""
    names, pull, source = (
        importlib.import_module(f"tureen.{name}") for name in ("fetching.names", "fetching.pull", "weights.source")
    )
    try:
        path = pull.find_here(names.parse(model), config)
        tokenizer = None if path is None else source.load_tokenizer(source.open_model(path, config))
    except StartupError:
        return None
    template: str | None = None if tokenizer is None else tokenizer.chat_template
    return template


def _built_in(name: str) -> str:
    return str(importlib.import_module("tureen.text.chat_template").BUILT_IN[name])


def _preamble(chat: _Chat) -> str:
    system = [{"role": "system", "content": chat.system}] if chat.system else []
    literals = {"system": system, "examples": chat.examples}
    return PREAMBLE.format(**{name: json.dumps(value, ensure_ascii=False) for name, value in literals.items()})


def _file_of(arguments: list[str]) -> tuple[str, list[str]]:
    """Returns the Modelfile that -f or --file names, and the other arguments."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in ("-f", "--file"):
            rest = arguments[place + 1 :]
            file, rest = (value, rest) if equals else (rest[0] if rest else "", rest[1:])
            return file, [*arguments[:place], *rest]
    return "Modelfile", arguments


def _split(arguments: Sequence[str], peer: Peer) -> tuple[list[str], list[Given]]:
    """Returns the positional arguments, and the flags with their values."""
    positional, settings, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            positional.append(word)
            continue
        name, equals, inline = word.partition("=")
        verdict = peer.find(name)
        takes_next = verdict is not None and verdict.takes == "one" and not equals and rest
        value = rest.pop(0) if takes_next else inline if equals else None
        settings.append(Given(name, name, value, line=word if value is None or equals else f"{word} {value}"))
    return positional, settings


def _of_variables(variables: Sequence[str]) -> list[Given]:
    """Returns Ollama's variables; the address without its port."""
    settings = []
    for name, _, value in (variable.partition("=") for variable in variables):
        if name.startswith("OLLAMA_"):
            own_value = _address(value)[0] if name == "OLLAMA_HOST" else value
            settings.append(Given(name, name, own_value, line=f"{name}={value}"))
    return settings


def _address(value: str) -> tuple[str, str]:
    """Returns host and port of OLLAMA_HOST: HOST, HOST:PORT, :PORT or a URL; "" for a part that is missing."""
    text = value.rpartition("://")[2].partition("/")[0]
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    host, _, port = text.partition(":") if text.count(":") == 1 else (text, "", "")
    return host or "127.0.0.1", port


def _with_address(result: Translation, variables: Sequence[str], peer: Peer, notes: list[Note]) -> Translation:
    """Adds the port, that of OLLAMA_HOST or Ollama's default."""
    hosts = [value for name, _, value in (each.partition("=") for each in variables) if name == "OLLAMA_HOST"]
    default = peer.written.defaults["--port"]
    port = _address(hosts[-1])[1] if hosts else ""
    note = Note("becomes", f"port {port}" if port else "", ("--port", port or default.value),
                "of OLLAMA_HOST" if port else default.why)  # fmt: skip
    return Translation(
        [*result.arguments, "--port", port or default.value], [*notes, *result.notes, note], result.faults
    )
