"""Files that are loaded while a server runs are read by a process that may be lost, before an engine reads them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import sys

import inline_dry_run
import msgspec
import pytest
import tiny_idefics3
import tiny_llava
import tiny_models
import torch
import transformers
from byte_tokenizer import VOCAB_SIZE
from converted_vision import MMPROJ, write_pair
from real_app import SETTINGS, RealApp, write_model
from safetensors.torch import save_file
from sentence_folders import SEP, write_appending_tokenizer, write_modules, write_pair_tokenizer
from tiny_adapters import write_adapter
from virtual_clock import Clock, VirtualLoop, running

from tureen import build, extras
from tureen.config import Config
from tureen.errors import InvalidRequest, StartupError, Unavailable
from tureen.log import no_progress
from tureen.multi_model import start as fleet_start
from tureen.multi_model.member import Member
from tureen.runner import dry_run_child
from tureen.sandbox import child_process
from tureen.sandbox.expendable import BEGUN, OUT_OF_MEMORY
from tureen.serving import dry_run
from tureen.weights.mapped import MappedFile

FAULT = "was ended by SIGSEGV"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_adapter(write_model(root / "model", 1), root / "adapter")
    return root


@pytest.fixture(scope="module")
def server(files):
    with RealApp(files / "model") as app:
        yield app


@pytest.fixture
def orders(monkeypatch):
    """The orders of dry runs, each of which finds a fault."""
    found = []

    async def fail(order):
        found.append(order)
        return FAULT

    monkeypatch.setattr(dry_run, "read_in_child", fail)
    return found


@pytest.fixture
def asked(server, monkeypatch):
    """Operations that the engine is asked for."""
    ops, call = [], server.client.call

    async def note(op, **args):
        ops.append(op)
        return await call(op, **args)

    monkeypatch.setattr(server.client, "call", note)
    return ops


@pytest.mark.parametrize(
    ("path", "field", "code", "name"),
    [
        ("/load_lora_adapter", "lora_path", "invalid_adapter", "adapter"),
        ("/update_weights_from_disk", "model_path", "invalid_model_path", "model"),
    ],
)
def test_the_engine_never_reads_what_its_reader_does_not_survive(server, files, orders, asked, path, field, code, name):
    more = {"lora_name": "a"} if name == "adapter" else {}
    answer = server.post(path, **{field: str(files / name)}, **more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, code), answer.text
    assert FAULT in error["message"]
    assert [order["path"] for order in orders] == [str(files / name)]
    assert asked == []
    assert server.generate(text="Hello", sampling_params={"max_new_tokens": 2})["text"]


def test_an_adapter_is_read_for_the_model_that_is_served_whichever_that_is(
    server, files, orders, monkeypatch, tmp_path
):
    context = server.state.context
    config = msgspec.structs.replace(context.config, revision="first")
    monkeypatch.setattr(server.state, "context", msgspec.structs.replace(context, config=config))
    shutil.copytree(files / "model", tmp_path / "other")
    server.post("/load_lora_adapter", lora_name="a", lora_path=str(files / "adapter"))
    settings = orders.pop()["config"]
    assert (settings["model_path"], settings["revision"]) == (str(files / "model"), "first")
    server.state.serve_weights(path=str(tmp_path / "other"))
    server.post("/load_lora_adapter", lora_name="a", lora_path=str(files / "adapter"))
    settings = orders.pop()["config"]
    assert (settings["model_path"], settings["revision"]) == (str(tmp_path / "other"), None)


def test_a_reader_gets_every_setting_but_no_secret(orders):
    config = Config(api_key="k", admin_api_key="a", mmproj="m.gguf", language_model_only=True, tokenizer_path="t")
    with pytest.raises(InvalidRequest, match=FAULT):
        asyncio.run(dry_run.dry_run("load_model", {"path": "p", "load_format": "dummy"}, config))
    expected = msgspec.structs.replace(config, api_key=None, admin_api_key=None, load_format="dummy")
    assert msgspec.convert(json.loads(json.dumps(orders[0]["config"])), Config) == expected


@pytest.mark.parametrize("op", ["unload_adapter", "pause", "release_memory"])
def test_what_reads_no_files_needs_no_dry_run(orders, op):
    asyncio.run(dry_run.dry_run(op, {}, Config()))
    assert orders == []


@pytest.mark.parametrize("is_serving", [False, True])
def test_the_model_of_a_running_server_of_several_is_tried_first_and_the_first_one_is_not(files, orders, is_serving):
    """A first model that freezes its reader holds nothing up; a signal ends the start."""
    launcher = fleet_start.Launcher(Config(), no_progress)
    launcher.app = object() if is_serving else None
    member = Member(Config(model_path=str(files / "model")), "m")
    found = launcher._find(member)
    if is_serving:
        with pytest.raises(StartupError, match=FAULT):
            asyncio.run(found)
    else:
        assert asyncio.run(found).source.path == files / "model"
    assert len(orders) == is_serving


def test_files_that_were_tried_are_tried_again_with_other_adapters(files, monkeypatch):
    tried = []

    async def note(order):
        tried.append(list(order["config"]["lora_paths"]))
        return ""

    monkeypatch.setattr(dry_run, "read_in_child", note)
    launcher = fleet_start.Launcher(Config(), no_progress)
    launcher.app = object()
    for paths in ((), (), ("a=/there",)):
        config = Config(model_path=str(files / "model"), lora_paths=paths)
        asyncio.run(launcher._find(Member(config, "m")))
    assert tried == [[], ["a=/there"]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"chat_template": "no-such-template"}, "there is no such template"), ({"device": "cuda"}, "--device cuda needs")],
)
def test_wrong_settings_of_a_later_model_are_told_before_anything_is_fetched_or_read(
    files, orders, monkeypatch, wrong, message
):
    monkeypatch.setattr(build, "pull", None)
    monkeypatch.setattr(extras, "is_installed", lambda _: False)
    launcher = fleet_start.Launcher(Config(), no_progress)
    launcher.app = object()
    with pytest.raises(StartupError, match=message):
        asyncio.run(launcher._find(Member(Config(model_path=str(files / "model"), **wrong), "m")))
    assert orders == []


# ---- what is read


def _text(folder):
    write_adapter(write_model(folder / "model", 1), folder / "adapter")
    shutil.copytree(folder / "model", folder / "elsewhere")
    (folder / "model/tokenizer.json").unlink()
    return {"lora_paths": (f"a={folder / 'adapter'}",), "tokenizer_path": str(folder / "elsewhere")}


def _safetensors_that_see(folder):
    tiny_llava.write(folder / "model", "llava-clip")
    tiny_llava.write_tokenizer(folder / "model")
    return {}


def _pair(folder):
    oracle = tiny_idefics3.write(folder / "hf", "smolvlm")
    preprocessor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | tiny_idefics3.PREPROCESSORS["smolvlm"]
    tokens = {"<image>": tiny_idefics3.IMAGE, "<fake_token_around_image>": 251}
    write_pair(folder / "model", oracle, preprocessor, tokens)
    (folder / "model" / MMPROJ).rename(folder / "eye.gguf")
    return {"mmproj": str(folder / "eye.gguf")}


def _encoder(folder):
    config = transformers.BertConfig(vocab_size=SEP + 1, **ENCODER)
    tiny_models.saved(folder / "model", "BertModel", config, 1)
    write_pair_tokenizer(folder / "model")
    pooling = {"pooling_mode_mean_tokens": True}
    write_modules(folder / "model", "Transformer", "Pooling", "Dense", "Normalize", pooling=pooling)
    _write_dense(folder / "model/2_Dense", ENCODER["hidden_size"])
    return {"max_total_tokens": None}


def _decoder_for_embeddings(folder):
    config = transformers.Qwen3Config(vocab_size=VOCAB_SIZE, head_dim=16, **ENCODER)
    tiny_models.saved(folder / "model", "Qwen3Model", config, 1)
    write_appending_tokenizer(folder / "model")
    pooling = {"pooling_mode_lasttoken": True}
    write_modules(folder / "model", "Transformer", "Pooling", "Dense", "Normalize", pooling=pooling)
    _write_dense(folder / "model/2_Dense", ENCODER["hidden_size"])
    return {}


def _write_dense(folder, size):
    folder.mkdir()
    save_file({"linear.weight": torch.ones(8, size), "linear.bias": torch.ones(8)}, folder / "model.safetensors")
    settings = {"in_features": size, "out_features": 8, "bias": True}
    activation = "torch.nn.modules.linear.Identity"
    (folder / "config.json").write_text(json.dumps(settings | {"activation_function": activation}))


ENCODER = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
OPENED: list[str] = []


def _note_opened(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        OPENED.append(os.fspath(arguments[0]))


sys.addaudithook(_note_opened)


@pytest.fixture
def touched(monkeypatch, tmp_path):
    """Does something; returns the files below the test's folder that it opens, and the tensors that it looks at."""
    tensors, raw = [], MappedFile.raw

    def note(file, tensor):
        tensors.append((str(file.path), tensor.name))
        return raw(file, tensor)

    monkeypatch.setattr(MappedFile, "raw", note)

    def during(do):
        tensors.clear()
        OPENED.clear()
        do()
        return {path for path in OPENED if path.startswith(str(tmp_path))} | set(tensors)

    return during


@pytest.mark.parametrize("write", [_text, _safetensors_that_see, _pair, _encoder, _decoder_for_embeddings])
def test_a_dry_run_reads_all_that_an_engine_reads_at_its_start(tmp_path, touched, write):
    config = Config(**SETTINGS | {"model_path": str(tmp_path / "model")} | write(tmp_path))
    order = {"op": "load_model", "path": config.model_path, "config": msgspec.to_builtins(config)}

    def start() -> None:
        model = build.find_model(config)
        build.media_loader(config, model)
        build.make_engine(config, model=model)

    started = touched(start)
    tried = touched(lambda: dry_run_child.read(order))
    assert len(started) > 10
    assert not started - tried


def test_a_fault_of_one_file_keeps_no_other_from_being_read(tmp_path, touched):
    """The engine may read them in another order."""
    _safetensors_that_see(tmp_path)
    order = {"op": "load_model", "path": str(tmp_path / "model"), "config": msgspec.to_builtins(Config())}
    expected = touched(lambda: dry_run_child.read(order))
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (tmp_path / "model" / name).write_text("[")
    found = touched(lambda: dry_run_child.read(order))
    assert {one for one in expected if isinstance(one, tuple) and "language_model" in one[1]} <= found


def test_memory_that_is_short_is_no_fault_that_is_left_to_the_engine(files, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(dry_run_child, "load_tokenizer", fail)
    order = {"op": "load_model", "path": str(files / "model"), "config": msgspec.to_builtins(Config())}
    with pytest.raises(MemoryError):
        dry_run_child.read(order)


# ---- the process


class Child:
    """In place of a process, which prints something, and ends with a status. None: only when it is killed."""

    pid = 0

    def __init__(self, said: bytes, returncode: int | None, *, is_frozen: bool = False) -> None:
        self.returncode = returncode
        self.stdin = io.BytesIO()
        output, written = os.pipe()
        self.stdout = os.fdopen(output, "rb")
        os.write(written, said)
        self.output = os.fdopen(written, "wb")
        if not is_frozen:
            self.output.close()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9 if self.returncode is None else self.returncode

    def wait(self, timeout: float) -> int:
        assert self.returncode is not None
        return self.returncode


@pytest.fixture
def started(monkeypatch):
    """The children that were started: each is the next of `children`."""
    found: list[Child] = []

    def start(children):
        waiting = iter(children)

        def start_one(*_, **__):
            found.append(next(waiting))
            return found[-1]

        monkeypatch.setattr(child_process, "start", start_one)
        monkeypatch.setattr(dry_run, "_turn", asyncio.Lock())
        return found

    return start


def read(path="a"):
    return inline_dry_run.read_in_child({"path": path})


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (0, ""),
        (1, "ended its process with status 1"),
        (OUT_OF_MEMORY, "needs more than half of the free memory"),
        (-11, "was ended by SIGSEGV"),
        (-9, "was ended by SIGKILL, which the system sends if memory is short"),
        (-40, "was ended by signal 40"),
    ],
)
def test_the_status_of_the_process_says_whether_the_files_can_be_read(started, status, fault):
    started([Child(b"a warning\n" + BEGUN, status)])
    assert asyncio.run(read()) == fault


@pytest.mark.parametrize("status", [1, -11, 0])
def test_a_program_that_does_not_begin_blames_no_files_and_its_last_words_are_logged(started, status, caplog):
    """A Python that does not find a module, for example."""
    [child] = children = [Child(b"x" * 9000 + b"\nModuleNotFoundError: No module named 'numpy'", status)]
    started(children)
    with pytest.raises(Unavailable, match="cannot run here"):
        asyncio.run(read())
    assert caplog.text.endswith("No module named 'numpy'\n")
    assert len(caplog.text) < 5000
    assert child.stdout.closed


def test_one_child_runs_at_a_time_and_who_waits_too_long_is_told(started, monkeypatch):
    monkeypatch.setattr(dry_run, "MAX_WAIT_S", dry_run.PATIENCE.idle_s / 2)
    children = [Child(BEGUN, None), Child(BEGUN, 0)]
    found = started(children)
    clock = Clock()

    async def scenario():
        frozen, second = asyncio.create_task(read()), asyncio.create_task(read())
        with pytest.raises(Unavailable, match="files of one request at a time") as told:
            await second
        assert told.value.retry_after_s
        third = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert found == children[:1]
        children[0].returncode = 0
        assert [await frozen, await third] == ["", ""]
        assert found == children

    with running(clock), asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        runner.run(scenario())


def test_a_program_that_never_begins_is_ended_and_blames_no_files(started, caplog):
    child = Child(b"importing", None, is_frozen=True)
    started([child])
    clock = Clock()
    with (
        child.output,
        running(clock),
        asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner,
        pytest.raises(Unavailable, match="cannot run here"),
    ):
        runner.run(read())
    assert child.stdout.closed
    assert child.returncode == -9
    assert "it did not end its imports within" in caplog.text


def test_without_a_process_nothing_is_loaded(monkeypatch):
    def start(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(child_process, "start", start)
    with pytest.raises(Unavailable, match="starts no process"):
        asyncio.run(read())
