"""What the default model does, a larger one does too, such as Qwen2.5-Coder-0.5B-Instruct as GGUF."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import httpx
import jsonschema
import numpy as np
import pytest
from safetensors.numpy import save_file
from server_process import ServerProcess

VARIABLE = "TUREEN_LARGER_MODEL"
FILE = os.environ.get(VARIABLE, "")

GUARDS = ("models", "runner", "kernels", "layers", "lora", "grammar", "dialects")

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not FILE, reason=f"{VARIABLE} names no GGUF file of a larger model"),
]

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 16}
SEEDED = {"sampling_seed": 7, "max_new_tokens": 24, "ignore_eos": True}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather now.", "parameters": CITY}}
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with its name."}]
TOOL_QUESTION = [{"role": "user", "content": "Use the weather tool: what is the weather in Paris?"}]
RANK = 8
LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in a GGUF file and in peft's."""


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(FILE)


def _make_adapter(folder: Path, reader: gguf.GGUFReader, *, scale: float) -> str:
    """Random factors beside every linear layer, in the files of peft; with scale 0 they change nothing."""
    generator = np.random.default_rng(5)
    tensors = {}
    for tensor in reader.tensors:
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if found and found[2] in LINEAR:
            inputs, outputs = map(int, tensor.shape)
            layer = f"base_model.model.model.layers.{found[1]}.{LINEAR[found[2]]}"
            tensors[f"{layer}.lora_A.weight"] = generator.normal(0, 0.05, (RANK, inputs)).astype(np.float32)
            tensors[f"{layer}.lora_B.weight"] = generator.normal(0, scale, (outputs, RANK)).astype(np.float32)
    targets = [name.rsplit(".", 1)[1] for name in LINEAR.values()]
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return f"{folder.name}={folder}"


@pytest.fixture(scope="module")
def server(tmp_path_factory, reader) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [_make_adapter(folder / name, reader, scale=scale) for name, scale in (("zero", 0), ("random", 0.3))]
    with ServerProcess("--model-path", FILE, "--lora-paths", *adapters) as running:
        yield running.wait_ready()


def post(server: ServerProcess, path: str, **body):
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def generate(server: ServerProcess, **body):
    return post(server, "/generate", **({"text": PROMPT, "sampling_params": GREEDY} | body))


def constrained(server: ServerProcess, text: str, **constraint) -> str:
    answer = generate(server, text=text, sampling_params={"temperature": 0, "max_new_tokens": 120, **constraint})
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    return answer["text"]


def test_the_greedy_answer_names_paris(server):
    assert "Paris" in generate(server)["text"]


def test_the_same_seed_gives_the_same_tokens_alone_streamed_and_among_eight_others(server):
    alone = generate(server, sampling_params=SEEDED)["output_ids"]
    assert generate(server, sampling_params=SEEDED | {"sampling_seed": 8})["output_ids"] != alone
    body = {"text": PROMPT, "sampling_params": SEEDED, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert len(events) > 10
    assert json.loads(events[-2])["output_ids"] == alone
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        others = [pool.submit(generate, server, text=f"Chapter {number}:" + " and" * number) for number in range(8)]
        assert pool.submit(generate, server, sampling_params=SEEDED).result()["output_ids"] == alone
        assert all(other.result()["output_ids"] for other in others)


def test_each_of_n_is_what_its_own_seed_gives(server):
    samples = generate(server, sampling_params=SEEDED | {"n": 4})
    for number, sample in enumerate(samples):
        alone = generate(server, sampling_params=SEEDED | {"sampling_seed": SEEDED["sampling_seed"] + number})
        assert sample["output_ids"] == alone["output_ids"]
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 4


def test_log_probabilities_tell_prompt_and_output_and_the_greedy_token_is_the_best(server):
    answer = generate(server, return_logprob=True, logprob_start_len=0, top_logprobs_num=5)
    told = answer["meta_info"]
    assert len(told["input_token_logprobs"]) == told["prompt_tokens"]
    assert [token for _, token, _ in told["output_token_logprobs"]] == answer["output_ids"]
    for (value, token, _), best in zip(told["output_token_logprobs"], told["output_top_logprobs"], strict=True):
        assert len(best) == 5
        assert best[0][:2] == [value, token]
        assert sum(np.exp(one[0]) for one in best) <= 1 + 1e-5
    # The same tokens, now as a prompt: what was decoded is what is computed at once.
    text_ids = [token for _, token, _ in told["input_token_logprobs"]] + answer["output_ids"]
    again = generate(
        server, text=None, input_ids=text_ids, return_logprob=True, logprob_start_len=0, cache_salt="whole"
    )["meta_info"]["input_token_logprobs"][told["prompt_tokens"] :]
    assert [value for value, _, _ in again] == pytest.approx(
        [value for value, _, _ in told["output_token_logprobs"]], abs=1e-4
    )


def test_json_is_valid_against_its_schema(server):
    jsonschema.validate(json.loads(constrained(server, "A person as JSON: ", json_schema=PERSON)), PERSON)


def test_a_pattern_is_matched(server):
    pattern = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
    assert re.fullmatch(pattern, constrained(server, "Apollo 11 landed on ", regex=pattern))


def test_a_grammar_is_followed(server):
    grammar = 'root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]{0,2}'
    assert re.fullmatch(r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,3}", constrained(server, "A sum: ", ebnf=grammar))


def test_a_structural_tag_holds_what_its_schema_says(server):
    content = {"type": "json_schema", "json_schema": CITY}
    tag = {"type": "tag", "begin": "<call=weather>", "content": content, "end": "</call>"}
    form = {"type": "triggered_tags", "triggers": ["<call="], "tags": [tag], "at_least_one": True}
    form["stop_after_first"] = True
    text = constrained(server, "Weather in Rome: ", structural_tag={"type": "structural_tag", "format": form})
    found = re.search(r"<call=weather>(.*)</call>", text)
    assert found, text
    jsonschema.validate(json.loads(found[1]), CITY)


def test_a_session_continues_and_branches_as_its_full_prompts_do(server):
    session = post(server, "/open_session", capacity_of_str_len=4000)

    def say(text, after=None):
        return generate(server, text=text, session_params={"id": session, "rid": after})

    def ids(text):
        return post(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]

    first = say("The largest river of South America is the")
    beginning = ids("The largest river of South America is the") + first["output_ids"]
    for text in (" Its mouth lies in", " The fish in it are"):
        answer = say(text, after=first["meta_info"]["id"])
        assert answer["meta_info"]["cached_tokens"] > 0
        whole = generate(server, text=None, input_ids=beginning + ids(text), cache_salt=text)
        assert whole["meta_info"]["cached_tokens"] == 0
        assert answer["output_ids"] == whole["output_ids"]


def test_a_stop_string_ends_the_output_before_it(server):
    answer = generate(server, sampling_params=GREEDY | {"stop": ["Par"]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "Par"}
    assert "Par" not in answer["text"]


def test_a_built_in_logit_processor_keeps_its_tokens_away(server):
    first = generate(server)["output_ids"][0]
    params = GREEDY | {"custom_params": {"token_ids": [first]}}
    answer = generate(server, sampling_params=params, custom_logit_processor="disallowed_tokens")
    assert first not in answer["output_ids"]


def test_embeddings_of_tokens_give_what_the_tokens_give(server, reader):
    [table] = [tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    ids = post(server, "/tokenize", prompt=PROMPT)["tokens"]
    vectors = gguf.dequantize(table.data[ids], table.tensor_type).tolist()
    answer = generate(server, text=None, input_embeds=vectors)
    assert answer["output_ids"] == generate(server)["output_ids"]


@pytest.mark.parametrize(("path", "field"), [("/encode", "text"), ("/v1/embeddings", "input")])
def test_similar_sentences_are_nearer_than_others(server, path, field):
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose by half a percent."]
    answer = post(server, path, **{field: texts})
    rows = answer if path == "/encode" else answer["data"]
    cat, kitten, rates = np.array([row["embedding"] for row in rows])
    assert np.linalg.norm(cat) == pytest.approx(1, abs=1e-4)
    assert rates @ cat < kitten @ cat < 1


def test_a_prefix_that_was_computed_is_not_computed_again(server):
    text = "Once upon a time there was a king who had three daughters. " * 4
    first, second = (generate(server, text=text, cache_salt="prefix") for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] >= second["meta_info"]["prompt_tokens"] - 16
    assert first["output_ids"] == second["output_ids"]


def test_an_adapter_changes_its_own_rows_only_and_one_of_zeros_nothing(server):
    base = generate(server)["output_ids"]
    rows = generate(server, text=[PROMPT] * 4, lora_path=[None, "random", "zero", None])
    plain, changed, zero, last = (row["output_ids"] for row in rows)
    assert plain == zero == last == base
    assert changed != base
    assert generate(server, lora_path="random")["output_ids"] == changed


def test_a_chat_answers_and_a_required_tool_gets_valid_arguments(server):
    def chat(**body):
        return post(server, "/v1/chat/completions", temperature=0, max_tokens=80, **body)["choices"][0]

    assert "Paris" in chat(messages=QUESTION)["message"]["content"]
    required = chat(messages=TOOL_QUESTION, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    [call] = required["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    auto = chat(messages=TOOL_QUESTION, tools=[TOOL])["message"]
    assert auto["content"] or auto["tool_calls"]
    for call in auto.get("tool_calls") or ():
        assert call["function"]["name"] == "weather"


def test_anthropic_s_and_ollama_s_chats_answer(server):
    message = post(server, "/v1/messages", model="default", max_tokens=20, temperature=0, messages=QUESTION)
    assert "Paris" in message["content"][0]["text"]
    options = {"temperature": 0, "num_predict": 20}
    answer = post(server, "/api/chat", model="default", messages=QUESTION, stream=False, options=options)
    assert "Paris" in answer["message"]["content"]
