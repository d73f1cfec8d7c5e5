"""A conversation in a session of the real server."""

from __future__ import annotations

import httpx
import pytest

GUARDS = ("requests", "cache", "engine", "dialects")


TURNS = [
    "<|im_start|>user\nName the largest river of South America and the countries it flows through.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<|im_start|>user\nWhere is its mouth?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nAnd its source?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"sampling_seed": 3}], ids=["greedy", "seeded"])
def test_three_turns_get_what_their_full_prompts_get_and_reuse_more_each_time(server, params):
    def post(path, **body):
        response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response

    def generate(**body):
        return post("/generate", **body, sampling_params=params | {"max_new_tokens": 24}, cache_salt=str(params)).json()

    session = post("/open_session", capacity_of_str_len=10_000).json()
    answers = []
    rid = None
    for text in TURNS:
        answers.append(generate(text=text, session_params={"id": session, "rid": rid}))
        rid = answers[-1]["meta_info"]["id"]
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert cached[0] < cached[1] < cached[2]

    ids: list[int] = []
    for text, answer in zip(TURNS, answers, strict=True):
        # The text alone, told by its log-probabilities: each is tokenized by itself.
        spelled = generate(text=text, return_logprob=True, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
        ids += [token_id for _, token_id, _ in spelled]
        post("/flush_cache")
        whole = generate(input_ids=ids)
        assert whole["meta_info"]["cached_tokens"] == 0
        assert answer["meta_info"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"] == len(ids)
        assert answer["output_ids"] == whole["output_ids"]
        ids += answer["output_ids"]
    post("/close_session", session_id=session)
