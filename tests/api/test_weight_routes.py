"""Other weights and less memory while the server runs: what it answers is what a server of those weights answers."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
from app_under_test import App
from byte_tokenizer import VOCAB_SIZE
from embedding_engine import make_embedding_engine
from real_app import RealApp, write_model
from safetensors.numpy import load_file
from timeouts import until
from tiny_adapters import write_adapter
from tiny_models import greedy, logprobs

from tureen.kernels.cpu import native

PROMPT = [17, 4, 99, 120, 33, 8, 250, 61, 7, 7, 12, 90, 200, 31, 5, 66, 1]
PARAMS = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
JSON = {"content-type": "application/json"}
KINDS = ("native", "torch")
NUM_CACHED = 256


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by name, and the oracles."""
    root = tmp_path_factory.mktemp("weights")
    oracles = {name: write_model(root / name, seed) for name, seed in (("red", 1), ("blue", 2))}
    write_adapter(oracles["red"], root / "adapter", seed=3)
    return root, oracles


@pytest.fixture(scope="module", params=KINDS)
def server(request, models):
    if request.param == "native" and native.load() is None:
        pytest.skip("no native kernels")
    with RealApp(models[0] / "red", kernels=request.param, max_total_tokens=NUM_CACHED) as app:
        yield _noting_calls(app)


@pytest.fixture
def app(server, models):
    """As it was started."""
    yield server
    _restore(server, models)


@pytest.fixture(scope="module")
def torch_server(models):
    with RealApp(models[0] / "red", kernels="torch", max_total_tokens=NUM_CACHED) as app:
        yield _noting_calls(app)


@pytest.fixture
def torch_app(torch_server, models):
    """As it was started."""
    yield torch_server
    _restore(torch_server, models)


def _noting_calls(app):
    """The operations that the engine was asked for, in `app.ops`."""
    app.ops, call = [], app.client.call

    async def noted_call(op, **args):
        app.ops.append(op)
        return await call(op, **args)

    app.client.call = noted_call
    return app


def _restore(app, models):
    if not app.ops:
        return
    app.post("/continue_generation")
    for name in tuple(app.state.adapters):
        app.post("/unload_lora_adapter", lora_name=name)
    assert update(app, models[0] / "red", weight_version="default").status_code == 200
    assert app.post("/resume_memory_occupation").status_code == 200
    app.ops.clear()


def output(app, num_tokens=12, **fields):
    params = PARAMS | {"max_new_tokens": num_tokens}
    return app.generate(input_ids=PROMPT, sampling_params=params, **fields)["output_ids"]


def update(app, path, **fields):
    return app.post("/update_weights_from_disk", model_path=str(path), **fields)


def test_after_an_update_the_answers_are_those_of_the_new_model_and_nothing_cached_is_used(app, models):
    root, oracles = models
    assert output(app) == greedy(oracles["red"], PROMPT, 12)
    answer = update(app, root / "blue", weight_version="2")
    message = "Succeeded to update model weights. Weight version updated to 2."
    assert (answer.status_code, answer.json()) == (200, {"success": True, "message": message, "num_paused_requests": 0})
    found = app.generate(input_ids=PROMPT, sampling_params=PARAMS, return_logprob=True, logprob_start_len=0)
    expected = greedy(oracles["blue"], PROMPT, 12)
    assert (found["output_ids"], found["meta_info"]["cached_tokens"]) == (expected, 0)
    assert found["meta_info"]["weight_version"] == "2"
    assert "weight_versions" not in found["meta_info"]
    theirs = logprobs(oracles["blue"], PROMPT + expected)
    values = [value for value, *_ in found["meta_info"]["input_token_logprobs"][1:]]
    assert values == pytest.approx([float(theirs[i, token]) for i, token in enumerate(PROMPT[1:])], abs=2e-3)
    info = app.request("GET", "/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(root / "blue"), "2")
    assert update(app, root / "red").json()["message"] == "Succeeded to update model weights."
    assert output(app) == greedy(oracles["red"], PROMPT, 12)


def _make_other_shape(folder):
    write_model(folder, 2, intermediate_size=80)


def _make_other_architecture(folder):
    write_model(folder, 2, "mistral")


def _make_other_ends(folder):
    _change_config(folder, eos_token_id=3)


def _make_truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _make_without_weights(folder):
    (folder / "model.safetensors").unlink()


def _make_incomplete(folder):
    from safetensors.numpy import save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")


def _make_other_tokens(folder):
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    one, other = list(vocab)[40:42]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (folder / "tokenizer.json").write_text(json.dumps(state))


def _make_no_config(folder):
    (folder / "config.json").write_text("{")


def _change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


FAULTS = [
    (_make_other_shape, "intermediate_size differs from the served model's, 80 and not 96"),
    (_make_other_architecture, "architecture differs"),
    (_make_other_ends, "special tokens differ"),
    (_make_truncated, "corrupt"),
    (_make_without_weights, "has no *.safetensors"),
    (_make_incomplete, "lacks 1 weights: model.norm.weight"),
    (_make_other_tokens, "vocabulary or special tokens differ"),
    (_make_no_config, "its tokenizer cannot be read"),
    (shutil.rmtree, "there is no such model"),
]


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(app, models, tmp_path):
    expected = output(app)
    for number, (spoil, reason) in enumerate(FAULTS):
        folder = tmp_path / f"bad{number}"
        shutil.copytree(models[0] / "blue", folder)
        spoil(folder)
        answer = update(app, folder)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model_path"), error
        assert reason in error["message"]
        assert f"{tmp_path}/bad{number}/" not in error["message"]  # no path that the client did not send
    again = app.generate(input_ids=PROMPT, sampling_params=PARAMS)
    assert (again["output_ids"], again["meta_info"]["weight_version"]) == (expected, "default")
    assert app.request("GET", "/model_info").json()["model_path"] == str(models[0] / "red")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"flush_cache": False}, "flush_cache"),
        ({"is_async": True}, "is_async"),
        ({"recapture_cuda_graph": True}, "recapture_cuda_graph"),
        ({"token_step": 3}, "token_step"),
        ({"manifest": {}}, "manifest"),
        ({"load_format": "npcache"}, "load_format"),
        ({"model_path": ""}, "model_path"),
        ({"weight_version": 3}, "weight_version"),
        ({"weights_version": "3"}, "weights_version"),
        ({"rolling": True}, "rolling"),
        ({"rolling": True, "keep_pause": True}, "keep_pause"),
        ({"rolling": True, "abort_all_requests": True}, "abort_all_requests"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(torch_app, fields, name):
    answer = torch_app.post("/update_weights_from_disk", **({"model_path": "x"} | fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


NUM_LONG, NUM_SAMPLES = 64, 8
LONG = {"input_ids": PROMPT, "sampling_params": PARAMS | {"max_new_tokens": NUM_LONG, "n": NUM_SAMPLES}}
"""More than the KV cache holds: some of it is preempted."""


async def _begun(app, body):
    """A request that runs."""
    request = asyncio.create_task(app.http.post("/generate", json=body))
    await until(lambda: app.client.stats.num_running, unless=request)
    return request


def test_what_has_begun_ends_with_the_old_weights_and_what_waits_begins_with_the_new(app, models, monkeypatch):
    root, oracles = models
    call, held = app.client.call, []

    async def noted_call(op, **args):
        answer = await call(op, **args)
        held.extend([answer] if op == "hold" else ())
        return answer

    monkeypatch.setattr(app.client, "call", noted_call)
    red = output(app, num_tokens=NUM_LONG)

    async def scenario():
        old = await _begun(app, LONG)
        fields = {"model_path": str(root / "blue"), "weight_version": "b"}
        updating = asyncio.create_task(app.http.post("/update_weights_from_disk", json=fields))
        await until(lambda: held)
        new = asyncio.create_task(app.http.post("/generate", json=LONG | {"sampling_params": PARAMS}))
        return [one.json() for one in await asyncio.gather(old, updating, new)]

    old, updated, new = app.run(scenario())
    assert updated["success"]
    assert (held[0] > 0, held[-1]) == (True, 0)
    expected = {"default": red, "b": output(app, num_tokens=NUM_LONG)}
    assert [one["output_ids"] for one in old] == [expected[one["meta_info"]["weight_version"]] for one in old]
    assert old[0]["meta_info"]["weight_version"] == "default"
    blue = greedy(oracles["blue"], PROMPT, 12)
    assert (new["output_ids"], new["meta_info"]["weight_version"]) == (blue, "b")
    assert expected["b"][:12] == blue
    app.check_idle()


def test_other_fronts_know_of_the_weights_before_any_request_goes_on_with_them(torch_app, models, monkeypatch):
    class OtherFronts:
        async def tell(self) -> None:
            torch_app.ops.append(f"tell {torch_app.state.context.config.weight_version}")

    monkeypatch.setattr(torch_app.state.common, "fronts", OtherFronts())
    torch_app.ops.clear()
    answer = torch_app.post("/update_weights_from_disk", model_path=str(models[0] / "blue"), weight_version="b")
    assert answer.status_code == 200
    assert torch_app.ops[-3:] == ["update_weights", "tell b", "let_go"]


def test_all_requests_are_aborted_first_when_that_is_asked_for(app, models):
    root, oracles = models

    async def scenario():
        old = await _begun(app, LONG)
        fields = {"model_path": str(root / "blue"), "abort_all_requests": True}
        answer = await app.http.post("/update_weights_from_disk", json=fields)
        return (await old).json(), answer

    old, answer = app.run(scenario())
    assert answer.status_code == 200
    assert {one["meta_info"]["finish_reason"]["type"] for one in old} == {"abort"}
    assert output(app) == greedy(oracles["blue"], PROMPT, 12)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_with_the_new_weights_computed_from_its_first_token(app, models, mode):
    """The oracle: the new model continues the prompt and what the old one wrote."""
    root, oracles = models

    async def scenario():
        request = await _begun(app, LONG)
        await app.http.post("/pause_generation", json={"mode": mode})
        fields = {"model_path": str(root / "blue"), "weight_version": "b"}
        answer = await app.http.post("/update_weights_from_disk", json=fields)
        await app.http.post("/continue_generation")
        return answer.json(), (await request).json()

    red = output(app, num_tokens=NUM_LONG)
    answer, found = app.run(scenario())
    assert 1 <= answer["num_paused_requests"] <= NUM_SAMPLES
    for one in (found[0], found[-1]):
        tokens, meta = one["output_ids"], one["meta_info"]
        num_old = next(i for i in range(NUM_LONG) if tokens[i] != red[i])
        then = greedy(oracles["blue"], PROMPT + tokens[:num_old], min(20, NUM_LONG - num_old), clear=0)
        assert tokens[num_old:][:20] == then
        assert meta["weight_version"] == "b"
        assert meta.get("weight_versions", ["default", "b"]) == ["default", "b"]
        for drawn in meta.get("weight_version_ranges", [])[:1]:
            assert (drawn["version"], drawn["start"], tokens[: drawn["end"]]) == ("default", 0, red[: drawn["end"]])
    old, new = found[0]["meta_info"]["weight_version_ranges"]
    assert 0 < old["end"] == new["start"] < new["end"] == NUM_LONG
    then = greedy(oracles["blue"], PROMPT + red[: old["end"]], min(20, NUM_LONG - old["end"]), clear=0)
    assert found[0]["output_ids"][old["end"] :][:20] == then


def test_generation_is_paused_after_an_update_that_asks_for_it(torch_app, models):
    assert update(torch_app, models[0] / "blue", keep_pause=True).status_code == 200
    assert torch_app.client.stats.is_paused
    torch_app.post("/continue_generation")
    assert output(torch_app) == greedy(models[1]["blue"], PROMPT, 12)


@pytest.mark.parametrize("leaves_at", ["hold", "update_weights"])
def test_who_leaves_during_an_update_leaves_no_half_of_it(torch_app, models, monkeypatch, leaves_at):
    app, call = torch_app, torch_app.client.call
    fields = {"model_path": str(models[0] / "blue"), "weight_version": "b", "keep_pause": True}
    sent = {"type": "http.request", "body": json.dumps(fields).encode()}
    ops = []

    async def leave():
        left = asyncio.Event()
        messages = [sent]

        async def noted_call(op, **args):
            ops.append(op)
            if op == leaves_at:
                left.set()
            return await call(op, **args)

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(_):
            pass

        monkeypatch.setattr(app.client, "call", noted_call)
        path = "/update_weights_from_disk"
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "client": ("127.0.0.1", 1)}
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        await app.app({**scope, "headers": headers}, receive, send)
        await until(lambda: ops[-1] == "let_go")

    app.run(leave())
    is_updated = leaves_at == "update_weights"
    assert ("update_weights" in ops) is is_updated
    assert app.state.context.config.weight_version == ("b" if is_updated else "default")
    assert app.client.stats.is_paused is is_updated
    monkeypatch.undo()
    app.post("/continue_generation")
    assert output(app) == greedy(models[1]["blue" if is_updated else "red"], PROMPT, 12)


def test_how_one_update_is_loaded_says_nothing_about_the_next(torch_app, models):
    blue = greedy(models[1]["blue"], PROMPT, 12)
    assert update(torch_app, models[0] / "blue", load_format="dummy").status_code == 200
    assert output(torch_app) != blue
    assert update(torch_app, models[0] / "blue").status_code == 200
    assert output(torch_app) == blue


def test_a_model_that_makes_embeddings_ends_nothing_for_an_update_it_cannot_do():
    with App(factory=make_embedding_engine) as app:

        async def scenario():
            await app.client.call("pause", mode="in_place")
            asked = asyncio.create_task(app.http.post("/v1/embeddings", json={"input": "abc"}))
            await until(lambda: app.client.stats.num_queued, unless=asked)
            fields = {"model_path": "x", "abort_all_requests": True}
            refused = await app.http.post("/update_weights_from_disk", json=fields)
            await app.client.call("resume")
            return refused, await asked

        refused, answer = app.run(scenario())
    assert (refused.status_code, answer.status_code) == (404, 200)
    assert "embedding" in refused.json()["error"]["message"]


def test_adapters_stay_and_act_on_the_new_weights(app, models):
    root, oracles = models
    for name in ("red", "blue"):
        update(app, root / name)
        if name == "red":
            app.post("/load_lora_adapter", lora_name="one", lora_path=str(root / "adapter"))
            on_red = output(app, lora_path="one")
    on_blue = output(app, lora_path="one")
    with RealApp(root / "blue", kernels=app.config.kernels, lora_paths=(f"one={root / 'adapter'}",)) as fresh:
        assert on_blue == output(fresh, lora_path="one")
    assert on_blue not in (on_red, greedy(oracles["blue"], PROMPT, 12))


def test_the_version_alone_can_change(torch_app):
    answer = torch_app.post("/update_weight_version", new_version="tuesday")
    assert (answer.status_code, answer.json()["new_version"]) == (200, "tuesday")
    assert torch_app.generate(input_ids=PROMPT, sampling_params=PARAMS)["meta_info"]["weight_version"] == "tuesday"


def weight(app, method="POST", **fields):
    return app.request(method, "/get_weights_by_name", content=json.dumps(fields), headers=JSON)


def test_every_weight_of_the_checkpoint_can_be_looked_at(app, models):
    """The oracle: safetensors' own reader."""
    for name, stored in load_file(models[0] / "red" / "model.safetensors").items():
        values = np.array(weight(app, name=name, truncate_size=7).json())
        assert np.array_equal(values.astype(np.float32), stored[:7]), name
    assert len(weight(app, "GET", name="model.norm.weight").json()) == 64
    assert len(weight(app, "GET", name="lm_head.weight").json()) == 100


def test_weights_are_those_that_compute_and_not_those_of_a_file_that_has_changed(app, models, tmp_path):
    shutil.copytree(models[0] / "blue", tmp_path / "mine")
    update(app, tmp_path / "mine")
    shutil.copyfile(models[0] / "red" / "model.safetensors", tmp_path / "mine" / "model.safetensors")
    blue = load_file(models[0] / "blue" / "model.safetensors")["model.norm.weight"]
    assert weight(app, name="model.norm.weight", truncate_size=64).json() == blue.tolist()


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Return model folders by variant: the engine merges or converts some of their weights."""
    root = tmp_path_factory.mktemp("others")
    for variant in ("phi3", "gemma3"):
        write_model(root / variant, 1, variant)
    return root


@pytest.mark.parametrize(("variant", "names"), [("phi3", ("qkv_proj", "gate_up_proj")), ("gemma3", ("norm",))])
@pytest.mark.parametrize("kernels", KINDS)
def test_a_weight_is_shown_as_the_checkpoint_has_it(others, kernels, variant, names):
    if kernels == "native" and native.load() is None:
        pytest.skip("no native kernels")
    stored = load_file(others / variant / "model.safetensors")
    with RealApp(others / variant, kernels=kernels) as app:
        for name in names:
            found = [full for full in stored if name in full]
            assert found, name
            for full in found:
                values = np.array(weight(app, name=full, truncate_size=VOCAB_SIZE).json())
                assert values == pytest.approx(stored[full][:VOCAB_SIZE], abs=1e-6), full


def test_an_unknown_weight_is_not_found_and_a_near_one_named(torch_app):
    answer = weight(torch_app, name="model.layers.0.self_attn.q_prj.weight")
    assert answer.status_code == 404
    assert "did you mean model.layers.0.self_attn.q_proj.weight?" in answer.json()["error"]["message"]
    for size in (0, 2**63):
        assert (
            weight(torch_app, name="model.norm.weight", truncate_size=size).json()["error"]["param"] == "truncate_size"
        )
    assert weight(torch_app).json()["error"]["param"] == "name"


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights"]])
def test_after_release_and_resume_the_same_request_gives_the_same_tokens(app, tags):
    expected = output(app)
    fields = {} if tags is None else {"tags": tags}
    released = app.post("/release_memory_occupation", **fields)
    assert (released.status_code, released.json()["tags"]) == (200, sorted(tags or ["kv_cache", "weights"]))
    answer = app.post(input_ids=PROMPT, sampling_params=PARAMS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "memory_released")
    assert "/resume_memory_occupation" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert app.request("GET", "/health").status_code == 200
    assert app.post("/resume_memory_occupation", **fields).status_code == 200
    again = app.generate(input_ids=PROMPT, sampling_params=PARAMS)
    assert (again["output_ids"], again["meta_info"]["cached_tokens"]) == (expected, 0)


def test_both_parts_must_be_back_before_anything_is_answered(torch_app):
    torch_app.post("/release_memory_occupation")
    torch_app.post("/resume_memory_occupation", tags=["weights"])
    assert torch_app.post(input_ids=PROMPT, sampling_params=PARAMS).status_code == 503
    torch_app.post("/resume_memory_occupation", tags=["kv_cache"])
    torch_app.post("/resume_memory_occupation")  # nothing is away any more
    assert torch_app.post(input_ids=PROMPT, sampling_params=PARAMS).status_code == 200


def test_memory_is_not_released_while_a_request_has_not_ended(torch_app):
    async def scenario():
        request = await _begun(torch_app, LONG)
        return await torch_app.http.post("/release_memory_occupation"), await request

    refused, answer = torch_app.run(scenario())
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
    assert len(answer.json()[0]["output_ids"]) == NUM_LONG


def test_released_weights_whose_files_have_changed_come_back_by_an_update_only(app, models, tmp_path):
    shutil.copytree(models[0] / "red", tmp_path / "mine")
    update(app, tmp_path / "mine")
    app.post("/release_memory_occupation", tags=["weights"])
    assert weight(app, name="model.norm.weight").json()["error"]["code"] == "memory_released"
    shutil.copyfile(models[0] / "blue" / "model.safetensors", tmp_path / "mine" / "model.safetensors")
    refused = app.post("/resume_memory_occupation")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "weights_changed")
    assert update(app, tmp_path / "mine").status_code == 200
    assert app.post("/resume_memory_occupation").status_code == 200
    assert output(app) == greedy(models[1]["blue"], PROMPT, 12)


def test_an_adapter_that_comes_while_the_weights_are_away_acts_once_they_are_back(app, models):
    path = str(models[0] / "adapter")
    app.post("/load_lora_adapter", lora_name="one", lora_path=path)
    expected = output(app, lora_path="one")
    app.post("/release_memory_occupation")
    app.post("/load_lora_adapter", lora_name="two", lora_path=path)
    app.post("/resume_memory_occupation")
    assert output(app, lora_path="one") == output(app, lora_path="two") == expected
    assert expected != output(app)


@pytest.mark.parametrize("fields", [{"tags": ["cuda_graph"]}, {"tags": []}, {"tags": "weights"}, {"tag": ["weights"]}])
def test_memory_that_there_is_not_is_refused_by_name(torch_app, fields):
    answer = torch_app.post("/release_memory_occupation", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tag")
    assert torch_app.post(input_ids=PROMPT, sampling_params=PARAMS).status_code == 200


def _num_requests(app):
    return app.client.stats.num_running + app.client.stats.num_queued


def test_the_load_of_the_one_replica_is_told(torch_app):
    async def scenario():
        request = await _begun(torch_app, LONG)
        await until(lambda: _num_requests(torch_app) == NUM_SAMPLES, unless=request)
        busy = await torch_app.http.get("/v1/loads")
        await request
        return busy.json()["loads"]

    (busy,) = torch_app.run(scenario())
    assert busy["dp_rank"] == 0
    assert 1 <= busy["num_running_reqs"] <= busy["num_total_reqs"] == NUM_SAMPLES
    assert busy["num_used_tokens"] >= len(PROMPT)
    assert busy["max_total_num_tokens"] == busy["memory"]["token_capacity"] == NUM_CACHED
    torch_app.check_idle()
    (idle,) = torch_app.request("GET", "/v1/loads?include=core").json()["loads"]
    assert (idle["num_total_reqs"], idle["num_used_tokens"], "memory" in idle) == (0, 0, False)


@pytest.mark.parametrize("query", ["include=specs", "dp_rank=1", "format=prometheus", "dprank=0"])
def test_what_a_load_has_not_is_refused_by_name(torch_app, query):
    answer = torch_app.request("GET", f"/v1/loads?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])


def test_sections_of_sglang_that_there_is_nothing_to_say_about_are_asked_for_in_vain(torch_app):
    (load,) = torch_app.request("GET", "/v1/loads?include=core,disagg,queues,memory").json()["loads"]
    (own,) = torch_app.request("GET", "/v1/loads?include=all").json()["loads"]
    assert load.keys() == own.keys()
