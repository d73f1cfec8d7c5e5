"""SGLang's own processors: by name, and as what their to_str() sends."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tureen.config import Config
from tureen.errors import InvalidRequest
from tureen.fields.processor import check_processor
from tureen.sampling import sglang_processors

FIELD, OFF = "custom_logit_processor", Config()
THINKING = {
    "Glm4MoeThinkingBudgetLogitProcessor": (151350, 151351, 198),
    "Qwen3ThinkingBudgetLogitProcessor": (151667, 151668, 198),
    "DeepSeekR1ThinkingBudgetLogitProcessor": (128798, 128799, 201),
    "InklingThinkingBudgetLogitProcessor": (200008, 200010, 198),
}


def params(prompt=(), output=(), **fields):
    return {**fields, "__req__": SimpleNamespace(origin_input_ids=list(prompt), output_ids=list(output))}


def is_allowed(name, entry, vocab):
    """Which tokens a processor leaves of a row."""
    logits = getattr(sglang_processors, name)()(torch.ones(1, vocab), [entry])
    return torch.isfinite(logits[0])


def allowed(name, entry, vocab):
    return is_allowed(name, entry, vocab).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("name", THINKING)
def test_thoughts_end_with_a_new_line_and_their_mark_once_the_budget_is_used_up(name):
    start, end, line = THINKING[name]
    vocab = end + 1
    cases = [
        ([1, start], [], 3, None),
        ([1, start], [5, 6], 3, None),
        ([1, start], [5, 6, 7], 3, line),
        ([1, start], [5, 6, 7, line], 3, end),
        ([1, start], [5, 6, line], 3, end),
        ([1], [start, 5, 6, 7], 3, line),
        ([1, start], [], 0, line),
        ([1, start], [5, 6, 7, line, end, 8], 3, None),
        ([start, 5, end, 2], [9, 9, 9, 9], 3, None),
        ([start, 5, end, start], [9, 9, 9], 3, line),
        ([1], [5, 6, 7, 8], 3, None),
        ([1, start], [5] * 9, -1, None),
        ([1, start], [5] * 9, None, None),
    ]
    for prompt, output, budget, forced in cases:
        left = is_allowed(name, params(prompt, output, thinking_budget=budget), vocab)
        assert left.sum() == (vocab if forced is None else 1), (prompt, output, budget)
        assert forced is None or left[forced], (prompt, output, budget)


def test_a_budget_for_another_model_and_one_that_is_no_number_are_refused():
    start = THINKING["Qwen3ThinkingBudgetLogitProcessor"][0]
    with pytest.raises(InvalidRequest, match="this model has no token 198; Qwen3ThinkingBudget"):
        allowed("Qwen3ThinkingBudgetLogitProcessor", params([start], thinking_budget=0), 100)
    with pytest.raises(InvalidRequest, match="thinking_budget must be an integer"):
        allowed("Qwen3ThinkingBudgetLogitProcessor", params(thinking_budget="5"), 100)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_no_ngram_that_begins_in_the_window_comes_again_but_by_permission(size, window):
    name, prompt, output = "DeepseekOCRNoRepeatNGramLogitProcessor", [1, 2, 3, 1, 2, 4], [1, 2, 3, 1, 2]
    ids = prompt + output
    banned = set()
    for start in range(max(0, len(ids) - window), len(ids)):
        ngram = ids[start : start + size]
        if len(ngram) == size and ngram[:-1] == ids[len(ids) - size + 1 :]:
            banned.add(ngram[-1])
    entry = params(prompt, output, ngram_size=size, window_size=window, whitelist_token_ids=[4])
    assert allowed(name, entry, 8) == [token for token in range(8) if token not in banned or token == 4]


@pytest.mark.parametrize("fields", [{}, {"ngram_size": 2}, {"ngram_size": 0, "window_size": 5}, {"ngram_size": "2"}])
def test_ngrams_without_their_sizes_are_refused(fields):
    with pytest.raises(InvalidRequest, match=r"custom_params\.(ngram|window)_size"):
        allowed("DeepseekOCRNoRepeatNGramLogitProcessor", params(**fields), 8)


def test_disallowed_tokens_are_those_of_each_row():
    logits = sglang_processors.DisallowedTokensLogitsProcessor()(
        torch.zeros(2, 4), [params(token_ids=[0, 1]), params(token_ids=[3])]
    )
    assert torch.isinf(logits).tolist() == [[True, True, False, False], [False, False, False, True]]


OTHERS = {
    "a class that is not shipped": b"\x80\x04\x8c\x2a%b\x94\x8c\x03Its\x94\x93\x94.",
    "another module": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "more behind its name": b"\x80\x04\x8c\x2a%b\x94\x8c\x21Qwen3ThinkingBudgetLogitProcessor\x94\x93\x94(.",
    "a call of it": b"\x80\x04\x8c\x2a%b\x94\x8c\x21Qwen3ThinkingBudgetLogitProcessor\x94\x93\x94)R.",
    "two pickles": b"\x80\x04\x8c\x2a%b\x94\x8c\x21Qwen3ThinkingBudgetLogitProcessor\x94\x93\x94..",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_pickle_is_code_of_a_client(kind):
    pickled = OTHERS[kind].replace(b"%b", b"sglang.srt.sampling.custom_logit_processor")
    with pytest.raises(InvalidRequest) as caught:
        check_processor(json.dumps({"callable": pickled.hex()}), OFF, FIELD)
    assert caught.value.code == "custom_logit_processor_disabled"
