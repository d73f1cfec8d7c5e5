"""An option at the value that switches it off is taken in every dialect, and changes no token."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from app_under_test import App
from fake_engine import VOCAB_SIZE

from tureen.fields.known_options import acting_fields, folded, known_options

CHAT = [{"role": "user", "content": "abc"}]
DRAWN = {"max_new_tokens": 8, "seed": 3, "do_sample": True}
DIALECTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "SGLang": (
        "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 8, "seed": 3}}, "sampling_params"
    ),
    "MindIE": ("/generate", {"prompt": "abc", "max_tokens": 8, "seed": 3}, ""),
    "TGI": ("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 8, "seed": 3}}, "parameters"),
    "completions": ("/v1/completions", {"prompt": "abc", "max_tokens": 8, "seed": 3}, ""),
    "chats": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 8, "seed": 3}, ""),
    "responses": ("/v1/responses", {"input": "abc", "max_output_tokens": 8, "seed": 3}, ""),
    "Anthropic": ("/v1/messages", {"model": "default", "messages": CHAT, "max_tokens": 8, "seed": 3}, ""),
    "Ollama": (
        "/api/generate",
        {"model": "default", "prompt": "abc", "stream": False, "options": {"num_predict": 8, "seed": 3}},
        "options",
    ),
    "llama.cpp": (
        "/completion", {"prompt": "abc", "max_tokens": 8, "seed": 3, "top_k": 0, "top_p": 1, "min_p": 0}, ""
    ),
    "vLLM's tokens": (
        "/inference/v1/generate",
        {"token_ids": [97, 98, 99], "sampling_params": {"max_tokens": 8, "seed": 3}},
        "sampling_params",
    ),
    "infer": ("/infer", {"inputs": "abc", "parameters": DRAWN}, "parameters"),
    "Triton": ("/v2/models/fake-model/generate", {"text_input": "abc", "parameters": DRAWN}, "parameters"),
}  # fmt: skip
"""Route, a body that ends early, and the object in it that has its sampling parameters; "" = the body itself."""

SENT_BY_CLIENTS: list[tuple[str, Any]] = [
    ("dry_multiplier", 0),
    ("dry_multiplier", 0.0),
    ("xtc_probability", 0),
    ("mirostat", 0),
    ("top_n_sigma", -1),
    ("dynatemp_range", 0),
    ("tfs_z", 1),
    ("tfs_z", 1.0),
    ("repeat_penalty", 1),
    ("repeat_penalty", 1.0),
    ("top_k", 0),
    ("top_k", -1),
    ("n_predict", -1),
    ("n_probs", 0),
    ("n_cmpl", 1),
    ("typ_p", 1),
    ("typical_p", 1),
    ("min_p", 0),
    ("min_tokens", 0),
    ("include_stop_str_in_output", False),
    ("top_logprobs", 0),
    ("logprobs", False),
    ("logprob_start_len", 0),
    ("logprob_start_len", -1),
    ("return_logprob", False),
    ("return_tokens_as_token_ids", False),
    ("repetition_penalty", 1),
    ("frequency_penalty", 0),
    ("presence_penalty", 0),
    ("n", 1),
    ("best_of", 1),
    ("echo", False),
    ("ignore_eos", False),
    ("use_beam_search", False),
    ("beam_width", 1),
    ("watermark", False),
    ("repeat_last_n", -1),
    ("penalize_newline", True),
    ("samplers", []),
    ("lora", []),
    ("tools", []),
    ("stop", []),
    ("logit_bias", {}),
    ("negative_prompt", ""),
    ("regex", ""),
    ("mirostat_tau", 5),
    ("mirostat_eta", 0.1),
    ("dry_base", 1.75),
    ("dry_sequence_breakers", ["\n"]),
    ("xtc_threshold", 0.1),
]
"""Off values, and what stands beside them, as user interfaces and other servers' clients send them."""

LEAST = {"MindIE": {"min_tokens": 2}}
"""The name of a field with a mask over the tokens that end an output, where it is another."""

REFUSED_BY_ITS_PAGE = {
    ("MindIE", "top_k"): [0],
    **{(dialect, "top_k"): [0, -1] for dialect in ("TGI", "infer", "Triton")},
    ("llama.cpp", "n_predict"): [-1],  # another name of max_tokens
    ("vLLM's tokens", "logprobs"): [False],
}
ABSENT = [(name, value) for name, option in known_options().absent.items() for value in option.off]


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Iterator[App]:
    template = tmp_path_factory.mktemp("templates") / "last.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    with App(chat_template=str(template)) as running:
        yield running


def post(app: App, dialect: str, sent: dict[str, Any], *, beside: bool = False):
    """`beside`: in the body itself, although the dialect has an object for sampling parameters."""
    path, shortest, part = DIALECTS[dialect]
    body = copy.deepcopy(shortest)
    (body if beside or not part else body[part]).update(sent)
    return app.request("POST", path, json=body)


def text_of(answer: dict[str, Any]) -> Any:
    """The text of an answer in any dialect."""
    for name in ("text", "response", "generated_text", "content", "output", "text_output"):
        if name in answer:
            return text_of(answer[name][0]) if isinstance(answer[name], list) and name != "text" else answer[name]
    [choice] = answer["choices"]
    return choice.get("token_ids") or choice.get("text") or choice["message"]["content"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_option_at_its_off_value_is_taken_and_changes_no_token(app, dialect):
    plain = post(app, dialect, {})
    assert plain.status_code == 200, plain.text
    assert text_of(plain.json())
    for name, value in [*SENT_BY_CLIENTS, *ABSENT]:
        answer = post(app, dialect, {name: value})
        if value in REFUSED_BY_ITS_PAGE.get((dialect, name), ()):
            assert answer.status_code in (400, 422), (name, answer.text)
            continue
        assert answer.status_code == 200, (name, value, answer.text)
        assert text_of(answer.json()) == text_of(plain.json()), (name, value)
        is_beside = name in known_options().beside
        assert ("x-tureen-ignored" in answer.headers) == is_beside, (name, value)


@pytest.mark.parametrize("dialect", [each for each in DIALECTS if each != "llama.cpp"])  # which has two names for some
def test_all_off_values_together_are_taken_in_the_body_itself_too(app, dialect):
    """Clients of flat APIs send them beside the object with the sampling parameters."""
    off = {
        name: value
        for name, value in [*ABSENT, *SENT_BY_CLIENTS]
        if value not in REFUSED_BY_ITS_PAGE.get((dialect, name), ())
    }
    answer = post(app, dialect, off, beside=True)
    assert answer.status_code == 200, answer.text
    assert text_of(answer.json()) == text_of(post(app, dialect, {}).json())


@pytest.mark.parametrize("dialect", ["SGLang", "MindIE", "completions", "chats", "responses", "Anthropic"])
def test_a_stop_token_beyond_the_vocabulary_ends_nothing_and_is_told(app, dialect):
    """Model cards list ids of larger vocabularies of the same family."""
    told = post(
        app, dialect, {"stop_token_ids": [VOCAB_SIZE, 2**31, 2**40], **LEAST.get(dialect, {"min_new_tokens": 2})}
    )
    assert told.status_code == 200, told.text
    assert text_of(told.json()) == text_of(post(app, dialect, {}).json())
    assert told.headers["x-tureen-ignored"].rpartition(".")[2] == "stop_token_ids"
    assert post(app, dialect, {"stop_token_ids": [-1]}).status_code in (400, 422)


@pytest.mark.parametrize("dialect", ["completions", "chats"])
def test_ids_in_place_of_tokens_without_log_probabilities_are_told(app, dialect):
    told = post(app, dialect, {"return_tokens_as_token_ids": True})
    assert (told.status_code, told.headers["x-tureen-ignored"]) == (200, "return_tokens_as_token_ids")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_another_value_of_an_option_that_is_not_here_is_refused_by_name(app, dialect):
    """True is not 1, nor is 0 false."""
    for name, option in known_options().absent.items():
        off = option.off[0] if option.off else None
        for value in (0.5, {"a": 1}, 0 if off is False else 1 if off is True else True):
            answer = post(app, dialect, {name: value})
            assert answer.status_code in (400, 422), (name, value, answer.text)
            assert name in answer.text
            assert "x-tureen-ignored" not in answer.headers


TABBY = (
    "max_tokens", "min_tokens", "generate_window", "stop", "banned_strings", "banned_tokens", "allowed_tokens",
    "token_healing", "temperature", "temperature_last", "smoothing_factor", "top_k", "top_p", "top_a", "min_p", "tfs",
    "typical", "skew", "frequency_penalty", "presence_penalty", "repetition_penalty", "penalty_range",
    "repetition_decay", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_sequence_breakers",
    "mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta", "add_bos_token", "ban_eos_token",
    "skip_special_tokens", "logit_bias", "negative_prompt", "json_schema", "regex_pattern", "grammar_string",
    "cfg_scale", "max_temp", "min_temp", "temp_exponent", "max_length", "min_length", "stop_sequence",
    "custom_token_bans", "allowed_token_ids", "typical_p", "rep_pen", "repetition_range", "repetition_penalty_range",
    "rep_pen_range", "dry_penalty_last_n", "ignore_eos", "guidance_scale", "dynatemp_high", "dynatemp_low",
    "dynatemp_exponent",
)  # fmt: skip
"""Sampling options of TabbyAPI with their aliases (common/sampling.py), but for speculative_ngram."""

CHANGES_NO_TOKEN = re.compile(
    r"_from_model_config|assistant_.*|cache_.*|compile_config|disable_compile|continuous_batching_config|use_cache|"
    r"use_mtp|low_memory|max_cache_len|max_matching_ngram_size|num_assistant_.*|prompt_lookup_.*|prefill_chunk_size|"
    r"speculation_type|target_lookbehind|is_assistant|output_.*|return_dict_in_generate|transformers_version|"
    r"(bos|pad|decoder_start)_token_id|remove_invalid_values|renormalize_logits"
)
"""Settings in transformers' GenerationConfig that choose no token: they affect speed or the form of the output, or
belong to another kind of model."""


def test_no_sampling_option_of_tabbyapi_or_transformers_is_reported_as_ignored():
    names = [name for name in vars(transformers.GenerationConfig()) if not CHANGES_NO_TOKEN.fullmatch(name)]
    acting, beside = acting_fields(), known_options().beside
    assert [name for name in (*TABBY, *names) if folded(name) not in acting and name not in beside] == []


@pytest.mark.parametrize("name", ["min_temp", "max_temp"])
def test_bounds_of_the_temperature_are_refused_because_they_need_no_other_option_in_tabbyapi(app, name):
    assert post(app, "completions", {name: 1.0}).status_code == 200
    assert post(app, "completions", {name: 0.5}).status_code == 400
