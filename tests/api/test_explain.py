"""`explain: true` tells why each token was chosen: in answers, streams, samples, batches, in every dialect."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import msgspec
import pytest
from app_under_test import App, parse_events
from byte_tokenizer import EOS, VOCAB_SIZE
from fake_engine import make_request
from one_request import DIALECTS, lines_of
from real_app import RealApp, write_model

from tureen.contract.params import SamplingParams
from tureen.contract.types import LogprobSpec, PositionLogprobs
from tureen.kernels.cpu import native
from tureen.requests.drafts import MAX_EXPLAINED_TOKENS
from tureen.requests.generation import Output

recompute = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "recompute.py"))["recompute"]

PROMPT = [9, 40, 77, 200, 31]
SAMPLING = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5, "temperature": 0.9, "top_p": 0.9}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module", params=["thread", "process"])
def app(request, tmp_path_factory):
    if native.load() is None:
        pytest.skip("no native kernels")
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 1)
    template = folder / "chat.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    # an explanation's `guessed` depends on earlier requests
    how = {"kernels": "native", "engine": request.param, "chat_template": str(template), "speculative": False}
    with RealApp(folder, grammar_backend="tureen", **how) as app:
        yield app


@pytest.fixture(scope="module")
def fake():
    with App() as running:
        yield running


def recomputed(explanations, seed):
    """The tokens that follow from what explanations say."""
    return [recompute(explanation, seed) for explanation in explanations]


def test_every_token_of_an_answer_is_explained_and_follows_from_that(app):
    answer = app.generate(input_ids=PROMPT, sampling_params=SAMPLING, explain=True)
    meta = answer["meta_info"]
    assert recomputed(meta["explanations"], meta["sampling_seed"]) == answer["output_ids"]
    assert [why["position"] for why in meta["explanations"]] == list(range(len(PROMPT), len(PROMPT) + 12))
    plain = app.generate(input_ids=PROMPT, sampling_params=SAMPLING)
    assert plain["output_ids"] == answer["output_ids"]
    assert "explanations" not in plain["meta_info"]


def test_each_event_of_a_stream_explains_its_own_tokens(app):
    whole = app.generate(input_ids=PROMPT, sampling_params=SAMPLING, explain=True)
    events = app.events(input_ids=PROMPT, sampling_params=SAMPLING | {"stream_interval": 3}, explain=True)
    explained, num_before = [], 0
    for event in events:
        explained += event["meta_info"]["explanations"]
        assert len(event["meta_info"]["explanations"]) == len(event["output_ids"]) - num_before  # all but what is new
        num_before = len(event["output_ids"])
    assert explained == whole["meta_info"]["explanations"]


def test_samples_and_batches_have_explanations_of_their_own(app):
    answers = app.generate(input_ids=[PROMPT, PROMPT[1:]], sampling_params=SAMPLING | {"n": 2}, explain=True)
    assert len(answers) == 4
    for answer in answers:
        meta = answer["meta_info"]
        assert recomputed(meta["explanations"], meta["sampling_seed"]) == answer["output_ids"]


def test_forced_tokens_are_said_to_be_the_grammar_s(app):
    params = SAMPLING | {"regex": "ab(cd|xy)ef", "ignore_eos": False}
    answer = app.generate(input_ids=PROMPT, sampling_params=params, explain=True)
    meta = answer["meta_info"]
    assert recomputed(meta["explanations"], meta["sampling_seed"]) == answer["output_ids"]
    chosen_by = [why["chosen_by"] for why in meta["explanations"]]
    assert chosen_by.count("grammar") == meta["forced_tokens"] > 0
    assert "draw" in chosen_by
    drawn = next(why for why in meta["explanations"] if why["chosen_by"] == "draw")
    assert "grammar" in [stage["stage"] for stage in drawn["stages"]]
    assert all("stages" not in why for why in meta["explanations"] if why["chosen_by"] == "grammar")


def test_with_log_probabilities_too_each_token_has_both(app):
    params = SAMPLING | {"regex": "ab(cd|xy)ef", "ignore_eos": False}
    asked = {"input_ids": PROMPT, "sampling_params": params, "explain": True, "return_logprob": True}
    meta = app.generate(**asked)["meta_info"]
    ids = [token_id for _, token_id, _ in meta["output_token_logprobs"]]
    assert [why["token_id"] for why in meta["explanations"]] == ids
    last = app.events(**asked)[-1]["meta_info"]
    assert [token_id for _, token_id, _ in last["output_token_logprobs"]] == ids


def test_temperature_zero_takes_the_best(app):
    answer = app.generate(input_ids=PROMPT, sampling_params=SAMPLING | {"temperature": 0}, explain=True)
    explained = answer["meta_info"]["explanations"]
    assert {why["chosen_by"] for why in explained} == {"best"}
    assert [why["random"] for why in explained] == [None] * 12
    assert recomputed(explained, 5) == answer["output_ids"]


def body_of(route):
    said = {"messages": [{"role": "user", "content": "abc"}]} if route == CHAT else {"prompt": "abc"}
    return said | {"max_tokens": 12, "seed": 5, "ignore_eos": True, "temperature": 0.9, "top_p": 0.9, "explain": True}


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_openai_s_choices_have_explanations_whole_and_in_chunks(app, route):
    answer = app.post(route, **body_of(route), n=2, return_token_ids=True).json()
    for choice in answer["choices"]:
        assert recomputed(choice["explanations"], choice["sampling_seed"]) == choice["token_ids"]
    chunks = parse_events(app.post(route, **body_of(route), n=2, stream=True).text)
    for choice in answer["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [why for part in parts for why in part.get("explanations", ())] == choice["explanations"]
    plain = app.post(route, **body_of(route) | {"explain": False}).json()["choices"][0]
    assert "explanations" not in plain


def test_more_explanations_than_an_answer_may_have_are_refused(fake):
    params = {"max_new_tokens": 2000, "n": MAX_EXPLAINED_TOKENS // 2000 + 1}
    response = fake.post(text="abc", sampling_params=params, explain=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "explain")
    assert str(MAX_EXPLAINED_TOKENS) in response.json()["error"]["message"]


def test_the_end_token_is_explained_too(fake):
    answer = fake.generate(text="say:hé", explain=True)
    assert [why["token_id"] for why in answer["meta_info"]["explanations"]] == [*"hé".encode(), EOS]


UNSET = {"ignore_eos": False, "sampling_seed": 5, "temperature": 0.9, "top_p": 0.9, "max_new_tokens": 12}


def asking(name, **further):
    """The route of a dialect, and a body that asks it for explanations."""
    route, body = DIALECTS[name]
    place = {"Ollama": "options", "TGI": "parameters"}.get(name.partition("'")[0].partition(",")[0])
    if place is None:
        return route, body | {"model": "default", "explain": True} | further
    return route, body | {"model": "default", place: body[place] | {"explain": True}} | further


def explanations_in(answer):
    """All explanations that stand somewhere in an answer, or in an event."""
    if isinstance(answer, list):
        return [each for item in answer for each in explanations_in(item)]
    if not isinstance(answer, dict):
        return []
    told = answer.get("explanations", [])
    told = [each for item in told for each in item] if told and isinstance(told[0], list) else told
    return told + [each for key, item in answer.items() if key != "explanations" for each in explanations_in(item)]


@pytest.fixture(scope="module")
def wanted(app):
    """What /generate explains of the same prompt, seed and parameters, without and with `ignore_eos` and `top_k`."""

    def explained(name):
        changed = {"Anthropic": {"ignore_eos": True}}.get(name, {"top_k": 40} if name.startswith("Ollama") else {})
        body = {"text": "abc", "sampling_params": UNSET | changed, "explain": True}
        return app.generate(**body)["meta_info"]["explanations"]

    return explained


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_explains_the_tokens_that_generate_explains(app, wanted, name):
    route, body = asking(name, **({"stream": False} if name.startswith("Ollama") else {}))
    answer = app.post(route, **body)
    assert answer.status_code == 200, answer.text
    assert explanations_in(answer.json()) == wanted(name)


@pytest.mark.parametrize("name", DIALECTS)
def test_streams_of_every_dialect_have_each_explanation_once(app, wanted, name):
    route, body = asking(name, stream=True)
    events = lines_of(app.post(route, **body).text)
    assert explanations_in(events) == wanted(name)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_not_asked_for_is_in_no_answer(app, name):
    route, body = DIALECTS[name]
    assert "explanations" not in app.post(route, **body | {"model": "default"}).text


def test_each_text_of_mindie_and_tgi_has_its_own(app):
    route, body = asking("MindIE", n=2)
    texts = app.post(route, **body).json()["explanations"]
    first, second = [[why["token_id"] for why in explained] for explained in texts]
    assert first != second
    route, body = asking("TGI")
    details = body["parameters"] | {"details": True, "best_of": 2}
    answer = app.post(route, **body | {"parameters": details}).json()["details"]
    for output in (answer, *answer["best_of_sequences"]):
        assert [why["token_id"] for why in output["explanations"]] == [token["id"] for token in output["tokens"]]


# ---- entropy and sampling masks


def test_tokens_of_sampling_masks_count_as_what_an_answer_shows():
    """Answers are written off the event loop by this number."""
    spec = LogprobSpec(support=True)
    output = Output(
        msgspec.structs.replace(make_request("r", logprobs=spec), params=SamplingParams(top_k=4096)), 0, "r"
    )
    output.output_logprobs = [PositionLogprobs((0.0, 1), support=tuple(range(4096)))] * 8
    assert output.num_logprobs >= 8 * 4096


@pytest.mark.parametrize("cut", [{"top_k": 6, "top_p": 1.0}, {"top_k": 40, "top_p": 0.5}, {"temperature": 0}])
def test_entropy_and_sampling_masks_are_those_of_the_distribution_that_is_drawn_from(app, cut):
    """The distribution is that of the log-probabilities of all tokens, which are before the cuts."""
    asked = {
        "input_ids": PROMPT,
        "sampling_params": SAMPLING | cut,
        "return_entropy": True,
        "return_sampling_mask": True,
    }
    everything = {"return_logprob": True, "token_ids_logprob": list(range(VOCAB_SIZE))}
    answer = app.generate(**asked, **everything)
    meta, num_seen = answer["meta_info"], 0
    for token_id, entropy, mask, share, row in zip(
        answer["output_ids"],
        meta["output_token_entropy"],
        meta["output_token_sampling_mask"],
        meta["output_token_sampling_logprobs"],
        meta["output_token_ids_logprobs"],
        strict=True,
    ):
        weights = {token: math.exp(value) for value, token, _ in row if value is not None}
        assert entropy == pytest.approx(-math.fsum(p * math.log(p) for p in weights.values() if p > 0))
        best = sorted(weights, key=lambda token: (-weights[token], token))
        size, total = 0, 0.0
        while not cut.get("temperature", 1) or size < cut["top_k"]:
            total += weights[best[size]]
            size += 1
            if "temperature" in cut or total >= cut["top_p"]:
                break
        assert mask == sorted(best[:size])
        assert share == pytest.approx(math.log(weights[token_id] / math.fsum(weights[token] for token in mask)))
        num_seen += 1
    assert num_seen == meta["output_token_sampling_mask_length"] == 12
    alone = app.generate(**asked)["meta_info"]
    assert "output_token_logprobs" not in alone
    assert [alone[name] == meta[name] for name in ("output_token_entropy", "output_token_sampling_mask")] == [True] * 2
    last = app.events(**asked)[-1]["meta_info"]
    assert last["output_token_sampling_mask"] == meta["output_token_sampling_mask"]
    plain = app.generate(input_ids=PROMPT, sampling_params=SAMPLING | cut)
    assert plain["output_ids"] == answer["output_ids"]
    assert not any("entropy" in name or "mask" in name for name in plain["meta_info"])


def test_a_mask_may_be_asked_for_one_prompt_of_a_batch_and_needs_a_bound(app):
    asked = {"input_ids": [PROMPT, PROMPT[1:]], "return_sampling_mask": [False, True]}
    first, second = app.generate(**asked, sampling_params=SAMPLING | {"top_k": 3})
    assert "output_token_sampling_mask" not in first["meta_info"]
    assert {len(mask) for mask in second["meta_info"]["output_token_sampling_mask"]} <= {1, 2, 3}
    refused = app.post(**asked, sampling_params=SAMPLING)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_sampling_mask")
