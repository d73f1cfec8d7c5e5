"""The default model with longer prompts and in larger company than in tests/models/test_smollm2.py."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "models"))
from test_smollm2 import check_company, check_long_prompt, make_runner, oracle, weights  # noqa: F401 - fixtures

GUARDS = ("attention", "kernels", "layers", "models", "runner", "sampling", "weights")

pytestmark = pytest.mark.model


def test_a_request_gives_the_same_tokens_and_logprobs_alone_and_among_thirty(default_model_source):
    check_company(make_runner(default_model_source), repeats=20, num_mates=30, count=12)


def test_a_prompt_of_650_tokens_equals_transformers(default_model_source, oracle):  # noqa: F811
    check_long_prompt(default_model_source, oracle, 650)
