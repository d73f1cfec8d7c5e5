"""What only some settings need is an extra: where it is missing, one line says so, with the command for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
import tiny_gguf
import tiny_llava
import tiny_models

from tureen import build, extras
from tureen.config import Config
from tureen.devices import base
from tureen.errors import StartupError
from tureen.http.tls import load_context
from tureen.kernels.cpu import native
from tureen.runner.fit import memory_need
from tureen.runner.load import load_runner

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def without(monkeypatch):
    def hide(*modules):
        monkeypatch.setattr(extras, "is_installed", lambda module: module not in modules)
        monkeypatch.setattr(build, "is_installed", lambda module: module not in modules)
        monkeypatch.setattr(base, "is_installed", lambda module: module not in modules)

    return hide


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf.write_from_transformers(folder / "m.gguf", tiny_models.write(folder / "hf", "llama"))


def test_every_module_that_may_be_missing_is_installed_by_the_extra_that_is_named():
    distributions = {
        "PIL": "pillow",
        "opentelemetry.sdk": "opentelemetry-sdk",
        "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    }
    for module, extra in extras.EXTRAS.items():
        wanted = PROJECT["optional-dependencies"][extra]
        assert any(one.startswith(distributions.get(module, module)) for one in wanted), module
        assert not any(one.startswith(distributions.get(module, module)) for one in PROJECT["dependencies"]), module


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "cuda"}, "--device cuda"),
        ({"kernels": "torch"}, "--kernels torch"),
        ({"model_impl": "transformers"}, "--model-impl transformers"),
        ({"attention_backend": "reference"}, "--attention-backend reference"),
        ({"dtype": "float16"}, "--dtype float16"),
    ],
)
def test_a_setting_that_needs_torch_says_so_before_a_model_is_fetched(without, settings, named):
    without("torch")
    with pytest.raises(StartupError) as caught:
        build.find_model(Config(model_path="pypi:no-such-package-is-asked-for==0", **settings))
    assert caught.value.message == f"{named} needs torch, which is not installed: pip install 'tureen[torch]'"


def test_engines_under_ray_say_that_ray_is_missing_before_a_model_is_fetched(without):
    without("ray")
    with pytest.raises(StartupError, match="--replicas ray://… needs ray, which is not installed"):
        build.find_model(Config(model_path="pypi:no-such-package-is-asked-for==0", replicas="ray://local"))


def test_a_model_that_sees_takes_text_only_where_pillow_is_missing(without, tmp_path, caplog):
    tiny_llava.write(tmp_path, "llava-clip")
    tiny_llava.write_tokenizer(tmp_path)
    without("PIL")
    config = Config(model_path=str(tmp_path), device="cpu", max_total_tokens=256, num_threads=1)
    model = build.find_model(config)
    assert build.media_loader(config, model) is None
    runner = load_runner(model.source, config)
    assert runner.encoder is None
    runner.close()
    assert "takes text only here: PIL is not installed: pip install 'tureen[vision]'" in caplog.text


def test_a_model_that_sees_takes_pictures_where_torch_is_missing(without, tmp_path, caplog):
    tiny_llava.write(tmp_path, "llava-clip")
    tiny_llava.write_tokenizer(tmp_path)
    without("torch", "transformers")
    config = Config(model_path=str(tmp_path), device="cpu", max_total_tokens=256, num_threads=1)
    model = build.find_model(config)
    assert build.media_loader(config, model) is not None
    assert not build.may_load_torch(config, model)
    runner = load_runner(model.source, config)
    assert runner.encoder is not None
    runner.close()
    assert "text only" not in caplog.text


def test_a_model_that_sees_leaves_its_eyes_out_where_the_operator_wants_text_only(tmp_path, caplog):
    tiny_llava.write(tmp_path, "llava-clip")
    tiny_llava.write_tokenizer(tmp_path)
    whole = Config(model_path=str(tmp_path), device="cpu", max_total_tokens=256, num_threads=1)
    config = msgspec.structs.replace(whole, language_model_only=True)
    model = build.find_model(config)
    assert build.media_loader(config, model) is None
    assert not build.may_load_torch(config, model)
    assert memory_need(model.source, config).weights < memory_need(model.source, whole).weights
    runner = load_runner(model.source, config)
    assert runner.encoder is None
    runner.close()
    assert "pictures" not in caplog.text


def test_a_machine_with_a_driver_and_no_torch_computes_on_its_processors_and_says_why(without, monkeypatch, caplog):
    without("torch")
    monkeypatch.setattr(base, "GPU_TRACES", ("/proc/self/status",))
    assert base.resolve_device("auto").type == "cpu"
    assert "pip install 'tureen[torch]'" in caplog.text


def test_without_kernels_and_without_torch_one_line_names_three_ways_out(without, folder, monkeypatch):
    without("torch")
    monkeypatch.setattr(native, "is_built", lambda: False)
    with pytest.raises(StartupError) as caught:
        build.find_model(Config(model_path=str(folder)))
    assert "\n" not in caught.value.message
    for way in ("a wheel of tureen", "apt-get install g++ python3-dev", "pip install 'tureen[torch]'"):
        assert way in caught.value.message


def test_tls_names_its_extra(without):
    without("cryptography")
    with pytest.raises(StartupError, match=r"--tls-cert needs cryptography.*pip install 'tureen\[tls\]'$"):
        load_context(Config(tls_cert="a.pem", tls_key="b.pem"))
