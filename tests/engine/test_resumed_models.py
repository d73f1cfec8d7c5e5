"""Outputs that another engine goes on with, over real models: the sampler, its random numbers, the K/V cache."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from types import SimpleNamespace

import lanes
import msgspec
import pytest
import shape_drawings
import tiny_adapters
from byte_tokenizer import EOS, make_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_compiler import InlineCompiler
from real_app import SETTINGS, write_model
from resumed_pieces import pieces
from runner_driver import folder_source
from samples import either
from world import going_on, make_request

from tureen import build
from tureen.config import Config
from tureen.config_sources import load
from tureen.contract.types import LogprobSpec
from tureen.dialects.sglang.generate import prepare
from tureen.engine.engine import Engine
from tureen.grammar.base import GrammarSpec
from tureen.log import no_progress
from tureen.logit_processor import CustomLogitProcessor
from tureen.metrics import Metrics
from tureen.recipes import shapes_vlm
from tureen.requests.state import ServerState, make_context
from tureen.runner.load import load_runner
from tureen.serving.streams import merge

PROMPT = tuple(b"Once there was a")
LENGTH = 14
ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"
PARAMS = {
    "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    "top_p": st.sampled_from([1.0, 0.9]),
    "top_k": st.sampled_from([-1, 20]),
    "min_p": st.sampled_from([0.0, 0.05]),
    "frequency_penalty": st.sampled_from([0.0, 1.5, -0.5]),
    "presence_penalty": st.sampled_from([0.0, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 1.4, 0.0]),
    "min_new_tokens": st.integers(0, LENGTH),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.sampled_from([(), tuple(range(60))]),
    "stop": st.sampled_from([(), ("ab", "\x00", "é")]),
    "stop_regex": st.sampled_from([(), ("[a-f]{2}",)]),
    "logit_bias": st.sampled_from([{}, {97: 3.0, 98: -4.0, 256: 2.0}]),
    "allowed_token_ids": st.sampled_from([None, None, tuple(range(40, 120))]),
    "no_stop_trim": st.booleans(),
}
PROCESSORS = [
    ("", None),
    ("", None),
    ("no_repeat_ngram", {"ngram_size": 2}),
    ("disallowed_tokens", {"token_ids": list(range(100, 180))}),
]
GRAMMARS = [
    None,
    None,
    GrammarSpec("regex", "[a-f]+, and then again ([0-9]é)+"),
    GrammarSpec("choice", '["abc", "abd"]'),
]
MATES = [
    make_request(f"mate {index}", tuple(text), max_new_tokens=9, seed=index, frequency_penalty=1.0)
    for index, text in enumerate((b"Once there was a king", b"Another", b"Once"))
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """One that runs undisturbed, and one that continues its answers."""
    folder = tmp_path_factory.mktemp("resumed")
    tiny_adapters.write_adapter(write_model(folder / "model", 3), folder / "adapter")
    config = Config(model_path=str(folder / "model"), **SETTINGS)
    made = []
    for _ in range(2):
        runner = load_runner(folder_source(folder / "model"), config)
        engine = Engine(runner, make_byte_tokenizer(), eos_token_ids=(EOS,), token_budget=16, compiler=InlineCompiler())
        engine.call("load_adapter", name="red", path=str(folder / "adapter"))
        made.append(engine)
    yield made
    for engine in made:
        engine.close()


@pytest.mark.sampled
@settings(deadline=None, max_examples=either(40, 10))
@given(
    params=st.fixed_dictionaries(PARAMS),
    processor=st.sampled_from(PROCESSORS),
    grammar=st.sampled_from(GRAMMARS),
    logprobs=st.none()
    | st.builds(
        LogprobSpec,
        prompt_start=st.sampled_from([-1, 0, 5]),
        top=st.integers(0, 2),
        token_ids=st.just((97,)),
        mode=st.sampled_from(["processed", "raw"]),
    ),
    adapter=st.sampled_from(["", "red"]),
    hidden_states=st.sampled_from(["none", "none", "last", "all"]),
    seed=st.integers(0, 2**40),
    is_cold=st.booleans(),
    mates=st.sampled_from([[], MATES]),
)
def test_every_bit_is_that_of_the_undisturbed_run(
    engines, params, processor, grammar, logprobs, adapter, hidden_states, seed, is_cold, mates
):
    one, other = engines
    name, custom_params = processor
    request = make_request(
        "r", PROMPT, max_new_tokens=LENGTH, seed=seed, logprobs=logprobs, custom_params=custom_params, **params
    )
    fields = {"adapter": adapter, "hidden_states": hidden_states, "processor": name}
    request = msgspec.structs.replace(request, grammar=grammar, grammar_field="regex", **fields)
    one.call("flush_cache")
    whole = pieces(one, request)
    for cut in range(1, len(whole)):
        if is_cold:
            other.call("flush_cache")
        sent = whole[:cut]
        rest = pieces(other, going_on(request, merge(sent)), *mates)
        assert merge([*sent, *rest]) == merge(whole), cut


# ---- the models that come with tureen


class Written:
    """Requests as `/generate` makes them; one engine that runs undisturbed, and one that continues its answers."""

    def __init__(self, **settings):
        config = load({"device": "cpu", "num_threads": 1, "max_total_tokens": 4096, **settings}, environment={})
        with lanes.WATCH.pause():  # the first run on a machine downloads the model
            model = build.find_model(config)
        (self.one, info), (self.other, _) = (build.make_engine(config, model=model) for _ in range(2))
        media = build.media_loader(config, model)
        client = SimpleNamespace(call=None, abort=None, info=info, num_live=0)
        self.runner = asyncio.Runner()
        self.state = ServerState(client, make_context(model.tokenizer, info, config, media), Metrics("m"), media)

    def requests(self, body):
        plan = self.runner.run(prepare(body, self.state)).plan
        media = plan.media or [()] * len(plan.requests)
        return [
            msgspec.structs.replace(request, id=f"r{index}", media=pictures)
            for index, (request, pictures) in enumerate(zip(plan.requests, media, strict=True))
        ]

    def check_every(self, step, text, sampling_params, **fields):
        """Cuts after every `step` deltas. Returns the answers of the undisturbed runs."""
        answers = []
        for request in self.requests({"text": text, "sampling_params": sampling_params, **fields}):
            whole = pieces(self.one, request)
            assert merge(whole).finish.type in ("stop", "length")
            assert len(whole) > 1
            for cut in range(1, len(whole), step):
                sent = whole[:cut]
                rest = pieces(self.other, going_on(request, merge(sent)))
                assert merge([*sent, *rest]) == merge(whole), cut
            answers.append(merge(whole))
        return answers

    def close(self):
        self.runner.run(self.state.common.close())
        self.runner.close()
        self.one.close()
        self.other.close()


@pytest.fixture(scope="module")
def writer(default_model_source):
    made = Written(lora_paths=(f"json={ADAPTERS / 'json'}",), enable_custom_logit_processor=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def seer(default_model_source):
    with lanes.WATCH.pause():  # the first run on a machine downloads the vision model
        folder = shapes_vlm.build(default_model_source.path.parents[2], no_progress)
    made = Written(model_path=str(folder))
    yield made
    made.close()


CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


@pytest.mark.model
@pytest.mark.parametrize("return_logprob", [False, True])
def test_samples_under_a_schema_go_on(writer, return_logprob):
    params = {"temperature": 0.9, "n": 2, "sampling_seed": 3, "max_new_tokens": 16, "json_schema": SCHEMA}
    prompt = CHAT.format("Describe Warsaw as JSON.")
    assert len(writer.check_every(6, prompt, params, return_logprob=return_logprob)) == 2


ALTERNATING = """
class Alternating(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            logits[row, len(params["__req__"].output_ids) % 2 :: 2] = -float("inf")
        return logits
"""
"""Odd and even tokens take turns. As a client's script: a class of this module would be sent by its name."""


@pytest.mark.model
@pytest.mark.usefixtures("patient_sandbox")
def test_the_code_of_a_client_goes_on(writer):
    params = {"temperature": 0.8, "sampling_seed": 1, "max_new_tokens": 12, "frequency_penalty": 0.6}
    scope = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor}
    exec(ALTERNATING, scope)
    code = scope["Alternating"].to_str()
    [whole] = writer.check_every(5, "Once upon a time", params, custom_logit_processor=code)
    assert [token_id % 2 for token_id in whole.token_ids] == [1, 0] * 6


@pytest.mark.model
def test_an_adapter_goes_on(writer):
    params = {"temperature": 0, "max_new_tokens": 16, "stop": ["kind"]}
    [whole] = writer.check_every(5, CHAT.format("Who is Ada Lovelace?"), params, lora_path="json")
    assert whole.text.startswith('{"')


@pytest.mark.model
def test_what_is_said_of_a_picture_goes_on(seer):
    file = io.BytesIO()
    drawing = shape_drawings.load().draw(shape_drawings.UNSEEN, "one")
    drawing.picture.save(file, "PNG")
    prompt = CHAT.format("<image>\nDescribe this image in a very short sentence.")
    params = {"temperature": 0, "max_new_tokens": 16}
    [whole] = seer.check_every(2, prompt, params, image_data=base64.b64encode(file.getvalue()).decode())
    assert whole.text.strip() == drawing.sentence
