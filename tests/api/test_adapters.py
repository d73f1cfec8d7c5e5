"""Adapters over HTTP, on a tiny real model: who may load them, how requests name them, and what happens else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import warnings
from functools import partial

import pytest
from app_under_test import App
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from runner_driver import folder_source
from timeouts import until
from tiny_adapters import CONFIG, WEIGHTS, change_config, write_adapter
from tiny_models import greedy, write

from tureen import build
from tureen.config import Config
from tureen.config_sources import load
from tureen.errors import StartupError

PARAMS = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
SETTINGS = {
    "device": "cpu",
    "kernels": "torch",
    "dtype": "float32",
    "grammar_backend": "none",
    "page_size": 4,
    "max_total_tokens": 4096,
    "num_threads": 1,
}
TEXT = "a prompt of some length"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model's folder with adapters in it, and the oracles by their names."""
    folder = tmp_path_factory.mktemp("tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = write(folder, "llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, bos_token_id=BOS)
    red = write_adapter(model, folder / "red", seed=1)
    blue = write_adapter(model, folder / "blue", seed=2, r=9)
    return folder, {None: model, "red": red, "blue": blue}


def real_engine(folder, config, *, progress):
    return build.make_engine(config, model=build.Model(folder_source(folder), make_byte_tokenizer()), progress=progress)


@pytest.fixture
def make_app(written, monkeypatch):
    """The application over the tiny model; closed at the end."""
    folder, _ = written
    monkeypatch.setattr("app_under_test.make_engine", partial(real_engine, folder))
    apps = []

    def make(**settings):
        apps.append(App(**SETTINGS, **settings))
        return apps[-1]

    yield make
    for app in apps:
        app.check_idle()
        app.close()


@pytest.fixture(scope="module")
def server(written):
    folder = written[0]
    paths = tuple(f"{name}={folder / name}" for name in ("red", "blue"))
    with App(**SETTINGS, factory=partial(real_engine, folder), lora_paths=paths) as running:
        yield running


@pytest.fixture
def app(written, server):
    """Red and blue are loaded, and the cache is empty."""
    assert server.post("/flush_cache").status_code == 200
    yield server
    try:
        server.check_idle()
    finally:
        _restore(server, written[0])


def _restore(server, folder):
    """Undo the changes of a test, even if it failed."""
    server.post("/continue_generation")
    server.post("/abort_request", abort_all=True)
    for name in server.state.adapters.keys() - {"red", "blue"}:
        assert server.post("/unload_lora_adapter", lora_name=name).status_code == 200
    for name in {"red", "blue"} - server.state.adapters.keys():
        response = server.post("/load_lora_adapter", lora_name=name, lora_path=str(folder / name))
        assert response.status_code == 200, response.text


def tokens(answer):
    return answer["output_ids"]


def expected(written, name, text=TEXT, count=6):
    _, oracles = written
    return greedy(oracles[name], list(text.encode()), count)


def ask(app, name=None, **how):
    fields = {} if name is None else {"lora_path": name}
    return app.generate(**({"text": TEXT, "sampling_params": PARAMS} | fields | how))


def refusal(response, status, code):
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), response.text
    assert len(error["message"]) < 400
    return error


def models(app):
    return [(card["id"], card["parent"]) for card in app.request("GET", "/v1/models").json()["data"]]


# ---- requests


def test_each_prompt_of_a_batch_is_answered_by_the_adapter_it_names(app, written):
    names = ["red", None, "blue", "red"]
    texts = [TEXT, TEXT, TEXT, "another prompt"]
    answers = app.generate(text=texts, lora_path=names, sampling_params=PARAMS)
    for name, text, answer in zip(names, texts, answers, strict=True):
        assert tokens(answer) == expected(written, name, text)
    assert len({tuple(expected(written, name)) for name in (None, "red", "blue")}) == 3


@pytest.mark.parametrize("form", ["name", "list of one", "path", "ids", "samples", "whole batch", "stream"])
def test_an_adapter_is_named_in_any_form_of_a_body(app, written, form):
    wanted = expected(written, "red")
    match form:
        case "name":
            found = [ask(app, "red")]
        case "list of one":
            found = [ask(app, ["red"])]
        case "path":
            found = [ask(app, str(written[0] / "red"))]
        case "ids":
            found = [app.generate(input_ids=list(TEXT.encode()), lora_path="red", sampling_params=PARAMS)]
        case "samples":
            found = ask(app, "red", sampling_params=PARAMS | {"n": 2})
        case "whole batch":
            found = ask(app, "red", text=[TEXT, TEXT])
        case "stream":
            found = app.events(text=TEXT, lora_path="red", sampling_params=PARAMS)[-1:]
    assert [tokens(answer) for answer in found] == [wanted] * len(found)


@pytest.mark.parametrize("nothing", [None, [None], "left out"])
def test_without_a_name_the_base_model_answers(app, written, nothing):
    how = {} if nothing == "left out" else {"lora_path": nothing}
    assert tokens(ask(app, **how)) == expected(written, None)


def test_the_prefix_cache_is_shared_within_an_adapter_alone(app):
    for name, cached in (("red", 0), ("blue", 0), (None, 0), ("red", 20), ("blue", 20), (None, 20)):
        assert ask(app, name)["meta_info"]["cached_tokens"] == cached, name


def test_a_session_goes_on_with_whatever_adapter_each_turn_names(app, written):
    session = app.post("/open_session", capacity_of_str_len=1000).json()
    turn = {"session_params": {"id": session}, "sampling_params": PARAMS}
    first = tokens(app.generate(text=TEXT, **turn, lora_path="red", rid="first"))
    second = app.generate(text="b", session_params={"id": session, "rid": "first"}, sampling_params=PARAMS)
    assert first == expected(written, "red")
    prompt = [*TEXT.encode(), *first, ord("b")]
    assert tokens(second) == greedy(written[1][None], prompt, 6)
    assert second["meta_info"]["cached_tokens"] == 0  # nothing of what red computed
    app.post("/close_session", session_id=session)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (5, "lora_path"),
        (True, "lora_path"),
        ({}, "lora_path"),
        ([5], "lora_path"),
        (["red", "blue"], "lora_path"),
        ([], "lora_path"),
        ([["red"]], "lora_path"),
    ],
)
def test_a_value_of_another_form_is_refused_by_name(app, value, field):
    error = refusal(app.post(text=TEXT, lora_path=value), 400, "invalid_lora_path")
    assert error["param"].startswith(field)


def test_a_list_of_another_length_is_refused_with_both_lengths(app):
    error = app.error(text=[TEXT, TEXT], lora_path=["red", None, "red"])
    assert (error["param"], "3" in error["message"], "2" in error["message"]) == ("lora_path", True, True)


def test_one_unknown_name_of_a_batch_runs_none_of_it(app):
    before = app.client.stats.total_steps
    for stream in (False, True):
        response = app.post(text=[TEXT, TEXT], lora_path=["red", "nobody"], stream=stream)
        assert refusal(response, 404, "lora_not_found")["param"] == "lora_path[1]"
    assert app.client.stats.total_steps == before


# ---- T31: a request makes the server look nowhere

LOOKS = ("open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo", "glob.glob")
seen: list[str] = []
is_watching = False


def _watch(event, arguments):
    if is_watching and event in LOOKS:
        seen.append(f"{event} {arguments}")


@pytest.fixture
def watched(monkeypatch):
    """Everything in files and the network that the process looks at meanwhile, through Python."""
    global is_watching
    if not any(getattr(hook, "__name__", "") == "_watch" for hook in HOOKS):
        sys.addaudithook(_watch)
        HOOKS.append(_watch)
    for name in ("stat", "lstat", "access", "readlink"):
        plain = getattr(os, name)

        def look(path, *args, _plain=plain, _name=name, **how):
            if is_watching:
                seen.append(f"os.{_name} {path!r}")
            return _plain(path, *args, **how)

        monkeypatch.setattr(os, name, look)
    seen.clear()
    is_watching = True
    yield seen
    is_watching = False


HOOKS: list = []

PATHS = [
    "../../etc/passwd",
    "/etc",
    "/etc/passwd",
    "~",
    "",
    ".",
    "\0",
    "red/",
    "./red",
    "http://127.0.0.1:9/adapter",
    "file:///etc",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "x" * 100_000,
    "THE FOLDER",
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:20] or "empty")
def test_a_request_cannot_make_the_server_look_at_a_path(app, written, watched, path):
    folder, _ = written
    means_the_model = path in ("", "THE FOLDER")  # as a model's name, not as an adapter's
    if path == "THE FOLDER":
        path = str(folder)
    bodies = [
        ("/generate", {"text": TEXT, "lora_path": path}),
        ("/generate", {"text": TEXT, "lora_path": path, "stream": True}),
        ("/generate", {"text": [TEXT] * 2, "lora_path": [None, path]}),
        ("/generate", {"prompt": TEXT, "model": path}),
        ("/generate", {"inputs": TEXT, "parameters": {"adapter_id": path}}),
    ]
    watched.clear()
    responses = [app.request("POST", route, json=body) for route, body in bodies]
    assert watched == []
    named = responses.pop(3)
    assert named.status_code == (200 if means_the_model else 404)
    for response in responses:
        assert response.status_code == 404, response.text
        assert len(response.content) < 500
    assert responses[3].json()["error_type"] == "validation"
    for response in responses[:3]:
        assert refusal(response, 404, "lora_not_found")["param"].startswith("lora_path")


def test_the_watch_sees_what_loading_looks_at(app, written, watched):
    folder, _ = written
    app.post("/load_lora_adapter", lora_name="again", lora_path=str(folder / "red"))
    assert any(str(folder / "red") in one for one in watched)


# ---- other dialects


def test_mindie_s_model_and_tgi_s_adapter_id_name_adapters(app, written):
    for name in ("red", "blue", str(written[0] / "red")):
        text = ask(app, name, sampling_params=PARAMS | {"skip_special_tokens": False})["text"]
        mindie = app.post(
            prompt=TEXT, model=name, temperature=0, max_tokens=6, ignore_eos=True, skip_special_tokens=False
        )
        assert mindie.json() == {"text": [f"{TEXT} {text}"]}
        parameters = {"adapter_id": name, "max_new_tokens": 6, "details": True}
        details = app.post(inputs=TEXT, parameters=parameters).json()["details"]
        wanted = tokens(ask(app, name))
        found = [token["id"] for token in details["tokens"]]
        assert found == wanted[: len(found)]
    assert mindie.status_code == 200


def test_mindie_s_none_and_the_served_name_mean_the_base_model(app):
    wanted = app.post(prompt=TEXT, temperature=0).json()
    served = models(app)[0][0]
    for model in (None, "None", served):
        assert app.post(prompt=TEXT, temperature=0, model=model).json() == wanted


# ---- loading and unloading


def test_an_adapter_cannot_be_called_what_means_the_model_itself(make_app, written):
    folder, _ = written
    app = make_app()
    for name in (models(app)[0][0], "None"):
        refused = app.post("/load_lora_adapter", lora_name=name, lora_path=str(folder / "red"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert len(models(app)) == 1


def test_an_adapter_can_be_loaded_used_and_unloaded(make_app, written):
    folder, _ = written
    app = make_app()
    served = models(app)[0][0]
    assert models(app) == [(served, None)]
    path = str(folder / "red")
    loaded = app.post("/load_lora_adapter", lora_name="shades/red", lora_path=path, pinned=True)
    wanted = {"success": True, "error_message": "", "loaded_adapters": {"shades/red": path}}
    assert (loaded.status_code, loaded.json()) == (200, wanted)
    assert models(app) == [(served, None), ("shades/red", served)]
    card = app.request("GET", "/v1/models/shades/red").json()
    assert (card["id"], card["root"], card["parent"]) == ("shades/red", "shades/red", served)
    assert card["max_model_len"] == app.request("GET", f"/v1/models/{served}").json()["max_model_len"]
    assert tokens(ask(app, "shades/red")) == expected(written, "red")
    unloaded = app.post("/unload_lora_adapter", lora_name="shades/red")
    assert (unloaded.status_code, unloaded.json()) == (200, wanted | {"loaded_adapters": {}})
    assert models(app) == [(served, None)]
    assert app.request("GET", "/v1/models/shades/red").status_code == 404
    refusal(app.post(text=TEXT, lora_path="shades/red"), 404, "lora_not_found")
    refusal(app.post("/unload_lora_adapter", lora_name="shades/red"), 404, "lora_not_found")
    assert tokens(ask(app)) == expected(written, None)


def test_another_version_under_the_same_name_answers_at_once_and_from_no_cache(make_app, written, tmp_path):
    folder, _ = written
    app = make_app()
    shutil.copytree(folder / "red", tmp_path / "mine")
    app.post("/load_lora_adapter", lora_name="mine", lora_path=str(tmp_path / "mine"))
    assert tokens(ask(app, "mine")) == expected(written, "red")
    shutil.rmtree(tmp_path / "mine")
    shutil.copytree(folder / "blue", tmp_path / "mine")
    assert tokens(ask(app, "mine")) == expected(written, "red")  # what is loaded stays as it was
    app.post("/unload_lora_adapter", lora_name="mine")
    app.post("/load_lora_adapter", lora_name="mine", lora_path=str(tmp_path / "mine"))
    answer = ask(app, "mine")
    assert (tokens(answer), answer["meta_info"]["cached_tokens"]) == (expected(written, "blue"), 0)


def test_an_adapter_in_use_is_not_unloaded(app, written):
    async def unload():
        return await app.http.post("/unload_lora_adapter", json={"lora_name": "red"})

    async def scene():
        body = {"text": TEXT, "rid": "long", "lora_path": "red"}
        body["sampling_params"] = PARAMS | {"max_new_tokens": 400}
        await app.http.post("/pause_generation", json={"mode": "in_place"})  # it has not ended, however late one looks
        running = asyncio.create_task(app.http.post("/generate", json=body))
        await until(lambda: app.client.stats.num_queued)
        refused = await unload()
        await app.http.post("/abort_request", json={"rid": "long"})
        aborted = await running
        await app.http.post("/continue_generation", json={})
        return refused, aborted, await unload()

    refused, aborted, unloaded = app.run(scene())
    assert refusal(refused, 409, "lora_in_use")["param"] == "lora_name"
    assert aborted.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert set(unloaded.json()["loaded_adapters"]) == {"blue"}
    assert tokens(ask(app, "blue")) == expected(written, "blue")


BAD_BODIES = [
    ({}, "lora_name"),
    ({"lora_name": "x"}, "lora_path"),
    ({"lora_path": "x"}, "lora_name"),
    ({"lora_name": 5, "lora_path": "x"}, "lora_name"),
    ({"lora_name": "x", "lora_path": 5}, "lora_path"),
    ({"lora_name": "x", "lora_path": ""}, "lora_path"),
    ({"lora_name": "", "lora_path": "x"}, "lora_name"),
    ({"lora_name": "a\nb", "lora_path": "x"}, "lora_name"),
    ({"lora_name": "x" * 257, "lora_path": "x"}, "lora_name"),
    ({"lora_name": "red", "lora_path": "x"}, "lora_name"),
    ({"lora_name": "x", "lora_path": "x", "pinned": 1}, "pinned"),
    ({"lora_name": "x", "lora_path": "x", "lora_id": "y"}, "lora_id"),
    ({"lora_name": "x", "lora_path": "/nowhere"}, "lora_path"),
    ({"lora_name": "x", "lora_path": "https://a.example/x"}, "lora_path"),
    ({"lora_name": "x", "lora_path": "hf-user/repo"}, "lora_path"),
    ({"lora_name": "x", "lora_path": "\0"}, "lora_path"),
]


@pytest.mark.parametrize(("body", "field"), BAD_BODIES, ids=str)
def test_a_bad_body_loads_nothing(app, body, field):
    before = models(app)
    response = app.post("/load_lora_adapter", **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), response.text
    assert models(app) == before


@pytest.mark.parametrize("body", [{}, {"lora_name": None}, {"lora_name": 5}, {"lora_name": "red", "lora_path": "x"}])
def test_a_bad_body_unloads_nothing(app, body):
    before = models(app)
    assert app.post("/unload_lora_adapter", **body).status_code == 400
    assert models(app) == before


@pytest.mark.parametrize("spoil", ["config", "weights", "dora", "model"])
def test_a_folder_that_cannot_be_loaded_is_a_400_without_its_path_and_changes_nothing(app, written, tmp_path, spoil):
    folder, _ = written
    bad = tmp_path / "secret"
    shutil.copytree(folder / "red", bad)
    if spoil == "config":
        (bad / CONFIG).write_text("{")
    elif spoil == "weights":
        (bad / WEIGHTS).write_bytes(b"12345")
    elif spoil == "dora":
        change_config(bad, use_dora=True)
    else:
        write_adapter(write(tmp_path / "other", "llama", hidden_size=32), bad)
    before = models(app)
    error = refusal(app.post("/load_lora_adapter", lora_name="bad", lora_path=str(bad)), 400, "invalid_adapter")
    assert error["param"] == "lora_path"
    assert "secret" not in error["message"]
    assert models(app) == before
    assert tokens(ask(app, "red")) == expected(written, "red")


def test_only_who_may_administer_changes_adapters(make_app, written):
    folder, _ = written
    app = make_app(api_key="user", admin_api_key="admin")
    load = {"lora_name": "red", "lora_path": str(folder / "red")}
    for route, body in (("/load_lora_adapter", load), ("/unload_lora_adapter", {"lora_name": "red"})):
        for key, status in ((None, 401), ("user", 403), ("admin", 200)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            assert app.request("POST", route, json=body, headers=headers).status_code == status
            assert app.request("GET", route, headers=headers).status_code == (405 if key == "admin" else status)


# ---- settings


@pytest.mark.parametrize(
    ("paths", "fault"),
    [
        (("red",), r"has no readable adapter_config\.json"),
        (("=x",), "must be NAME=PATH"),
        (("red=",), "must be NAME=PATH"),
        (('{"lora_name": "red"}',), "must be NAME=PATH, PATH, or a JSON object"),
        (("red=/nowhere",), r"has no readable adapter_config\.json"),
        (("a\nb=FOLDER/red",), "printable"),
        (("red=FOLDER/red", "red=FOLDER/blue"), "is already loaded"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_shown(written, paths, fault):
    folder, _ = written
    settings = tuple(path.replace("FOLDER", str(folder)) for path in paths)
    with pytest.raises(StartupError, match=fault) as caught:
        real_engine(folder, Config(**SETTINGS, lora_paths=settings), progress=lambda *_: None)
    assert caught.value.field == "lora_paths"
    assert f"--lora-paths {settings[-1]}:" in caught.value.message


def test_an_adapter_without_a_name_is_called_by_its_path(written, make_app):
    folder, _ = written
    path = str(folder / "red")
    app = make_app(lora_paths=(path,))
    assert [name for name, _ in models(app)[1:]] == [path]
    assert tokens(ask(app, path)) == expected(written, "red")


def test_adapters_do_not_go_with_transformers_models(written):
    folder, _ = written
    settings = SETTINGS | {"model_impl": "transformers", "lora_paths": (f"red={folder / 'red'}",)}
    with pytest.raises(StartupError, match="adapters are not supported with --model-impl transformers"):
        real_engine(folder, Config(**settings), progress=lambda *_: None)


def test_the_setting_may_hold_several_and_a_path_may_hold_an_equals_sign(written, make_app, tmp_path):
    folder, _ = written
    odd = tmp_path / "a=b"
    shutil.copytree(folder / "blue", odd)
    written_out = json.dumps({"lora_name": "blue", "lora_path": str(folder / "blue"), "pinned": False})  # as SGLang's
    config = load({"lora_paths": [f"red={folder / 'red'}", f"odd={odd}", written_out]}, environment={})
    app = make_app(lora_paths=config.lora_paths)
    assert [name for name, _ in models(app)[1:]] == ["red", "odd", "blue"]
    assert tokens(ask(app, "blue")) == expected(written, "blue")
    assert tokens(ask(app, "odd")) == expected(written, "blue")
