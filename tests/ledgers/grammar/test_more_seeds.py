"""Random languages, and random wishes of models: more seeds and larger languages than in tests/grammar."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "grammar"))
import test_backend_limits as limits
import test_guard
import test_model_tags
import test_schema_random
import test_tag_guards
from test_backend_limits import backend  # noqa: F401 - a fixture

GUARDS = ("grammar",)


@pytest.mark.parametrize("size", test_guard.VOCABULARIES)
@pytest.mark.parametrize("name", test_guard.SCHEMAS)
def test_a_guarded_value_is_valid_whatever_the_model_wishes(name, size):
    test_guard.check_wishes(name, size, range(4, 12))


@pytest.mark.parametrize("required", [True, False], ids=["required", "auto"])
@pytest.mark.parametrize("name", test_tag_guards.NAMES)
def test_arguments_of_a_strict_tool_are_valid_whatever_the_model_wishes(name, required):
    test_tag_guards.check_arguments(name, required, enough=10**6)


@pytest.mark.parametrize("size", test_tag_guards.VOCABULARIES)
@pytest.mark.parametrize("name", test_tag_guards.TRIGGERED)
def test_values_between_free_texts_are_valid_whatever_the_model_wishes(name, size):
    test_tag_guards.check_values(name, size, enough=10**6)


@pytest.mark.parametrize("seed", range(20, 60))
def test_more_random_languages_are_accepted_exactly(backend, seed):  # noqa: F811
    limits.check_random_language(backend, seed)


@pytest.mark.parametrize("language", [limits.many_texts(5_000), limits.many_rules(500)], ids=["texts", "rules"])
def test_a_large_language_is_compiled_or_refused(backend, language):  # noqa: F811
    limits.steps_until_refused(backend, language)


@pytest.mark.parametrize("reasoning", test_model_tags.REASONING)
@pytest.mark.parametrize("choice", range(3))
@pytest.mark.parametrize("model", test_model_tags.MODELS)
def test_every_builder_s_tag_takes_what_xgrammar_takes(model, choice, reasoning):
    test_model_tags.check_builder(model, test_model_tags.CHOICES[choice], reasoning)


@pytest.mark.parametrize("seed", range(70, 200))
def test_the_values_of_more_random_schemas_are_the_valid_ones(seed):
    test_schema_random.check_schema(seed)
