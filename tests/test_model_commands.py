"""The commands about models: list, show, rm."""

from __future__ import annotations

import json
from pathlib import Path

import own_home
import pytest

from tureen.cli import command_line as cli


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> tuple[dict[str, str], Path]:
    return own_home.make(tmp_path_factory.mktemp("home"))


@pytest.fixture
def path(home, monkeypatch) -> Path:
    """The model of the home in which the test runs."""
    own, path = home
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return path


def test_list_names_the_models_that_are_here_and_those_that_could_be(path, capsys):
    assert cli.main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["models"] == [
        {"name": str(path), "path": str(path), "bytes": path.stat().st_size}
    ]  # "tiny" finds none
    assert "smollm2:135m" in listed["shelf"]
    assert cli.main(["list"]) == 0
    assert str(path) in capsys.readouterr().out


def test_show_says_whether_a_model_fits(path, capsys):
    assert cli.main(["show", str(path), "--context-length", "64"]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown
    assert "(64 tokens at" in shown
    assert "it fits" in shown


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 512), ("int8", 160), ("int4", 128)])
def test_show_counts_the_kv_cache_in_the_type_that_is_asked_for(dtype, num_bytes, path, capsys):
    pytest.importorskip("tureen.kernels.cpu._native")
    assert cli.main(["show", str(path), "--context-length", "64", "--kv-cache-dtype", dtype]) == 0
    assert f"(64 tokens at {num_bytes} " in capsys.readouterr().out


@pytest.mark.usefixtures("path")
def test_an_unknown_name_is_answered_with_the_nearest_one(capsys):
    assert cli.main(["show", "smolm2:135m"]) == 1
    assert "did you mean smollm2:135m?" in capsys.readouterr().err


def test_a_file_that_was_not_pulled_is_not_removed(path, capsys):
    assert cli.main(["rm", str(path)]) == 1
    assert "delete other files yourself" in capsys.readouterr().err
    assert path.exists()
