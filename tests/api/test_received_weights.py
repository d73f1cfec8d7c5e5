"""Weights that a trainer sends over HTTP: what is served afterwards is what a server of those weights serves, and what
cannot be served changes nothing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import pickle
import shlex
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from app_under_test import App
from page_blocks import block_with
from real_app import RealApp, write_model
from safetensors.numpy import load_file, save
from timeouts import until
from tiny_gguf import write_from_transformers
from tiny_models import greedy, logprobs

from tureen.admin import weight_updates
from tureen.admin.weight_group import Membership, WeightGroup
from tureen.errors import Unavailable

PROMPT = [17, 4, 99, 120, 33, 8, 250, 61, 7, 7, 12, 90, 200, 31, 5, 66, 1]
PARAMS = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
BINARY = {"content-type": "application/octet-stream"}
PATH = "/update_weights_from_safetensors"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by name, and the oracles."""
    root = tmp_path_factory.mktemp("weights")
    return root, {name: write_model(root / name, seed) for name, seed in (("red", 1), ("blue", 2))}


@pytest.fixture(scope="module")
def tensors(models):
    return {name: load_file(models[0] / name / "model.safetensors") for name in ("red", "blue")}


@pytest.fixture(scope="module")
def server(models):
    with RealApp(models[0] / "red", kernels="torch", max_total_tokens=256) as app:
        yield app


@pytest.fixture
def app(server, models):
    """As it was started."""
    yield server
    server.post("/abort_weight_update")
    server.post("/continue_generation")
    update(server, models[0] / "red")


def update(app, folder):
    answer = app.post("/update_weights_from_disk", model_path=str(folder), weight_version="default")
    assert answer.status_code == 200


def send(app, body, query=""):
    content = body if isinstance(body, bytes) else save(body)
    return app.request("POST", f"{PATH}{query}", content=content, headers=BINARY)


def output(app, **fields):
    return app.generate(input_ids=PROMPT, sampling_params=PARAMS, **fields)


def is_red(app, models):
    found = output(app)
    return (found["output_ids"], found["meta_info"]["weight_version"]) == (
        greedy(models[1]["red"], PROMPT, 12),
        "default",
    )


def halves(tensors):
    names = sorted(tensors)
    return [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]


def test_a_body_of_safetensors_is_served_with_the_log_probabilities_of_its_weights(app, models, tensors):
    output(app)  # so that something is cached
    answer = send(app, tensors["blue"], "?weight_version=2")
    assert answer.json()["success"], answer.text
    assert answer.json()["message"] == "Succeeded to update model weights. Weight version updated to 2."
    found = output(app, return_logprob=True, logprob_start_len=0)
    expected = greedy(models[1]["blue"], PROMPT, 12)
    meta = found["meta_info"]
    assert (found["output_ids"], meta["cached_tokens"], meta["weight_version"]) == (expected, 0, "2")
    theirs = logprobs(models[1]["blue"], PROMPT + expected)
    values = [value for value, *_ in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    later = (PROMPT + expected)[1:]
    assert values == pytest.approx([float(theirs[i, token]) for i, token in enumerate(later)], abs=2e-3)


@pytest.mark.parametrize(("begin", "end"), [("/begin", "/end"), ("/start", "/finish")])
def test_an_update_in_parts_is_served_at_its_end_and_not_before(app, models, tensors, begin, end):
    first, second = halves(tensors["blue"])
    assert app.post(f"{begin}_weight_update").json()["success"]
    answer = send(app, first).json()
    assert (answer["success"], answer["num_missing"]) == (True, len(second))
    assert is_red(app, models)
    text = base64.b64encode(save(second)).decode()
    answer = app.post("/update_weights_from_tensor", serialized_named_tensors=[text, text], flush_cache=False).json()
    assert (answer["success"], answer["num_missing"]) == (True, 0)
    assert is_red(app, models)
    ended = app.post(f"{end}_weight_update", weight_version="b").json()
    assert (ended["success"], ended["num_paused_requests"]) == (True, 0)
    found = output(app)
    assert (found["output_ids"], found["meta_info"]["weight_version"]) == (greedy(models[1]["blue"], PROMPT, 12), "b")


def test_an_end_without_all_weights_names_the_missing_and_can_be_repeated_when_they_are_there(app, models, tensors):
    first, second = halves(tensors["blue"])
    app.post("/begin_weight_update")
    send(app, first)
    answer = app.post("/end_weight_update")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert f"{len(second)} of {len(first) + len(second)} weights have not arrived" in answer.json()["message"]
    assert any(name in answer.json()["message"] for name in second)
    assert is_red(app, models)
    send(app, second)
    assert app.post("/end_weight_update").status_code == 200
    assert output(app)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)


@pytest.mark.parametrize("route", ["tensor", "safetensors"])
def test_weights_that_do_not_arrive_keep_their_values_if_that_is_asked_for(app, models, tensors, route):
    """Two updates follow each other: the second has weights of the start, of the first and its own."""
    blue = tensors["blue"]
    layer = [name for name in sorted(blue) if "layers.0" in name]
    for part in ([EMBEDDING, NORM], layer, [NORM]):
        sent = save({name: blue[name] for name in part})
        if route == "tensor":
            fields = {"serialized_named_tensors": [base64.b64encode(sent).decode()]}
            assert app.post("/update_weights_from_tensor", **fields).status_code == 200
        else:
            assert send(app, sent, "?partial=true").status_code == 200
    mixed = {name: blue[name] if name in (EMBEDDING, NORM, *layer) else value for name, value in tensors["red"].items()}
    oracle = models[1]["blue"]
    before = {name: value.clone() for name, value in oracle.state_dict().items()}
    try:
        oracle.load_state_dict({name: torch.from_numpy(value) for name, value in mixed.items()}, strict=False)
        oracle.tie_weights()
        assert output(app)["output_ids"] == greedy(oracle, PROMPT, 12)
    finally:
        oracle.load_state_dict(before)


def test_weights_in_one_tensor_replace_those_in_several_and_stay_together(app, models, tensors):
    blue, stem = tensors["blue"], "model.layers.0.self_attn."
    apart = {f"{stem}{part}_proj.weight": blue[f"{stem}{part}_proj.weight"] for part in "qkv"}
    stacked = {f"{stem}qkv_proj.weight": np.concatenate(list(apart.values()))}
    assert send(app, apart, "?partial=true").status_code == 200
    expected = output(app)["output_ids"]
    assert expected != greedy(models[1]["red"], PROMPT, 12)
    update(app, models[0] / "red")
    assert send(app, stacked, "?partial=true").status_code == 200
    assert output(app)["output_ids"] == expected
    answer = send(app, dict([apart.popitem()]), "?partial=true")
    assert "keeps them in one tensor, 'model.layers.0.self_attn.qkv_proj.weight'" in answer.json()["message"]
    assert output(app)["output_ids"] == expected


def broken(tensors, **changes):
    return save(tensors | changes)


def _without(tensors, name):
    return save({each: value for each, value in tensors.items() if each != name})


def _with_long_header(tensors):
    return (1 << 30).to_bytes(8, "little") + b"{" + b" " * 64


FAULTS = [
    (lambda t: _without(t, NORM), f"1 of 21 weights have not arrived: {NORM}", "missing_weights"),
    (lambda t: broken(t, **{"model.nor.weight": t[NORM]}), "did you mean model.norm.weight?", "unknown_weight"),
    (lambda t: broken(t, **{NORM: t[NORM][:3]}), f"weight '{NORM}' has shape [3]", "misshapen_weight"),
    (lambda t: broken(t, **{NORM: t[NORM][:0]}), "so it is empty", "misshapen_weight"),
    (lambda t: broken(t, **{NORM: t[NORM].astype(np.float64)}), "has type F64; F32, F16 and BF16", "invalid_weights"),
    (lambda t: save(t)[:-5], "no safetensors file: corrupt", "invalid_weights"),
    (lambda t: b"", "no safetensors file: corrupt: the file is empty", "invalid_weights"),
    (_with_long_header, "would have 1073741824 bytes", "invalid_weights"),
    (lambda t: pickle.dumps({NORM: t[NORM]}), "Pickles (torch.save) are not read", "invalid_weights"),
]


@pytest.mark.parametrize(("spoil", "reason", "code"), FAULTS)
def test_a_body_that_does_not_fit_changes_nothing_and_leaves_no_file(
    app, models, tensors, spoil, reason, code, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answer = send(app, spoil(tensors["blue"]), "?weight_version=b")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert reason in answer.json()["message"]
    assert answer.json()["error"]["code"] == code
    assert "/tmp" not in answer.text
    assert list(tmp_path.iterdir()) == []
    assert is_red(app, models)


def test_a_body_is_checked_against_its_sum_and_bounded_by_the_model_s_size(app, models, tensors):
    body = save(tensors["blue"])
    answer = send(app, body, f"?sha256={'0' * 64}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sha256")
    answer = send(app, body + b" " * (4 * len(body)))
    assert answer.status_code == 413
    assert "as many as the model in float32" in answer.json()["message"]
    assert is_red(app, models)
    assert send(app, body, f"?sha256={hashlib.sha256(body).hexdigest()}").status_code == 200


class _Runs:
    def __reduce__(self):
        return (open, ("/nonexistent/ran", "w"))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_is_never_read_and_its_refusal_says_what_to_send(app, models, tensors, kind):
    data = io.BytesIO()
    torch.save({NORM: torch.ones(3)}, data) if kind == "torch" else data.write(pickle.dumps(_Runs()))
    text = base64.b64encode(data.getvalue()).decode()
    answer = app.post("/update_weights_from_tensor", serialized_named_tensors=[text], load_format=None)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "pickle_refused",
        "serialized_named_tensors[0]",
    )
    assert "safetensors.torch.save(dict(named_tensors))" in error["message"]
    assert is_red(app, models)


def test_a_weight_that_arrives_twice_and_an_update_that_is_open_are_in_the_way(app, tensors):
    app.post("/begin_weight_update")
    one = {NORM: tensors["blue"][NORM]}
    assert send(app, one).json()["message"].startswith("1 tensor arrived, and 20 weights are missing")
    assert send(app, one).json()["error"]["code"] == "repeated_weight"
    assert app.post("/begin_weight_update").json()["error"]["code"] == "update_open"
    assert app.post("/abort_weight_update").json()["message"] == "Weight update dropped"
    assert app.post("/end_weight_update").json()["error"]["code"] == "no_update"
    assert app.post("/begin_weight_update").status_code == 200


def test_a_trainer_that_begins_after_one_that_died_gets_an_empty_update(app, models, tensors, monkeypatch):
    app.post("/begin_weight_update")
    send(app, {NORM: tensors["blue"][NORM]})
    monkeypatch.setattr(weight_updates, "IDLE_S", 0.0)
    assert app.post("/begin_weight_update").status_code == 200
    assert send(app, tensors["blue"]).json()["num_missing"] == 0
    assert app.post("/end_weight_update").status_code == 200
    assert output(app)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)


def test_a_client_that_leaves_in_the_middle_of_its_body_changes_nothing(app, models, tensors):
    body = save(tensors["blue"])

    async def leave():
        async def receive():
            return sent.pop(0)

        async def send_nothing(_):
            pass

        sent = [
            {"type": "http.request", "body": body[:-100], "more_body": True},
            {"type": "http.disconnect"},
        ]
        scope = {
            "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
            "scheme": "http", "http_version": "1.1", "root_path": "",
        }  # fmt: skip
        await app.app(scope, receive, send_nothing)

    app.run(leave())
    assert is_red(app, models)


LONG = {"input_ids": PROMPT, "sampling_params": PARAMS | {"max_new_tokens": 64}}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_request_that_a_pause_kept_says_which_tokens_are_of_which_weights(app, models, tensors, mode):
    """The oracle: the new model continues the prompt and what the old one wrote."""

    async def scenario():
        request = asyncio.create_task(app.http.post("/generate", json=LONG))
        await until(lambda: app.client.stats.num_running, unless=request)
        await app.http.post("/pause_generation", json={"mode": mode})
        answer = await app.http.post(f"{PATH}?weight_version=b", content=save(tensors["blue"]), headers=BINARY)
        await app.http.post("/continue_generation")
        return answer.json(), (await request).json()

    answer, found = app.run(scenario())
    assert answer["num_paused_requests"] == 1
    old, new = found["meta_info"]["weight_version_ranges"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "b", 64)
    tokens = found["output_ids"]
    assert tokens[: old["end"]] == greedy(models[1]["red"], PROMPT, old["end"], clear=0)
    then = greedy(models[1]["blue"], PROMPT + tokens[: old["end"]], 12, clear=0)
    assert tokens[old["end"] :][:12] == then


def test_a_request_that_runs_ends_with_its_own_weights_before_those_that_arrived_are_served(app, models, tensors):
    async def scenario():
        request = asyncio.create_task(app.http.post("/generate", json=LONG))
        await until(lambda: app.client.stats.num_running, unless=request)
        answer = await app.http.post(f"{PATH}?weight_version=b", content=save(tensors["blue"]), headers=BINARY)
        return answer.json(), (await request).json()

    answer, found = app.run(scenario())
    assert (answer["success"], found["meta_info"]["weight_version"]) == (True, "default")
    assert found["output_ids"][:12] == greedy(models[1]["red"], PROMPT, 12)
    assert "weight_version_ranges" not in found["meta_info"] or len(found["meta_info"]["weight_version_ranges"]) == 1
    assert output(app)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)


def test_memory_that_was_released_after_an_update_is_read_again_from_what_arrived(app, models, tensors):
    send(app, tensors["blue"])
    assert app.post("/release_memory_occupation").status_code == 200
    assert app.post("/resume_memory_occupation").status_code == 200
    assert output(app)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)


@pytest.fixture(scope="module")
def gguf_server(models, tmp_path_factory):
    file = write_from_transformers(tmp_path_factory.mktemp("gguf") / "red.gguf", models[1]["red"])
    with RealApp(file, kernels="torch", max_total_tokens=256) as app:
        yield app


def test_a_gguf_model_takes_a_whole_checkpoint_by_its_own_names_and_no_part_of_one(gguf_server, models, tensors):
    assert output(gguf_server)["output_ids"] == greedy(models[1]["red"], PROMPT, 12)
    answer = send(gguf_server, {NORM: tensors["blue"][NORM]}, "?partial=true")
    assert answer.json()["error"]["code"] == "missing_weights"
    assert "Begin an update (/begin_weight_update)" in answer.json()["message"]
    first, second = halves(tensors["blue"])
    assert gguf_server.post("/begin_weight_update").status_code == 200
    assert [send(gguf_server, part).status_code for part in (first, second)] == [200, 200]
    assert gguf_server.post("/end_weight_update").status_code == 200
    assert output(gguf_server)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"replicas": "tcp://127.0.0.1:1"}, "not_supported"), ({"model_impl": "transformers"}, "not_supported")],
)
def test_a_server_that_cannot_take_weights_from_a_client_says_so_before_they_are_sent(settings, code):
    with App() as app:
        config = msgspec.structs.replace(app.config, **settings)
        app.state.context = msgspec.structs.replace(app.state.context, config=config)
        for path in ("/begin_weight_update", PATH):
            answer = app.request("POST", path, content=b"{}" if path.startswith("/b") else b"x")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_the_commands_of_the_page_serve_the_weights(app, models, tensors, monkeypatch):
    command = block_with("training-loops.md", "--data-binary")
    _, url, _, kind, _, file = shlex.split(command.replace("\\\n", " "))
    assert file == "@step-200/model.safetensors"
    path, (name, value) = url.removeprefix("http://127.0.0.1:30000"), kind.split(": ")
    answer = app.request("POST", path, content=save(tensors["blue"]), headers={name: value})
    assert answer.json()["success"]
    assert output(app)["meta_info"]["weight_version"] == "step-200"
    update(app, models[0] / "red")

    def post(url, data=None, **how):
        return app.request("POST", url.removeprefix("http://127.0.0.1:30000"), content=data, **how)

    monkeypatch.setitem(sys.modules, "requests", SimpleNamespace(post=post))
    parts = [{name: torch.from_numpy(tensor) for name, tensor in part.items()} for part in halves(tensors["blue"])]
    exec(block_with("training-loops.md", "raise_for_status"), {"parts": parts})
    assert output(app)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)


def test_only_an_operator_sends_weights():
    with App(api_key="k", admin_api_key="a") as app:
        for path in (PATH, "/update_weights_from_tensor", "/begin_weight_update", "/end_weight_update"):
            assert app.request("POST", path, headers={"authorization": "Bearer k"}).status_code == 403


def test_parts_that_arrive_at_once_without_an_update_are_all_kept(app, models, tensors):
    parts = [{name: tensors["blue"][name]} for name in sorted(tensors["blue"])]

    async def scenario():
        url = f"{PATH}?partial=true"
        sends = [app.http.post(url, content=save(part), headers=BINARY) for part in parts[:3]]
        return [answer.status_code for answer in await asyncio.gather(*sends)]

    assert app.run(scenario()) == [200] * 3
    together = output(app)["output_ids"]
    update(app, models[0] / "red")
    assert send(app, parts[0] | parts[1] | parts[2], "?partial=true").status_code == 200
    assert output(app)["output_ids"] == together


def test_a_part_of_an_update_that_is_dropped_meanwhile_is_refused(app, models, tensors):
    body = save(tensors["blue"])

    async def scenario():
        async def pieces():
            yield body[:1000]
            assert (await app.http.post("/begin_weight_update")).json()["error"]["code"] == "update_open"
            assert (await app.http.post("/abort_weight_update")).json()["message"] == "Weight update dropped"
            yield body[1000:]

        weight_updates_idle.setattr(weight_updates, "IDLE_S", 0.0)
        await app.http.post("/begin_weight_update")
        return await app.http.post(PATH, content=pieces(), headers=BINARY)

    with pytest.MonkeyPatch.context() as weight_updates_idle:
        answer = app.run(scenario())
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "update_dropped")
    assert is_red(app, models)


def test_parts_that_arrive_at_once_have_the_limit_together(app, tensors):
    body = save(tensors["blue"])

    async def scenario():
        async def slowly():
            yield body
            answers.append(await app.http.post(PATH, content=body, headers=BINARY))

        answers = []
        await app.http.post("/begin_weight_update")
        answers.append(await app.http.post(PATH, content=slowly(), headers=BINARY))
        return [answer.status_code for answer in answers]

    assert app.run(scenario()) == [413, 200]


def test_a_server_with_dummy_weights_serves_those_that_arrive_and_keeps_none_that_it_does_not_have(models, tensors):
    """Training loops start servers this way: the first weights are the trainer's."""
    with RealApp(models[0] / "red", kernels="torch", max_total_tokens=256, load_format="dummy") as app:
        before, part = output(app)["output_ids"], {NORM: tensors["blue"][NORM]}
        answer = send(app, part, "?partial=true")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_weights")
        assert output(app)["output_ids"] == before
        assert send(app, tensors["blue"]).status_code == 200
        assert output(app)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)
        assert send(app, part, "?partial=true").status_code == 200


def test_an_update_is_not_ended_while_a_part_of_it_arrives(app, models, tensors):
    """Its client would hear that it arrived, and it would not be served."""
    first, second = map(save, halves(tensors["blue"]))

    async def scenario():
        async def pieces():
            yield second[:1000]
            answers.append(await app.http.post("/end_weight_update", json={"partial": True}))
            yield second[1000:]

        answers = []
        await app.http.post("/begin_weight_update")
        await app.http.post(PATH, content=first, headers=BINARY)
        answers.append(await app.http.post(PATH, content=pieces(), headers=BINARY))
        answers.append(await app.http.post("/end_weight_update"))
        return answers

    ended, *others = app.run(scenario())
    assert (ended.status_code, ended.json()["error"]["code"]) == (409, "part_arriving")
    assert [answer.status_code for answer in others] == [200, 200]
    assert output(app)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)


def test_a_group_receives_for_one_update_after_another(app, tensors, monkeypatch):
    """Its processes have one connection: what two updates receive at once would be mixed."""
    steps = []

    async def join(*_):
        pass

    async def receive(_, sizes, path):
        steps.append(sizes)
        for _ in range(50):
            await asyncio.sleep(0)
        steps.append(sizes)
        with open(path, "ab") as file:
            file.write(bytes(sum(sizes)))

    monkeypatch.setattr(WeightGroup, "join", join)
    monkeypatch.setattr(WeightGroup, "receive", receive)
    group = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    assert app.post("/init_weights_update_group", **group).status_code == 200
    app.post("/begin_weight_update")

    async def scenario():
        sent = [
            {"names": [name], "dtypes": ["float32"], "shapes": [list(tensors["red"][name].shape)]}
            for name in (NORM, EMBEDDING)
        ]
        return await asyncio.gather(
            *(app.http.post("/update_weights_from_distributed", json=fields) for fields in sent)
        )

    assert [answer.status_code for answer in app.run(scenario())] == [200, 200]
    assert steps == [[tensors["red"][name].nbytes] for name in (NORM, NORM, EMBEDDING, EMBEDDING)]


@pytest.mark.parametrize("begin", [True, False])
def test_the_files_of_weights_that_are_served_stay_if_the_pause_after_them_fails(
    app, models, tensors, monkeypatch, begin
):
    """An engine that is started again reads them."""
    call = app.client.call

    async def failing(op, **args):
        if op == "pause":
            raise Unavailable("the engine has ended")
        return await call(op, **args)

    with monkeypatch.context() as patch:
        patch.setattr(app.client, "call", failing)
        if begin:
            app.post("/begin_weight_update")
            send(app, tensors["blue"])
            assert app.post("/end_weight_update", keep_pause=True).status_code == 503
        else:
            assert send(app, tensors["blue"], "?keep_pause=true").status_code == 503
    assert app.post("/abort_weight_update").json()["message"] == "No weight update was open"
    for route in ("release", "resume"):
        assert app.post(f"/{route}_memory_occupation", tags=["weights"]).status_code == 200
    assert output(app)["output_ids"] == greedy(models[1]["blue"], PROMPT, 12)


def test_a_group_waits_in_a_thread_of_its_own(monkeypatch):
    """It waits for minutes, and the loop's own threads do what requests need."""
    threads = []
    for name in ("_start", "_call"):
        monkeypatch.setattr(WeightGroup, name, lambda *_: threads.append(threading.current_thread()))
    facts = {"name": "g", "backend": "gloo", "address": "h", "port": 1, "world_size": 2}

    async def scenario():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        others = await asyncio.to_thread(threading.current_thread)
        group = WeightGroup()
        await group.join(Membership(**facts, first_rank=1, num_ranks=1))
        await group.receive([4], "")
        group.close()
        with pytest.raises(Unavailable, match="another request"):
            await group.receive([4], "")
        assert len(threads) == 3
        assert others not in threads

    asyncio.run(scenario())
