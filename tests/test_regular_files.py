"""Whatever a setting or a request names: a pipe, a socket or a device in its place is refused by name, never opened."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_models
from runner_driver import folder_source
from throwaway_ca import Authority
from tiny_adapters import write_adapter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import tureen
from tureen import build
from tureen.bench.starts import evict
from tureen.clients.keys import load_keys
from tureen.config import Config
from tureen.config_sources import load
from tureen.data_parallel.start import front_context
from tureen.errors import TureenError
from tureen.files import NotRegular, TooLarge, open_regular, read_regular, read_text, replacing
from tureen.http.tls import load_context
from tureen.lora.adapter import read_adapter
from tureen.media.files import read_below
from tureen.runner.loading import describe
from tureen.text.chat_template import check_chat_template
from tureen.weights.sentence_files import read_sentence_config
from tureen.weights.source import generation_defaults, model_config, preprocessor_config
from tureen.weights.stored import iter_stored

pytestmark = pytest.mark.timeout(120)  # a net: what is opened after all would wait for ever
KINDS = {"pipe": "a named pipe (FIFO)", "socket": "a socket", "device": "a device", "folder": "a folder"}
_watched: list[list[str]] = []


def _note(event: str, arguments: tuple) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | bytes | os.PathLike):
        _watched[-1].append(os.fsdecode(arguments[0]))


sys.addaudithook(_note)  # never taken away again; it notes nothing outside `opened`


@contextlib.contextmanager
def opened() -> Iterator[list[str]]:
    """The names that Python opens meanwhile."""
    _watched.append([])
    try:
        yield _watched[-1]
    finally:
        _watched.pop()


def put(kind: str, path: Path) -> None:
    """Something that is no file, in the place of what is there."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")  # it never ends
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_named_and_not_opened(tmp_path, kind):
    put(kind, tmp_path / "x")
    with opened() as names, pytest.raises(NotRegular) as refused:
        open_regular(tmp_path / "x")
    assert refused.value.strerror == f"it is {KINDS[kind]}, not a regular file"
    assert names == []


def test_what_becomes_a_pipe_after_the_look_neither_blocks_nor_stays_open(tmp_path, monkeypatch):
    path, real = tmp_path / "x", os.stat
    path.write_bytes(b"x")

    def stat_then_exchange(*arguments, **options):
        found = real(*arguments, **options)
        path.unlink()
        os.mkfifo(path)
        return found

    monkeypatch.setattr("tureen.files.os.stat", stat_then_exchange)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NotRegular):
        open_regular(path)
    assert os.listdir("/proc/self/fd") == before


def test_a_regular_file_is_read_also_through_a_link_unless_that_is_not_wanted(tmp_path):
    (tmp_path / "x").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("x")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"bytes"
        assert not os.get_inheritable(file.fileno())
    with pytest.raises(NotRegular, match="a symbolic link"):
        open_regular(tmp_path / "link", no_link=True)


def test_a_file_is_read_whole_up_to_a_limit(tmp_path):
    (tmp_path / "x").write_bytes(b"bytes")
    assert read_regular(tmp_path / "x", max_bytes=5) == b"bytes"
    with pytest.raises(TooLarge) as refused:
        read_regular(tmp_path / "x", max_bytes=4)
    assert refused.value.strerror == "it has more than 4 bytes"
    with pytest.raises(TooLarge):
        read_text(tmp_path / "x", max_bytes=4)


@pytest.fixture(scope="module")
def model_files(tmp_path_factory) -> Path:
    """A model's folder with every file that is read of one, each good."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_models.write(folder, "llama")
    Tokenizer(WordLevel({f"t{i}": i for i in range(256)}, "t0")).save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "preprocessor_config.json"):
        (folder / name).write_text("{}")
    (folder / "modules.json").write_text("[]")
    (folder / "sentence_bert_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages[0].content }}")
    names = dict.fromkeys(model.state_dict(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def read_all(folder: Path) -> None:
    """All that a start reads of a model."""
    source = build.find_model(Config(model_path=str(folder))).source
    config = model_config(source)
    generation_defaults(source)
    preprocessor_config(source)
    read_sentence_config(folder)
    list(iter_stored(source, config))


MODEL_FILES = [
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja", "modules.json", "sentence_bert_config.json", "model.safetensors",
    "model.safetensors.index.json",
]  # fmt: skip


def copied(folder: Path, to: Path) -> Path:
    for file in folder.rglob("*"):
        if file.is_file():
            (to / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            os.link(file, to / file.relative_to(folder))
    return to


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("name", MODEL_FILES)
def test_each_of_a_model_s_files_is_refused_where_it_is_no_file(model_files, tmp_path, name, kind):
    folder = copied(model_files, tmp_path / "model")
    read_all(folder)  # it is good before
    put(kind, folder / name)
    if name == "processor_config.json":
        (folder / "preprocessor_config.json").unlink()
    with opened() as names, pytest.raises(TureenError) as refused:
        read_all(folder)
    assert name in refused.value.message
    assert f"it is {KINDS[kind]}, not a regular file" in refused.value.message
    assert not [one for one in names if one == str(folder / name)]


def _config(path: Path) -> None:
    load({}, file=str(path), environment={})


def _template(path: Path) -> None:
    check_chat_template(str(path))


def _tokenizer(path: Path) -> None:
    build.find_model(Config(model_path=str(path.parent / "model"), tokenizer_path=str(path)))


def _keys(path: Path) -> None:
    load_keys(Config(api_key_file=str(path)))


def _gguf(path: Path) -> None:
    model_config(build.find_model(Config(model_path=str(path))).source)


def _tls(**settings: str) -> None:
    load_context(Config(**settings))


SETTINGS: dict[str, Callable[[Path], None]] = {
    "settings.toml": _config,
    "chat.jinja": _template,
    "tokenizer.json": _tokenizer,
    "keys": _keys,
    "model.gguf": _gguf,
}


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_names_no_file_is_refused(model_files, tmp_path, name, kind):
    (tmp_path / "model").symlink_to(model_files)
    put(kind, tmp_path / name)
    with opened() as names, pytest.raises(TureenError) as refused:
        SETTINGS[name](tmp_path / name)
    assert str(tmp_path / name) in refused.value.message
    assert f"{KINDS[kind]}, not a regular file" in refused.value.message
    assert str(tmp_path / name) not in names


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("setting", ["replica_tls_cert", "replica_tls_key", "replica_tls_ca"])
def test_of_tls_to_engines_elsewhere_too(tmp_path, setting, kind):
    authority = Authority(tmp_path)
    pair = authority.issue("front")
    settings = {"replica_tls_cert": pair.cert, "replica_tls_key": pair.key, "replica_tls_ca": authority.cert}
    path = tmp_path / "other"
    put(kind, path)
    assert front_context(Config(**settings)) is not None  # it is good before
    with opened() as names, pytest.raises(TureenError) as refused:
        front_context(Config(**settings | {setting: str(path)}))
    assert f"--{setting.replace('_', '-')} {path}: it is {KINDS[kind]}, not a regular file" in refused.value.message
    assert str(path) not in names


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("setting", ["tls_cert", "tls_key", "tls_ca", "tls_crl", "tls_key_password_file"])
def test_of_tls_too(tmp_path, setting, kind):
    authority = Authority(tmp_path)
    pair = authority.issue("server", for_server=True)
    settings = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": authority.cert}
    path = tmp_path / "other"
    put(kind, path)
    with opened() as names, pytest.raises(TureenError) as refused:
        _tls(**settings | {setting: str(path)})
    assert f"--{setting.replace('_', '-')} {path}: it is {KINDS[kind]}, not a regular file" in refused.value.message
    assert str(path) not in names


@pytest.mark.parametrize("place", ["server", "front of engines elsewhere"])
def test_tls_takes_the_very_bytes_that_were_checked(tmp_path, monkeypatch, place):
    authority = Authority(tmp_path)
    pair = authority.issue("server", for_server=True)
    crl = authority.revoke()
    real = os.fstat
    paths = {"cert": pair.cert, "key": pair.key, "ca": authority.cert}

    def fstat_then_exchange(descriptor):
        """Whoever reads the file again by its name waits for ever."""
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name in (pair.cert, pair.key, authority.cert, crl):
            put("pipe", Path(name))
        return real(descriptor)

    monkeypatch.setattr("tureen.files.os.fstat", fstat_then_exchange)
    if place == "server":
        settings = {f"tls_{name}": path for name, path in paths.items()}
        context = load_context(Config(**settings, tls_crl=crl, tls_client_auth="required"))
    else:
        context = front_context(Config(**{f"replica_tls_{name}": path for name, path in paths.items()}))
    assert stat.S_ISFIFO(os.stat(pair.cert).st_mode)
    assert context is not None
    assert context.cert_store_stats() == {"x509": 1, "crl": int(place == "server"), "x509_ca": 1}


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_s_file_too(model_files, tmp_path, name, kind):
    folder = tmp_path / "adapter"
    config = describe(model_config(folder_source(model_files)))
    write_adapter(tiny_models.write(tmp_path / "model", "llama"), folder)
    read_adapter(str(folder), config)
    put(kind, folder / name)
    with opened() as names, pytest.raises(TureenError) as refused:
        read_adapter(str(folder), config)
    assert name in refused.value.message
    assert f"it is {KINDS[kind]}, not a regular file" in refused.value.message
    assert str(folder / name) not in names


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_a_picture_that_is_no_file_is_not_there(tmp_path, kind):
    put(kind, tmp_path / "x.png")
    with opened() as names:
        assert read_below(tmp_path, "x.png") is None
    assert "x.png" not in names


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_the_benchmark_of_starts_passes_over_what_is_no_file(tmp_path, kind):
    put(kind, tmp_path / "x")
    with opened() as names:
        evict(tmp_path / "x")
    assert names == []


OWN = {
    "tureen/__main__.py": "the null device",
    "tureen/cli/lines.py": "a file that is written, looked at before",
    "tureen/files.py": "the function itself",
    "tureen/registry.py": "the package's own sources",
    "tureen/grammar/schema/meta_schemas.py": "the package's own meta-schemas",
    "tureen/fields/known_options.py": "the package's own table",
    "tureen/app/page.py": "the package's own pages",
    "tureen/fields/rules.py": "the package's own tables",
    "tureen/cli/peer_tables.py": "the package's own tables",
    "tureen/recipes/shapes_vlm.py": "the package's own projector",
    "tureen/batches/contents.py": "files that it makes, in a folder of its own",
    "tureen/devices/cpu.py": "/proc and /sys",
    "tureen/devices/cgroups.py": "/proc and /sys",
    "tureen/grammar_service/kept_grammars.py": "the package's own sources, and files that it makes",
    "tureen/sandbox/fork_server.py": "no file",
    "tureen/temporary_folder.py": "folders alone, no links",
    "tureen/sandbox/limits.py": "/proc, /dev/null, and what it must not be able to open",
    "tureen/sandbox/expendable.py": "/proc, /dev/null",
    "tureen/sandbox/supervisor.py": "/proc, memory of its own",
    "tureen/sandbox/worker.py": "/proc",
    "tureen/serving/healing.py": "no file",
    "tureen/serving/process.py": "/proc",
    "tureen/media/video.py": "bytes",
    "tureen/media/decode.py": "bytes",
    "tureen/media/files.py": "folders",
    "tureen/storage/database.py": "a file that it makes",
    "tureen/weights/mapped.py": "a duplicate of what was opened",
    "tureen/weights/safetensors.py": "a file that it makes",
    "tureen/fetching/shelf.py": "the package's own table",
    "tureen/fetching/download.py": "files that it makes",
    "tureen/fetching/hub.py": "files that it makes",
    "tureen/transformers_classes.py": "sources of an installed package",
    "tureen/fetching/locks.py": "a lock that it makes",
    "tureen/fetching/pypi.py": "files that it has just made",
    "tureen/runner/trace.py": "folders, and a file that it makes",
    "tureen/runner/torch_trace.py": "a file that it has just made",
    "tureen/runner/transformers_forward.py": "a library, in a folder that was looked through before",
    "tureen/http/certificates.py": "memory of its own",
    "tureen/offline.py": "no file",
    "tureen/engine/rows.py": "no file",
    "tureen/engine/scheduler.py": "no file",
    "tureen/engine/restoring.py": "no file",
    "tureen/api_workers/joining.py": "no file",
    "tureen/data_parallel/remote.py": "no file",
    "tureen/server.py": "no file",
    "tureen/serving/child.py": "no file",
    "tureen/serving/coalescing.py": "/proc",
    "tureen/app/playground.py": "the package's own pages",
    "tureen/kv_offload/identity.py": "the package's own sources",
    "tureen/kv_offload/page_files.py": "files that it makes, in a folder of its own",
    "tureen/admin/session_routes.py": "no file",
    "tureen/admin/weight_updates.py": "files that it makes, in a folder of its own",
    "tureen/runner/received.py": "files that it makes, in a folder of its own",
    "tureen/runner/weight_group_child.py": "the same files",
}
"""Who calls something else that opens, and what it is that cannot be named from outside."""
OPENERS = {
    "open", "read_bytes", "read_text", "fromfile", "memmap", "from_file", "from_pretrained", "load_file", "safe_open",
    "load_cert_chain", "load_verify_locations",
}  # fmt: skip


def openers(source: str) -> list[int]:
    """Lines that call something that opens a file by its name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            own = isinstance(node.func, ast.Name) and name == "read_text"  # of tureen.files
            if name in OPENERS and not own:
                found.append(node.lineno)
    return found


def test_nothing_but_that_one_function_opens_a_file_that_is_named_from_outside():
    root = Path(tureen.__file__).parent
    used = set()
    for path in sorted(root.rglob("*.py")):
        name = f"tureen/{path.relative_to(root).as_posix()}"
        lines = openers(path.read_text())
        if not lines or name.startswith("tureen/bench/"):  # its measuring reads /proc and /sys
            continue
        used.add(name)
        assert name in OWN, (name, lines)
    assert used == OWN.keys(), "the table names what opens nothing"


def test_a_file_that_is_replaced_is_the_earlier_one_or_all_of_the_new(tmp_path):
    path = tmp_path / "kept"
    with replacing(path) as file:
        file.write(b"first")
    with contextlib.suppress(TypeError), replacing(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_bytes() == b"first"
        file.write(None)
    assert path.read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["kept"]


def test_a_call_that_opens_is_seen():
    assert openers("x = p.read_bytes()\nopen('x')\nread_text('y')") == [1, 2]
