"""Cohere's, Jina's and TEI's routes: the same scores as SGLang's `/v1/rerank`, each in its own form."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest
from app_under_test import App
from kinds_of_servers import other_servers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tureen.app.shared_paths import share
from tureen.dialects.cohere.rerank import text_of
from tureen.http.dialect import Entry

QUERY, DOCUMENTS = "ab", ["cd", "ab", "aab", "x"]
ABOUT_THE_MODEL = "this is a generative model"


@pytest.fixture(scope="module")
def servers():
    with other_servers() as opened:
        yield opened


@pytest.fixture(scope="module")
def app(servers) -> App:
    return servers["embedding"]


def post(app: App, path: str, status: int = 200, **body: Any) -> Any:
    response = app.post(path, **body)
    assert response.status_code == status, response.text
    return response.json()


def ranking(app: App, **body: Any) -> list[tuple[int, float]]:
    """The order and the scores by SGLang's route."""
    entries = post(app, "/v1/rerank", query=QUERY, documents=DOCUMENTS, **body)
    return [(entry["index"], entry["score"]) for entry in entries]


def results(answer: dict[str, Any]) -> list[tuple[int, float]]:
    return [(entry["index"], entry["relevance_score"]) for entry in answer["results"]]


@pytest.mark.parametrize("path", ["/v2/rerank", "/cohere/v2/rerank", "/cohere/v1/rerank", "/v1/reranking",
                                  "/reranking", "/jina/v1/rerank"])  # fmt: skip
@pytest.mark.parametrize("top_n", [None, 2, 9])
def test_the_scores_are_those_of_v1_rerank(app, path, top_n):
    answer = post(app, path, query=QUERY, documents=DOCUMENTS, top_n=top_n, model="fake-embedder")
    assert results(answer) == ranking(app)[:top_n]


def test_cohere_s_answer_has_its_id_and_what_it_bills(app):
    answer = post(app, "/v2/rerank", query=QUERY, documents=["a"] * 101)
    assert answer.keys() == {"id", "results", "meta"}
    assert answer["meta"]["billed_units"] == {"search_units": 2}
    assert answer["meta"]["api_version"]["version"] == "2"
    assert set(answer["results"][0]) == {"index", "relevance_score"}


def test_a_document_of_cohere_s_is_cut_to_its_first_tokens(app):
    answer = post(app, "/v2/rerank", query="ab", documents=["abcccc", "ab"], max_tokens_per_doc=2)
    assert results(answer) == [(0, pytest.approx(1)), (1, pytest.approx(1))]


LONG = "ab" + "c" * 100_000


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("embedding", "/v2/rerank", {"query": "ab", "documents": [LONG], "max_tokens_per_doc": 2}),
        ("embedding", "/v1/embeddings", {"input": [LONG, LONG], "truncate_prompt_tokens": 2}),
        ("embedding", "/embed", {"inputs": LONG, "truncate": True}),
        ("embedding", "/similarity", {"inputs": {"source_sentence": LONG, "sentences": [LONG]},
                                      "parameters": {"truncate": True}}),
        ("classifying", "/predict", {"inputs": [LONG, LONG], "truncate": True}),
    ],
)  # fmt: skip
def test_no_more_of_a_text_is_tokenized_than_is_kept(servers, monkeypatch, kind, path, body):
    seen = []
    tokenizer = servers[kind].state.context.tokenizer

    class Counting:
        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._backend, name)
            if not name.startswith("encode"):
                return found

            def counted(text: str | list[str], **options: Any) -> Any:
                seen.append(len("".join(text)))
                return found(text, **options)

            return counted

    monkeypatch.setattr(tokenizer, "_backend", Counting(tokenizer.backend))
    post(servers[kind], path, **body)
    assert 0 < sum(seen) < 2000


def test_a_field_that_is_named_twice_is_read_once():
    assert text_of(0, {"a": "b"}, ["a"] * 64) == "a: b"


def test_a_document_that_the_model_cannot_take_is_cut(app):
    assert len(post(app, "/v2/rerank", query="ab", documents=["a" * 99])["results"]) == 1
    assert len(post(app, "/v1/reranking", query="ab", documents=["a" * 99])["results"]) == 1


def test_documents_of_cohere_s_first_version_may_be_objects(app):
    documents = ["ab", {"text": "cd", "kind": "ab"}]
    answer = post(app, "/cohere/v1/rerank", query="ab", documents=documents, return_documents=True)
    assert [entry["document"] for entry in answer["results"]] == [{"text": "ab"}, documents[1]]
    fields = post(app, "/cohere/v1/rerank", query="ab", documents=documents[1:] * 2, rank_fields=["kind"])
    assert [score for _, score in results(fields)] == pytest.approx([results(
        post(app, "/v2/rerank", query="ab", documents=["kind: ab"]))[0][1]] * 2)  # fmt: skip


def test_jina_s_answer_has_texts_unless_they_are_not_wanted(app):
    answer = post(app, "/v1/reranking", query="ab", documents=["cd", {"text": "ab"}])
    assert [entry["document"] for entry in answer["results"]] == [{"text": "ab"}, {"text": "cd"}]
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    bare = post(app, "/v1/reranking", query="ab", documents=["cd"], return_documents=False)
    assert set(bare["results"][0]) == {"index", "relevance_score"}


@pytest.mark.parametrize(
    ("path", "key", "status", "body"),
    [
        ("/v2/rerank", "message", 400, {"documents": []}),
        ("/v2/rerank", "message", 400, {"documents": [{"text": "a"}]}),
        ("/v2/rerank", "message", 400, {"documents": ["a"], "top_n": 0}),
        ("/cohere/v1/rerank", "message", 400, {"documents": [{"txt": "a"}]}),
        ("/cohere/v1/rerank", "message", 400, {"documents": ["a"], "max_chunks_per_doc": 3}),
        ("/v1/reranking", "detail", 400, {"documents": [{"image": "a"}]}),
        ("/rerank", "error", 422, {"texts": []}),
        ("/rerank", "error", 422, {"texts": ["a"], "raw_scores": True}),
        ("/rerank", "error", 422, {"texts": ["a"], "truncate": True, "truncation_direction": "left"}),
    ],
)
def test_an_error_has_the_form_of_the_api_and_names_the_field(app, path, key, status, body):
    message = post(app, path, status, query=QUERY, **body)[key]
    assert any(name in message for name in body)


@pytest.mark.parametrize("path", ["/v2/rerank", "/v1/reranking", "/cohere/v1/rerank"])
def test_a_model_that_only_writes_does_not_rank(path):
    with App() as app:
        assert ABOUT_THE_MODEL in app.post(path, query="a", documents=["b"]).text
        assert post(app, "/rerank", 424, query="a", texts=["b"])["error_type"] == "backend"


def test_a_field_of_the_body_says_whose_rerank_it_is(app):
    tei = post(app, "/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
    assert [(entry["index"], entry["score"]) for entry in tei] == ranking(app)
    assert [entry["text"] for entry in tei] == [DOCUMENTS[index] for index, _ in ranking(app)]
    ours = post(app, "/rerank", query=QUERY, documents=DOCUMENTS)
    assert [(entry["index"], entry["score"]) for entry in ours] == ranking(app)


@pytest.mark.parametrize(
    ("path", "shapes"), [("/rerank", {"Error", "PlainError"}), ("/tokenize", {"Error", "LlamaError"})]
)
def test_a_path_that_apis_share_describes_the_errors_of_each(app, path, shapes):
    responses = app.request("GET", "/openapi.json").json()["paths"][path]["post"]["responses"]
    schema = responses["400"]["content"]["application/json"]["schema"]
    assert {shape["$ref"].rpartition("/")[2] for shape in schema["anyOf"]} == shapes


def test_a_body_that_is_no_object_is_refused_by_the_route_that_has_the_path(app):
    for content in (b"", b"[]", b"{", b'"texts"'):
        response = app.request("POST", "/rerank", content=content, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_fields_that_say_nothing_of_the_api_cost_no_memory_where_it_is_chosen():
    async def answer(request: Request) -> Response:
        return PlainTextResponse("ours")

    host, guest = (Entry("/rerank", answer, access="user", methods=["POST"]) for _ in range(2))
    guest.fields = ("texts",)
    [joined] = share([host, guest])
    body = ("{" + ",".join(f'"{number}": 1' for number in range(100_000)) + "}").encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    tracemalloc.start()
    try:
        asyncio.run(joined.endpoint(Request({"type": "http", "headers": []}, receive)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 * len(body)


def test_raw_scores_are_the_logits_behind_the_scores(servers):
    app = servers["ranking"]
    scores, logits = (
        post(app, "/rerank", query="ab", texts=["aa", "b"], raw_scores=raw, truncate=True) for raw in (False, True)
    )
    assert [entry["index"] for entry in scores] == [entry["index"] for entry in logits]
    assert [entry["score"] for entry in logits] == [3, 1]  # how often the first letter is in query and text
    assert [entry["score"] for entry in scores] == pytest.approx([0.9525741, 0.7310586])


def test_tei_embeds_texts_and_ids(app):
    by_openai = post(app, "/v1/embeddings", input=["ab", "aac"])["data"]
    vectors = post(app, "/embed", inputs=["ab", "aac"])
    for vector, entry in zip(vectors, by_openai, strict=True):
        assert vector == pytest.approx(entry["embedding"])
    assert post(app, "/embed", inputs="ab") == vectors[:1]
    assert post(app, "/embed", inputs=[97, 98], normalize=False) == [[1, 1, 0, 0]]
    assert "longer" in post(app, "/embed", 422, inputs="a" * 99)["error"]
    assert post(app, "/embed", inputs="a" * 99, truncate=True) == [[1, 0, 0, 0]]


def test_tei_s_similarity_is_the_cosine_of_embeddings(app):
    sentences = ["cd", "ab", "aab"]
    found = post(app, "/similarity", inputs={"source_sentence": "ab", "sentences": sentences})
    source, *vectors = post(app, "/embed", inputs=["ab", *sentences])
    assert found == pytest.approx([sum(a * b for a, b in zip(source, vector, strict=True)) for vector in vectors])
    assert found[:2] == pytest.approx([0, 1])
    empty = post(app, "/similarity", 422, inputs={"source_sentence": "ab", "sentences": []})
    assert "inputs.sentences" in empty["error"]
    many = post(app, "/similarity", 422, inputs={"source_sentence": "ab", "sentences": ["a"] * 2048})
    assert "inputs.sentences" in many["error"]
    assert "2047" in many["error"]
    cut = {"inputs": {"source_sentence": "a" * 99, "sentences": ["a"]}, "parameters": {"truncate": True}}
    assert post(app, "/similarity", **cut) == pytest.approx([1])


TOO_LONG = "a" * 99
WRONG_SIMILARITIES = {
    "inputs.source_sentence": {"inputs": {"source_sentence": TOO_LONG, "sentences": ["a"]}},
    "inputs.sentences[1]": {"inputs": {"source_sentence": "a", "sentences": ["a", TOO_LONG]}},
    "inputs.sentences[0]": {"inputs": {"source_sentence": "a", "sentences": [""]}},
    "parameters.prompt_name": {"inputs": {"source_sentence": "a", "sentences": ["a"]},
                               "parameters": {"prompt_name": "none"}},
    "parameters.truncation_direction": {"inputs": {"source_sentence": "a", "sentences": ["a"]},
                                        "parameters": {"truncate": True, "truncation_direction": "left"}},
}  # fmt: skip


def test_errors_of_tei_s_similarity_name_its_own_fields(app):
    errors = {field: post(app, "/similarity", 422, **body)["error"] for field, body in WRONG_SIMILARITIES.items()}
    assert {field: error for field, error in errors.items() if not error.startswith(field)} == {}
    assert post(app, "/embed", 422, inputs=["a", TOO_LONG])["error"].startswith("inputs[1]: The input (99 ")


@pytest.mark.parametrize(("path", "reason"), [("/embed_sparse", "SPLADE"), ("/embed_all", "single tokens")])
def test_what_tei_has_and_this_server_has_not_says_why(app, path, reason):
    refused = post(app, path, 424, inputs="a")
    assert reason in refused["error"]
    assert refused["error_type"] == "backend"


def test_tei_s_info_tells_the_kind_of_model(servers):
    kinds = {name: server.request("GET", "/info").json() for name, server in servers.items()}
    assert kinds["embedding"]["model_type"] == {"embedding": {"pooling": "mean"}}
    assert kinds["classifying"]["model_type"]["classifier"]["id2label"]["1"] == "poor"
    assert kinds["ranking"]["model_type"] == {"reranker": {"id2label": {"0": "good"}, "label2id": {"good": 0}}}
    assert kinds["embedding"]["max_input_length"] == servers["embedding"].state.context.capacity
    assert kinds["filling"]["max_total_tokens"] == servers["filling"].state.context.capacity
    assert "model_type" not in kinds["filling"]


def test_classify_reads_text_as_another_name_of_input(servers):
    app = servers["classifying"]
    texts = ["bb", ["a", "b"]]
    assert post(app, "/classify", text=texts)["data"] == post(app, "/classify", input=texts)["data"]
    assert post(app, "/classify", text="bb", input="bb")["data"] == post(app, "/classify", input="bb")["data"]
    for body, field in (({"text": ["a", ""]}, "text[1]"), ({"text": "a", "input": "b"}, "text"), ({}, "input")):
        assert post(app, "/classify", 400, **body)["error"]["param"] == field


def test_tei_predicts_labels_of_a_text_a_pair_and_a_batch(servers):
    app = servers["classifying"]
    [best, *_] = post(app, "/predict", inputs="bb")
    assert best["label"] == "poor"
    pair = post(app, "/predict", inputs=["a", "b"], raw_scores=True)
    assert {entry["label"]: entry["score"] for entry in pair} == {"bad": 1, "poor": 1, "fair": 0, "good": 0}
    batch = post(app, "/predict", inputs=[["bb"], ["a", "b"]])
    assert batch == [post(app, "/predict", inputs="bb"), post(app, "/predict", inputs=["a", "b"])]
    assert "inputs" in post(app, "/predict", 422, inputs=["a", "b", "c"])["error"]
    assert sum(entry["score"] for entry in batch[0]) == pytest.approx(1)
