"""Same prompt, same seed, same parameters: every dialect draws the same tokens, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from real_app import RealApp, write_model

from tureen.app.compat import compat_routes
from tureen.contract.types import OutputDelta
from tureen.requests.generation import Output

PROMPT, SEED, LENGTH = "Once upon a time", 77, 24
PROMPT_IDS = list(PROMPT.encode())
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "model": "default"}
LIKE_OPENAI = {"seed": SEED, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}
LIKE_TGI = LIKE_OPENAI | {"max_new_tokens": LENGTH, "do_sample": True}
LIKE_LLAMA = {
    "seed": SEED, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "repeat_penalty": 1.2, "min_p": 0,
    "n_predict": LENGTH,
}  # fmt: skip
LIKE_OLLAMA = {
    "model": "default",
    "options": {
        "seed": SEED, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "repeat_penalty": 1.2, "num_predict": LENGTH,
    },
}  # fmt: skip
LIKE_SGLANG = {
    "sampling_seed": SEED, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2,
    "max_new_tokens": LENGTH,
}  # fmt: skip
TENSOR = {"name": "input0", "shape": [1, len(PROMPT_IDS)], "datatype": "UINT32", "data": PROMPT_IDS}

BODIES: dict[str, dict[str, Any]] = {
    "SGLang /generate": {"text": PROMPT, "sampling_params": LIKE_SGLANG},
    "MindIE and vLLM's demo server /generate": {"prompt": PROMPT, "max_tokens": LENGTH, **LIKE_OPENAI},
    "MindIE /infer": {"inputs": PROMPT, "parameters": LIKE_TGI},
    "MindIE /v2/models/default/generate": {"text_input": PROMPT, "parameters": LIKE_TGI},
    "MindIE /v2/models/default/infer": {"inputs": [TENSOR], "parameters": LIKE_TGI},
    "TGI /generate": {"inputs": PROMPT, "parameters": LIKE_TGI},
    "OpenAI /v1/completions": {"prompt": PROMPT, "max_tokens": LENGTH, **LIKE_OPENAI},
    "OpenAI /v1/chat/completions": {**CHAT, "max_tokens": LENGTH, **LIKE_OPENAI},
    "OpenAI /v1/responses": {"input": PROMPT, "max_output_tokens": LENGTH, **LIKE_OPENAI},
    "Anthropic /v1/messages": {**CHAT, "max_tokens": LENGTH, **LIKE_OPENAI},
    "Ollama /api/chat": {**CHAT, **LIKE_OLLAMA},
    "Ollama /api/generate": {"prompt": PROMPT, "raw": True, **LIKE_OLLAMA},
    "vLLM /inference/v1/generate": {
        "token_ids": PROMPT_IDS,
        "sampling_params": LIKE_OPENAI | {"max_tokens": LENGTH},
    },
    "llama.cpp /completion": {"prompt": PROMPT, **LIKE_LLAMA},
}
"""For each route that writes text, the body that asks for the same tokens."""

WITHOUT_TEXT = {
    "OpenAI /v1/embeddings", "OpenAI /v1/batches", "SGLang /encode", "SGLang /v1/score", "SGLang /v1/rerank",
    "SGLang and vLLM /tokenize", "SGLang and vLLM /detokenize", "llama.cpp /tokenize", "Cohere /v2/rerank",
    "Cohere /cohere/v1/rerank", "Jina /v1/reranking", "TEI /embed", "TEI /rerank", "TEI /predict", "TEI /similarity",
    "Anthropic /v1/messages/count_tokens", "Ollama /api/embed", "Ollama /api/embeddings",
}  # fmt: skip
OTHER_PROMPTS = {"llama.cpp /infill": "its prompt is made of two texts and the model's tokens between them"}
NO_STREAM = {"MindIE /v2/models/default/infer"}


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Iterator[RealApp]:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 3)
    template = folder / "last.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    with RealApp(Path(folder), chat_template=str(template)) as running:
        yield running


@pytest.fixture(scope="module")
def drawn(app) -> dict[tuple[str, bool], tuple[int, ...]]:
    """The tokens that the engine drew for each route, whole and streamed."""
    found = {}
    for name, body in BODIES.items():
        for stream in (False, True):
            if not (stream and name in NO_STREAM):
                found[name, stream] = tokens_of(app, name, body, stream=stream)
    return found


def tokens_of(app: RealApp, name: str, body: dict[str, Any], *, stream: bool) -> tuple[int, ...]:
    path = f"/{name.partition(' /')[2]}"
    if "/v2/" in path:
        path, sent = f"{path}_stream" if stream else path, body
    else:
        sent = body | {"stream": stream}
    token_ids: list[int] = []
    add = Output.add

    def noted(output: Output, delta: OutputDelta) -> None:
        token_ids.extend(delta.token_ids)
        add(output, delta)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "add", noted)
        response = app.request("POST", path, json=sent)
    assert response.status_code == 200, response.text
    assert "x-tureen-ignored" not in response.headers, (name, response.headers["x-tureen-ignored"])
    return tuple(token_ids)


def test_each_route_that_writes_text_is_compared():
    named = {f"{route.api} {route.route}" for route in compat_routes()}
    assert named == BODIES.keys() | WITHOUT_TEXT | OTHER_PROMPTS.keys()


@pytest.mark.parametrize(("one", "other"), combinations(BODIES, 2))
def test_two_dialects_draw_the_same_tokens(drawn, one, other):
    assert drawn[one, False] == drawn[other, False]
    assert drawn[one, False] == drawn.get((other, True), drawn[one, False])


def test_another_seed_draws_other_tokens(app, drawn):
    """Otherwise the comparison would say nothing of seeds."""
    name = "SGLang /generate"
    assert len(drawn[name, False]) == LENGTH
    body = {"text": PROMPT, "sampling_params": LIKE_SGLANG | {"sampling_seed": SEED + 1}}
    assert tokens_of(app, name, body, stream=False) != drawn[name, False]
    plain = {"text": PROMPT, "sampling_params": {"sampling_seed": SEED, "max_new_tokens": LENGTH}}
    assert tokens_of(app, name, plain, stream=False) != drawn[name, False]
