"""The contract of every declared field, in every dialect that has it.

It is documented, a good value is taken, a bad one is refused with a code of its own, and a test shows what it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from app_under_test import App

from tureen.contract.params import SamplingParams
from tureen.dialects.mindie.generate import MindieBody
from tureen.dialects.sglang.body import GenerateBody
from tureen.dialects.tgi.generate import TgiBody, TgiParameters
from tureen.sessions.tree import SessionParams

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "parameters.md").read_text(encoding="utf-8")


class Case(NamedTuple):
    good: Any
    bad: Any
    effect: str  # the test that shows what the field does


CHANGES = "test_the_parameter_changes_the_tokens_drawn"
CONSTRAINS = "test_an_output_matches_its_constraint_and_ends_with_it"
PARAMS = {
    "max_new_tokens": Case(3, -1, "test_the_finish_reason_says_what_ended_the_output"),
    "min_new_tokens": Case(2, 129, "test_nothing_ends_before_min_new_tokens"),
    "stop": Case(["x"], [""], "test_text_is_cut_where_brute_force_cuts_it"),
    "stop_token_ids": Case([5], [-1], "test_a_stop_token_ends_and_is_trimmed"),
    "stop_regex": Case("a+", "(", "test_text_is_cut_at_patterns_where_brute_force_cuts_it"),
    "temperature": Case(0.5, -1, CHANGES),
    "top_p": Case(0.5, 0, CHANGES),
    "top_k": Case(4, -2, CHANGES),
    "min_p": Case(0.1, 2, CHANGES),
    "typical_p": Case(0.5, 0, CHANGES),
    "frequency_penalty": Case(1, 3, CHANGES),
    "presence_penalty": Case(1, -3, CHANGES),
    "repetition_penalty": Case(1.5, 2.5, CHANGES),
    "repeat_last_n": Case(64, -2, CHANGES),
    "ignore_eos": Case(True, "yes", "test_ignored_eos_does_not_end_but_the_same_stop_token_does"),
    "skip_special_tokens": Case(False, 1, "test_special_tokens_are_shown_when_asked_for"),
    "spaces_between_special_tokens": Case(False, 0, "test_spaces_between_special_tokens_are_removed_when_asked"),
    "no_stop_trim": Case(True, "x", "test_eos_is_text_when_stops_are_not_trimmed"),
    "n": Case(2, 129, "test_sample_i_has_the_seed_plus_i"),
    "json_schema": Case({"const": 5}, {"type": "text"}, CONSTRAINS),
    "regex": Case("ab", "(", CONSTRAINS),
    "ebnf": Case('root ::= "a"', "root", CONSTRAINS),
    "structural_tag": Case(
        {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}, {}, CONSTRAINS
    ),
    "choice": Case(["a"], [], CONSTRAINS),
    "dtype": Case("bool", "integer", "test_a_dtype_is_a_pattern_and_its_stops"),
    "strict_schema": Case(False, 1, "test_strict_refuses_by_name_what_cannot_be_enforced"),
    "grammar_after": Case("", 5, "test_free_text_comes_first_until_the_marker"),
    "close_early": Case(False, "no", "test_the_length_cuts_where_it_is_asked_to_and_says_so"),
    "logit_bias": Case({"5": 1}, {"5": 101}, CHANGES),
    "allowed_token_ids": Case([5], [-1], CHANGES),
    "bad_words": Case(["ab"], [" "], "test_no_sequence_of_tokens_of_a_bad_word_is_in_an_output"),
    "repetition_detection": Case(
        {"max_pattern_size": 2, "min_count": 3}, {"max_pattern_size": 2}, "test_an_output_that_repeats_itself_ends"
    ),
    "custom_params": Case({}, [1], "test_a_custom_logit_processor_decides_every_token"),
    "sampling_seed": Case(7, 2**63, "test_a_seed_is_reported_and_repeats_the_output"),
    "stream_interval": Case(4, 0, "test_the_interval_bounds_the_number_of_events_and_the_first_comes_at_once"),
}
DRAWS = "test_entropy_and_sampling_masks_are_those_of_the_distribution_that_is_drawn_from"
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
    "return_entropy": Case(True, 1, DRAWS),
    "return_sampling_mask": Case(False, 1, DRAWS),
    "return_hidden_states": Case("last", "first", "test_hidden_states_of_prompt_and_output_equal_transformers"),
    "return_prompt_token_ids": Case(
        True, 1, "test_the_prompt_s_ids_are_returned_when_asked_for_in_the_first_and_last_event_of_a_stream"
    ),
    "return_effective": Case(True, 1, "test_every_sampling_parameter_is_told_with_its_value_and_origin"),
    "explain": Case(True, 1, "test_every_token_of_an_answer_is_explained_and_follows_from_that"),
    "stream": Case(False, "x", "test_every_event_has_a_beginning_of_the_text_in_whole_characters"),
    "image_data": Case(None, 5, "test_a_batch_gives_each_prompt_its_own"),
    "video_data": Case(None, 5, "test_pictures_and_videos_stand_where_their_placeholders_do"),
    "modalities": Case(None, "image", "test_modalities_say_how_pictures_are_taken"),
    "lora_path": Case(None, 5, "test_each_prompt_of_a_batch_is_answered_by_the_adapter_it_names"),
    "model": Case("default", 5, "test_a_name_that_means_the_model_is_not_told"),
    "session_params": Case({"id": "open"}, {"id": 5}, "test_a_session_reuses_what_was_said"),
    "custom_logit_processor": Case("disallowed_tokens", "nobody", "test_a_custom_logit_processor_decides_every_token"),
    "require_reasoning": Case(False, 1, "test_a_constraint_waits_for_the_end_of_the_reasoning_that_generate_requires"),
    "max_thinking_tokens": Case(None, 0, "test_generate_ends_reasoning_with_its_budget_as_chats_do"),
    "log_metrics": Case(False, 1, "test_a_request_that_asks_for_it_does_not_count"),
    "priority": Case(3, "x", "test_higher_priority_comes_first"),
    "cache_salt": Case("s", 5, "test_a_salt_separates_the_cache"),
    "extra_key": Case("s", 5, "test_an_extra_key_separates_the_cache_and_both_may_be_given_per_prompt"),
    "deadline_ms": Case(60_000, 0, "test_a_deadline_ends_the_request_with_what_there_is"),
    "ttft_deadline_ms": Case(60_000, 0, "test_a_first_token_deadline_counts_only_until_the_first_token"),
}
WITH_JSON = {"guided_whitespace_pattern": {"guided_json": {"const": 5}}}
OTHER_CODES = {"session_params": "invalid_id", "custom_logit_processor": "custom_logit_processor_unknown"}
EXPLAINS = "test_every_dialect_explains_the_tokens_that_generate_explains"
REACHES = "test_a_parameter_reaches_the_engine_under_its_name"
INTERVAL = "test_salt_and_priority_reach_the_engine_and_a_stream_s_interval_bounds_its_pieces"
SAME = "test_a_parameter_means_what_it_means_in_the_other_dialect"
VLLM = "test_the_fields_of_vllm_constrain_the_output"
SESSION = {
    "id": Case("open", 5, "test_a_session_reuses_what_was_said"),
    "rid": Case(None, 5, "test_a_session_reuses_what_was_said"),
    "offset": Case(0, 1.5, "test_any_tree_of_requests_gets_what_the_full_prompts_get"),
    "replace": Case(False, 1, "test_replacing_drops_what_came_after_and_keeps_the_rest"),
    "drop_previous_output": Case(False, 1, "test_any_tree_of_requests_gets_what_the_full_prompts_get"),
}
MINDIE = {
    "prompt": Case("a", 5, "test_the_answer_is_a_list_of_prompt_blank_and_text"),
    "max_tokens": Case(3, 0, SAME),
    "repetition_penalty": Case(1.5, 2.5, REACHES),
    "presence_penalty": Case(1, 3, REACHES),
    "frequency_penalty": Case(1, 3, REACHES),
    "temperature": Case(0.5, -1, SAME),
    "top_k": Case(5, 0, REACHES),
    "top_p": Case(0.5, 0, REACHES),
    "min_p": Case(0.5, 2, REACHES),
    "typical_p": Case(0.5, 0, REACHES),
    "stream": Case(False, 1, "test_a_stream_is_the_text_in_pieces_with_a_nul_byte_after_each"),
    "seed": Case(5, "x", SAME),
    "stop": Case("x", "", SAME),
    "stop_token_ids": Case([5], [-1], SAME),
    "include_stop_str_in_output": Case(True, 1, SAME),
    "skip_special_tokens": Case(False, 1, REACHES),
    "spaces_between_special_tokens": Case(False, 1, REACHES),
    "ignore_eos": Case(True, 1, SAME),
    "min_tokens": Case(2, -1, SAME),
    "logit_bias": Case({"5": 1}, {"5": 101}, REACHES),
    "bad_words": Case(["ab"], [" "], "test_the_dialects_of_vllm_take_it"),
    "allowed_token_ids": Case([97], [-1], REACHES),
    "repetition_detection": Case({"max_pattern_size": 2, "min_count": 3}, {"max_pattern_size": 2}, REACHES),
    "stream_interval": Case(4, 0, INTERVAL),
    "model": Case("None", 5, "test_the_served_model_may_be_named"),
    "n": Case(2, 0, "test_n_texts_have_the_seeds_that_follow"),
    "best_of": Case(2, 0, "test_best_of_are_all_returned_the_most_probable_first"),
    "structured_outputs": Case({"choice": ["a"]}, {}, VLLM),
    "guided_json": Case({"const": 5}, {"type": "text"}, VLLM),
    "guided_regex": Case("ab", "(", VLLM),
    "guided_choice": Case(["a"], [], VLLM),
    "guided_grammar": Case('root ::= "a"', "root", VLLM),
    "guided_structural_tag": Case(
        {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}, {}, VLLM
    ),
    "guided_decoding_backend": Case("outlines", "mine", VLLM),
    "guided_whitespace_pattern": Case(
        " ?", " +", "test_white_space_that_may_be_none_or_a_space_is_taken_and_such_it_is"
    ),
    "explain": Case(True, 1, EXPLAINS),
    "priority": Case(3, "x", INTERVAL),
    "cache_salt": Case("s", 5, INTERVAL),
}
TGI = {
    "inputs": Case("a", 5, "test_the_shortest_request"),
    "parameters": Case({}, 5, "test_details_tell_every_token"),
    "stream": Case(False, 1, "test_a_stream_is_one_event_a_token_wherever_it_is_asked_for"),
    "model": Case("default", 5, "test_a_name_that_means_the_model_is_not_told"),
}
TGI_PARAMETERS = {
    "max_new_tokens": Case(3, 0, REACHES),
    "do_sample": Case(True, 1, "test_without_a_sampling_parameter_the_best_token_is_taken"),
    "temperature": Case(0.5, 0, REACHES),
    "top_k": Case(5, 0, REACHES),
    "top_p": Case(0.5, 1, REACHES),
    "typical_p": Case(0.5, 0, REACHES),
    "repetition_penalty": Case(1.5, 0, REACHES),
    "frequency_penalty": Case(1, 3, REACHES),
    "seed": Case(5, -1, REACHES),
    "stop": Case(["x"], [""], REACHES),
    "return_full_text": Case(True, 1, "test_the_full_text_has_the_prompt_in_front"),
    "truncate": Case(1, 0, "test_truncation_keeps_the_last_tokens"),
    "details": Case(True, 1, "test_details_tell_every_token"),
    "decoder_input_details": Case(False, 1, "test_the_prompt_s_tokens_with_logprobs"),
    "top_n_tokens": Case(None, 6, "test_alternatives_of_each_token"),
    "best_of": Case(1, 0, "test_best_of_answers_the_most_probable_and_lists_the_others"),
    "adapter_id": Case(None, 5, "test_mindie_s_model_and_tgi_s_adapter_id_name_adapters"),
    "grammar": Case({"type": "regex", "value": "a"}, {}, "test_a_grammar_constrains_the_text"),
    "explain": Case(True, 1, EXPLAINS),
}
LOGPROB_FIELDS = (
    "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "logprobs_mode"
)  # fmt: skip


Body = Callable[[str, Any], dict[str, Any]]


class Dialect(NamedTuple):
    """A group of fields: where they are documented, declared, and stand in a body; the status that refuses them."""

    heading: str  # on the parameters page
    struct: type[msgspec.Struct]
    cases: dict[str, Case]
    body: Body
    status: int = 400

    def check_refusal(self, response: Any, name: str) -> None:
        assert response.status_code == self.status, response.text
        error = response.json()["error"]
        if self.status == 422:  # these shapes have a class of errors in place of a code for each field
            assert name in error
            assert response.json()["error_type"] in ("Input Validation Error", "validation")
            return
        assert name in error["message"]
        assert error["param"].split(".")[-1].split("[")[0] == name or name == "session_params", error
        assert error["code"] == OTHER_CODES.get(name, f"invalid_{name}")


def sglang_body(name: str, value: Any) -> dict[str, Any]:
    prompt = {} if name in ("text", "input_ids", "input_embeds") else {"text": "a"}
    asked = {"return_logprob": True} if name in LOGPROB_FIELDS else {}
    return prompt | asked | {name: value}


DIALECTS = {
    "sampling_params": Dialect(
        "Sampling parameters",
        SamplingParams,
        PARAMS,
        lambda name, value: {"text": "a", "sampling_params": {name: value}},
    ),
    "sglang": Dialect("`POST /generate`, SGLang's dialect", GenerateBody, SGLANG, sglang_body),
    "session": Dialect(
        "`session_params`",
        SessionParams,
        SESSION,
        lambda name, value: {"text": "a", "session_params": {"id": "open"} | {name: value}},
    ),
    "mindie": Dialect(
        "`POST /generate`, the dialect of MindIE and vLLM",
        MindieBody,
        MINDIE,
        lambda name, value: {"prompt": "a", **WITH_JSON.get(name, {}), name: value},
        422,
    ),
    "tgi": Dialect(
        "`POST /generate`, TGI's dialect", TgiBody, TGI, lambda name, value: {"inputs": "a"} | {name: value}, 422
    ),
    "tgi-parameters": Dialect(
        "`parameters` of TGI's dialect",
        TgiParameters,
        TGI_PARAMETERS,
        lambda name, value: {"inputs": "a", "parameters": {name: value}},
        422,
    ),
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
