"""The pages that tools/docs.py writes are those in the repository."""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.registry import declared
from tureen.text.reasoning import FORMATS
from tureen.text.tools import PARSERS

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def _pages():
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


MIGRATION = [f"migrate-from-{name}.md" for name in ("sglang", "vllm", "llamacpp", "tgi", "ollama")]


@pytest.mark.parametrize(
    "name",
    ["parameters.md", "settings.md", "models.md", "architectures.md", "which-model.md", "clients.md", *MIGRATION],
)
def test_a_generated_page_is_current(name):
    committed = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert committed == _pages()[name], "run: make docs"


def test_the_formats_of_a_family_s_calls_and_thoughts_exist():
    modules = {importlib.import_module(name) for name in declared("tureen.models", "ARCHITECTURES").values()}
    families = [family for module in modules for family in getattr(module, "FAMILIES", {}).values()]
    assert len(families) > 40
    assert {family.calls for family in families} - {""} <= PARSERS.keys()
    assert {family.thoughts for family in families} - {""} <= FORMATS.keys()


def test_every_parameter_and_setting_is_on_its_page():
    pages = _pages()
    for field in msgspec.structs.fields(SamplingParams):
        assert f"| `{field.name}` |" in pages["parameters.md"]
    for field in msgspec.structs.fields(Config):
        assert f"`--{field.name.replace('_', '-')}`" in pages["settings.md"]


def test_models_have_as_many_weights_as_their_authors_say():
    """The counts are those of the safetensors files on the hub."""
    sys.path.insert(0, str(ROOT / "tools"))
    from fit_page import sized_models

    models = {model.name.partition("/")[2]: model for model in sized_models()}
    published = {
        "SmolLM2-135M-Instruct": 134_515_008,
        "Llama-3.2-1B-Instruct": 1_235_814_400,
        "Llama-3.1-8B-Instruct": 8_030_261_248,
        "Qwen3-4B": 4_022_468_096,
        "Qwen3-30B-A3B": 30_532_122_624,
        "Llama-3.3-70B-Instruct": 70_553_706_496,
    }
    assert {name: models[name].num_weights for name in published} == published
    most, few = models["Qwen3-32B"], models["Qwen3-30B-A3B"]
    assert most.read < most.needed
    assert 0.08 < few.read / few.needed < 0.15  # 3.3 of 30.5 billion weights act


def test_the_settings_of_the_helm_chart_are_current():
    sys.path.insert(0, str(ROOT / "tools"))
    from chart_schema import CHART, chart_schema

    assert (CHART / "values.schema.json").read_text(encoding="utf-8") == chart_schema(), "run: make docs"
