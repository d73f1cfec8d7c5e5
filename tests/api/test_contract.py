"""The contract of every declared field, in every dialect that has it.

It is documented, a good value is taken, a bad one is refused with a code of its own, and a test shows what it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from app_under_test import App

from tureen.api.sglang_request import GenerateBody
from tureen.sampling.params import SamplingParams

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "parameters.md").read_text(encoding="utf-8")


class Case(NamedTuple):
    good: Any
    bad: Any
    effect: str  # the test that shows what the field does


CHANGES = "test_the_parameter_changes_the_tokens_drawn"
PARAMS = {
    "max_new_tokens": Case(3, -1, "test_the_finish_reason_says_what_ended_the_output"),
    "min_new_tokens": Case(2, 129, "test_nothing_ends_before_min_new_tokens"),
    "stop": Case(["x"], [""], "test_text_is_cut_where_brute_force_cuts_it"),
    "stop_token_ids": Case([5], [-1], "test_a_stop_token_ends_and_is_trimmed"),
    "stop_regex": Case("a+", "(", "test_text_is_cut_at_patterns_where_brute_force_cuts_it"),
    "temperature": Case(0.5, -1, CHANGES),
    "top_p": Case(0.5, 0, CHANGES),
    "top_k": Case(4, 0, CHANGES),
    "min_p": Case(0.1, 2, CHANGES),
    "frequency_penalty": Case(1, 3, CHANGES),
    "presence_penalty": Case(1, -3, CHANGES),
    "repetition_penalty": Case(1.5, 2.5, CHANGES),
    "ignore_eos": Case(True, "yes", "test_ignored_eos_does_not_end_but_the_same_stop_token_does"),
    "skip_special_tokens": Case(False, 1, "test_special_tokens_are_shown_when_asked_for"),
    "spaces_between_special_tokens": Case(False, 0, "test_spaces_between_special_tokens_are_removed_when_asked"),
    "no_stop_trim": Case(True, "x", "test_eos_is_text_when_stops_are_not_trimmed"),
    "n": Case(2, 129, "test_sample_i_has_the_seed_plus_i"),
    "logit_bias": Case({"5": 1}, {"5": 101}, CHANGES),
    "custom_params": Case({}, [1], "test_a_custom_logit_processor_decides_every_token"),
    "sampling_seed": Case(7, 2**63, "test_a_seed_is_reported_and_repeats_the_output"),
    "stream_interval": Case(4, 0, "test_the_interval_bounds_the_number_of_events_and_the_first_comes_at_once"),
}
SGLANG = {
    "text": Case("a", 5, "test_one_prompt_gets_one_object_with_text_ids_and_facts"),
    "input_ids": Case([97], "x", "test_ids_in_place_of_text_give_the_same_output"),
    "input_embeds": Case(
        [[0.5] * 4], [[0.5] * 3], "test_embeddings_take_the_place_of_text_and_other_ones_give_another_output"
    ),
    "sampling_params": Case({"top_k": 4}, 5, "test_each_value_may_be_given_per_prompt"),
    "rid": Case("mine", "é", "test_a_request_a_batch_or_a_sample_can_be_aborted_by_name"),
    "return_logprob": Case(True, "x", "test_logprobs_have_the_documented_lengths_and_shapes"),
    "logprob_start_len": Case(0, 9, "test_logprobs_have_the_documented_lengths_and_shapes"),
    "top_logprobs_num": Case(2, 129, "test_output_logprobs_equal_float64"),
    "token_ids_logprob": Case([5], "x", "test_output_logprobs_equal_float64"),
    "return_text_in_logprobs": Case(True, 1, "test_logprobs_come_with_the_token_s_text_when_asked"),
    "logprobs_mode": Case("raw", "x", "test_output_logprobs_equal_float64"),
    "return_hidden_states": Case("last", "first", "test_hidden_states_of_prompt_and_output_equal_transformers"),
    "return_effective": Case(True, 1, "test_every_sampling_parameter_is_told_with_its_value_and_origin"),
    "stream": Case(False, "x", "test_every_event_has_a_beginning_of_the_text_in_whole_characters"),
    "session_params": Case({"id": "open"}, {"id": 5}, "test_a_session_reuses_what_was_said"),
    "custom_logit_processor": Case("disallowed_tokens", "nobody", "test_a_custom_logit_processor_decides_every_token"),
    "log_metrics": Case(False, 1, "test_a_request_that_asks_for_it_does_not_count"),
    "priority": Case(3, "x", "test_higher_priority_comes_first"),
    "cache_salt": Case("s", 5, "test_a_salt_separates_the_cache"),
    "deadline_ms": Case(60_000, 0, "test_a_deadline_ends_the_request_with_what_there_is"),
    "ttft_deadline_ms": Case(60_000, 0, "test_a_first_token_deadline_counts_only_until_the_first_token"),
}
OTHER_CODES = {"session_params": "invalid_id", "custom_logit_processor": "custom_logit_processor_unknown"}
LOGPROB_FIELDS = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "logprobs_mode")


class Dialect(NamedTuple):
    """Where a group of fields stands in a body, and what its errors look like."""

    heading: str  # on the parameters page
    struct: type[msgspec.Struct]
    cases: dict[str, Case]

    def body(self, name: str, value: Any) -> dict[str, Any]:
        if self.struct is SamplingParams:
            return {"text": "a", "sampling_params": {name: value}}
        prompt = {} if name in ("text", "input_ids", "input_embeds") else {"text": "a"}
        asked = {"return_logprob": True} if name in LOGPROB_FIELDS else {}
        return prompt | asked | {name: value}

    def check_refusal(self, response: Any, name: str) -> None:
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert name in error["message"]
        assert error["param"].split(".")[-1].split("[")[0] == name or name == "session_params", error
        assert error["code"] == OTHER_CODES.get(name, f"invalid_{name}")


DIALECTS = {
    "sampling_params": Dialect("Sampling parameters", SamplingParams, PARAMS),
    "sglang": Dialect("`POST /generate`, SGLang's dialect", GenerateBody, SGLANG),
}
FIELDS = [(dialect, name) for dialect in DIALECTS for name in DIALECTS[dialect].cases]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(enable_priority_scheduling=True) as running:
        opened = running.post("/open_session", capacity_of_str_len=1000, session_id="open")
        assert opened.status_code == 200
        yield running


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_declared_field_has_a_case(dialect):
    declared = [field.name for field in msgspec.structs.fields(DIALECTS[dialect].struct)]
    assert declared == list(DIALECTS[dialect].cases)


@pytest.mark.parametrize(("dialect", "name"), FIELDS)
def test_the_field_is_documented(dialect, name):
    _, _, section = PAGE.partition(f"\n## {DIALECTS[dialect].heading}\n")
    [row] = re.findall(rf"^\| `{name}` \| (.+) \|$", section.split("\n## ")[0], re.MULTILINE)
    *_, meaning = row.split(" | ")
    assert len(meaning) > 10


@pytest.mark.parametrize(("dialect", "name"), FIELDS)
def test_a_good_value_is_taken(app, dialect, name):
    one = DIALECTS[dialect]
    response = app.post(**one.body(name, one.cases[name].good))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("dialect", "name"), FIELDS)
def test_a_bad_value_is_refused_with_a_code_of_its_own(app, dialect, name):
    one = DIALECTS[dialect]
    one.check_refusal(app.post(**one.body(name, one.cases[name].bad)), name)


@cache
def names_of_tests() -> frozenset[str]:
    return frozenset(
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)
    )


@pytest.mark.parametrize(("dialect", "name"), FIELDS)
def test_what_the_field_does_has_a_test(dialect, name):
    assert DIALECTS[dialect].cases[name].effect in names_of_tests()
