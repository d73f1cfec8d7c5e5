"""Servers of models of every kind, for tests that go through the routes of all dialects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import httpx
from app_under_test import App
from byte_tokenizer import VOCAB_SIZE
from embedding_engine import make_embedding_engine

from tureen.contract.types import Classifier

FILL_IN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
EMBEDDING = ("/v1/rerank", "/encode", "/v2/rerank", "/cohere/v1/rerank", "/v1/reranking", "/embed", "/similarity")
OTHERS = {"/rerank": "ranking", "/predict": "classifying", "/infill": "filling"}
"""Paths that a model which writes text does not answer, and the server that does; EMBEDDING: all have the same."""


class Servers(NamedTuple):
    """A server that generates text, and others for the routes that it does not answer, by their names."""

    generating: App
    others: Mapping[str, App]

    def request(self, method: str, path: str, **how: Any) -> httpx.Response:
        name = "embedding" if path in EMBEDDING else OTHERS.get(path)
        return (self.generating if name is None else self.others[name]).request(method, path, **how)


@contextlib.contextmanager
def other_servers(**settings: Any) -> Iterator[dict[str, App]]:
    """Opens the servers that do not generate text from a prompt."""
    facts = {
        "embedding": {},
        "ranking": {"classifier": Classifier(("good",))},
        "classifying": {"classifier": Classifier(("bad", "poor", "fair", "good"))},
    }
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(App(factory=make_embedding_engine, facts=fact, **settings))
            for name, fact in facts.items()
        }
        filling = App(special=FILL_IN, facts={"vocab_size": VOCAB_SIZE + len(FILL_IN)}, **settings)
        opened["filling"] = stack.enter_context(filling)
        yield opened
