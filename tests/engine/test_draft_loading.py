"""A server counts the memory of its draft model, loads both models, and closes the engine if a load fails."""

from __future__ import annotations

import logging

import msgspec
import pytest
from real_app import SETTINGS, write_model
from runner_driver import folder_source
from tiny_models import write
from world import make_request

from tureen import build
from tureen.config import Config
from tureen.engine.engine import Engine
from tureen.errors import StartupError
from tureen.runner import draft
from tureen.runner.draft import draft_config
from tureen.runner.kv_pool import NO_DRAFT, DraftNeed
from tureen.runner.load import load_runner

SMALL = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "model", 3)
    write_model(folder / "small", 3, **SMALL)
    return folder


def config_of(folders, **settings):
    paths = {"model_path": str(folders / "model"), "draft_model": str(folders / "small")}
    return Config(**(SETTINGS | paths | settings))


def tokens_of(engine):
    engine.add(make_request("r", tuple(b"Once there was"), max_new_tokens=40, temperature=1.0, ignore_eos=True))
    tokens = []
    while engine.has_work:
        for delta in engine.step():
            tokens += delta.token_ids
    return tokens


def test_a_server_with_a_draft_model_gives_the_tokens_of_one_without(folders, caplog):
    config = config_of(folders)
    with caplog.at_level(logging.INFO, logger="tureen"):
        drafting, info = build.make_engine(config)
    plain, plain_info = build.make_engine(msgspec.structs.replace(config, draft_model=None))
    model = drafting.rows.guesser.draft_model
    model._clock = lambda: 0.0
    assert tokens_of(drafting) == tokens_of(plain)
    assert model._written
    assert info.kv_bytes_per_token == plain_info.kv_bytes_per_token > 0
    assert "includes the draft model small" in caplog.text
    assert model._runner._parts._factory._pool is drafting.rows._runner.pool
    for engine in (drafting, plain):
        engine.close()


def test_the_memory_that_is_planned_for_a_draft_model_is_what_it_takes(folders):
    source, config = folder_source(folders / "small"), draft_config(config_of(folders))
    need = draft.need_of(source, config)
    assert need.kv_per_token == load_runner(source, config).capacity().kv_bytes_per_token
    assert need.weights == pytest.approx((folders / "small" / "model.safetensors").stat().st_size, rel=0.1)


def test_a_draft_model_leaves_memory_for_fewer_tokens(folders, monkeypatch):
    monkeypatch.setattr("tureen.devices.cpu.free_bytes", lambda: 8 << 20)
    config = config_of(folders, max_total_tokens=None)
    without, with_draft = (
        load_runner(folder_source(folders / "model"), config, draft=need).capacity()
        for need in (NO_DRAFT, DraftNeed(1 << 20, 4096))
    )
    assert with_draft.num_pages < without.num_pages / 2
    assert with_draft.kv_bytes_per_token == without.kv_bytes_per_token


def test_a_draft_model_has_the_settings_of_the_model_but_not_its_files():
    config = Config(
        model_path="large", draft_model="small", revision="main", lora_paths=("a=b",), context_length=99,
        quantization="int4", num_threads=3, enable_custom_logit_processor=True,
    )  # fmt: skip
    other = draft_config(config)
    assert (other.model_path, other.draft_model) == ("small", None)
    assert (other.revision, other.lora_paths, other.context_length) == (None, (), None)
    assert not other.enable_custom_logit_processor
    assert (other.quantization, other.num_threads) == ("int4", 3)


@pytest.mark.parametrize("error", [StartupError("no memory"), MemoryError()])
def test_an_engine_whose_draft_model_cannot_be_loaded_is_closed(folders, monkeypatch, error):
    closed = []

    def failing(*args):
        raise error

    monkeypatch.setattr(draft, "load_draft", failing)
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    with pytest.raises(type(error)):
        build.make_engine(config_of(folders))
    assert len(closed) == 1


def test_a_draft_model_is_closed_though_the_model_cannot_be(folders):
    engine, _ = build.make_engine(config_of(folders))
    closed = []

    def failing():
        raise OSError

    engine.rows._runner.close, engine.rows.guesser.draft_model._runner.close = failing, lambda: closed.append(True)
    with pytest.raises(OSError):
        engine.close()
    assert closed == [True]


def test_advice_about_the_draft_model_names_its_own_setting(folders, monkeypatch):
    def missing(config, progress):
        raise StartupError(f"{config.model_path} was not found; give another one by --model-path", field="model_path")

    model = build.find_model(config_of(folders))
    monkeypatch.setattr(build, "find_model", missing)
    with pytest.raises(StartupError) as failure:
        build.make_engine(config_of(folders, draft_model="small"), model=model)
    assert failure.value.message == "--draft-model small: small was not found; give another one by --draft-model"
    assert failure.value.field == "draft_model"


def test_models_that_cannot_guess_or_be_guessed_for_are_refused(folders, tmp_path):
    write(tmp_path / "recurrent", "qwen3-5")
    write_model(tmp_path / "scores", 3)
    config_file = tmp_path / "scores" / "config.json"
    config_file.write_text(config_file.read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    plain, recurrent, scores = map(folder_source, (folders / "model", tmp_path / "recurrent", tmp_path / "scores"))
    config = config_of(folders, draft_model="small")
    for models, message in (
        ((plain, recurrent), "the draft model, recurrent, has recurrent layers. Their state cannot be rolled back"),
        ((recurrent, plain), "the served model, recurrent, has recurrent layers"),
        ((plain, scores), "the draft model, scores, is a classifier; both models must generate text"),
    ):
        with pytest.raises(StartupError, match=message):
            draft.check_models(config, models, ([], []))
