"""Engines with a draft model, and random requests to them."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import msgspec
import tiny_adapters
from byte_tokenizer import EOS, make_byte_tokenizer
from inline_compiler import InlineCompiler
from real_app import SETTINGS, write_model
from runner_driver import folder_source
from world import make_request

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.devices.base import resolve_device
from tureen.engine.draft_model import DraftModel
from tureen.engine.engine import Engine
from tureen.engine.guessing import GuessCost, Guesser
from tureen.engine.scheduler import Drafters
from tureen.grammar.base import GrammarSpec
from tureen.kernels.cpu import native
from tureen.runner.load import load_runner
from tureen.runner.native import load_draft

PARAMS = {
    "temperature": [0.0, 0.7, 1.0, 1.6],
    "top_p": [1.0, 0.9],
    "top_k": [-1, 20],
    "min_p": [0.0, 0.05],
    "frequency_penalty": [0.0, 0.0, 1.5],
    "repetition_penalty": [1.0, 1.0, 1.4],
    "min_new_tokens": [0, 8],
    "ignore_eos": [False, True],
    "stop_token_ids": [(), tuple(range(30))],
    "logit_bias": [{}, {}, {97: 3.0, 98: -4.0}],
}
GRAMMARS = [
    None,
    None,
    GrammarSpec("regex", "[a-f]+, and then again ([0-9]é)+"),
    GrammarSpec("choice", '["abc", "abd"]'),
]
SAME, OTHER = 3, 4  # seeds of the draft model's weights; the model's own is SAME


def write_models(folder):
    """Writes two models of one vocabulary, by the seeds of their weights, and an adapter."""
    tiny_adapters.write_adapter(write_model(folder / str(SAME), SAME), folder / "adapter")
    write_model(folder / str(OTHER), OTHER)


def make_engine(folders, drafting, **settings):
    """An engine, with the draft model whose weights have that seed; None: without. Its clocks find drafts cheap."""
    config = Config(model_path=str(folders / str(SAME)), **(SETTINGS | settings))
    runner = load_runner(folder_source(folders / str(SAME)), config)
    engine = Engine(runner, make_byte_tokenizer(), eos_token_ids=(EOS,), token_budget=16, compiler=InlineCompiler())
    engine.call("load_adapter", name="red", path=str(folders / "adapter"))
    if drafting is not None:
        ticks = count()
        engine.rows.guesser = guesser = Guesser(native.require(), clock=lambda: float(next(ticks)))
        guesser._times = {num_rows: GuessCost(1.0, 0.0) for num_rows in range(1, 10)}
        source = folder_source(folders / str(drafting))
        device = resolve_device("cpu", config.num_threads)
        loaded = load_draft(source, config, device, lambda *_: None, runner)
        guesser.draft_model = DraftModel(loaded, runner.capacity().vocab_size, 16, clock=lambda: 0.0)
        guesser.draft_model.expect(1.0)
        engine.scheduler.drafters = Drafters(lambda sequence, most, num_rows: (), guesser.draft)
    return engine


def run(engine, requests, *, between=lambda step: None):
    """The tokens of each request, its log-probabilities, and the reason why it ended."""
    answers = {request.id: ([], [], None) for request in requests}
    for request in requests:
        engine.add(request)
    for step in range(2000):
        if not (engine.has_work or engine.is_preparing):
            return answers
        between(step)
        engine.prepare()
        for delta in engine.step():
            tokens, logprobs, _ = answers[delta.id]
            tokens += delta.token_ids
            logprobs += delta.output_logprobs
            answers[delta.id] = tokens, logprobs, delta.finish
    raise AssertionError("the engine does not end")


def requests_of(rng, num_requests=5):
    requests = []
    for index in range(num_requests):
        prompt = rng.choice([b"Once there was a king ", b"Once there was a", b"Another"]) * rng.randrange(1, 4)
        params = {name: rng.choice(values) for name, values in PARAMS.items()}
        if not index:  # it has no grammar either: there is always a request that can take guesses
            params |= {"ignore_eos": True, "stop_token_ids": ()}
        logprobs = rng.choice([None, LogprobSpec(top=2)])
        request = make_request(
            f"r{index}", tuple(prompt), max_new_tokens=24, seed=rng.randrange(99), logprobs=logprobs, **params
        )
        adapter = rng.choice(["", "", "red"])
        requests.append(
            msgspec.structs.replace(
                request, grammar=rng.choice(GRAMMARS) if index else None, grammar_field="regex", adapter=adapter
            )
        )
    return requests


class Given:
    """A running sequence, as the draft model sees it."""

    slot, embedded, terms = 0, None, SimpleNamespace(end_token_ids=())

    def __init__(self, text):
        self.token_ids = list(text)
        self.table = SimpleNamespace(pages=tuple(range(20)))
        self.request = make_request("r", self.token_ids, temperature=1.0, seed=5)

    @property
    def num_tokens(self):
        return len(self.token_ids)
