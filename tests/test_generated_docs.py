"""The pages that tools/docs.py writes are those in the repository."""

import functools
import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from tureen.config import Config
from tureen.contract.params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def _pages():
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


MIGRATION = [f"migrate-from-{name}.md" for name in ("sglang", "vllm", "llamacpp", "tgi")]


@pytest.mark.parametrize("name", ["parameters.md", "settings.md", "models.md", "clients.md", *MIGRATION])
def test_a_generated_page_is_current(name):
    committed = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert committed == _pages()[name], "run: make docs"


def test_every_parameter_and_setting_is_on_its_page():
    pages = _pages()
    for field in msgspec.structs.fields(SamplingParams):
        assert f"| `{field.name}` |" in pages["parameters.md"]
    for field in msgspec.structs.fields(Config):
        assert f"`--{field.name.replace('_', '-')}`" in pages["settings.md"]


def test_the_settings_of_the_helm_chart_are_current():
    sys.path.insert(0, str(ROOT / "tools"))
    from chart_schema import CHART, chart_schema

    assert (CHART / "values.schema.json").read_text(encoding="utf-8") == chart_schema(), "run: make docs"
