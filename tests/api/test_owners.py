"""Clients with names of their own: none sees, names or ends what belongs to another."""

from __future__ import annotations

import asyncio

import pytest
from app_under_test import App
from timeouts import until

GREEDY = {"temperature": 0, "max_new_tokens": 4}
KEYS = {"anna": "a-key", "bert": "b-key"}


@pytest.fixture
def app(tmp_path):
    file = tmp_path / "keys"
    file.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    file.chmod(0o600)
    with App(slow=True, api_key_file=str(file), admin_api_key="root-key") as app:
        yield app


def headers(name):
    return {"authorization": f"Bearer {KEYS.get(name, 'root-key')}"}


async def post(app, name, path="/generate", **body):
    return await app.http.post(path, json=body, headers=headers(name))


def test_prompts_of_one_client_are_not_cached_for_another(app):
    prompt = {"text": "p" * 100, "sampling_params": GREEDY}

    def cached(name, **fields):
        return app.run(post(app, name, **prompt, **fields)).json()["meta_info"]["cached_tokens"]

    assert [cached("anna"), cached("anna")] == [0, 96]
    assert [cached("bert"), cached("bert")] == [0, 96]
    assert [cached("anna", cache_salt="s"), cached("anna", cache_salt="s")] == [0, 96]
    assert [cached("bert", cache_salt="s"), cached("root")] == [0, 0]


def test_a_salt_cannot_spell_another_client_s_cache(app):
    prompt = {"text": "p" * 100, "sampling_params": GREEDY}
    app.run(post(app, "anna", **prompt, cache_salt="s"))
    for salt in ("anna\ns", "\ns", "s", "anna"):
        answer = app.run(post(app, "root", **prompt, cache_salt=salt)).json()
        assert answer["meta_info"]["cached_tokens"] == 0, salt


def test_two_clients_may_use_the_same_rid_and_each_ends_its_own(app):
    body = {"text": "abc", "rid": "same", "sampling_params": {"max_new_tokens": 1500}}

    async def scenario():
        tasks = {name: asyncio.create_task(post(app, name, **body)) for name in KEYS}
        await until(lambda: app.client.stats.num_running >= 2)
        assert (await post(app, "anna", **body)).json()["error"]["code"] == "duplicate_rid"
        ended = await post(app, "anna", "/abort_request", rid="same")
        first = (await tasks["anna"]).json()
        assert not tasks["bert"].done()
        nothing = await post(app, "anna", "/abort_request", rid="same")
        by_admin = await post(app, "root", "/abort_request", rid="same")
        second = (await tasks["bert"]).json()
        return ended.json(), first, nothing.json(), by_admin.json(), second

    ended, first, nothing, by_admin, second = app.run(scenario())
    assert (ended, nothing, by_admin) == ({"aborted": 1}, {"aborted": 0}, {"aborted": 1})
    assert first["meta_info"]["finish_reason"]["type"] == second["meta_info"]["finish_reason"]["type"] == "abort"


def test_only_the_admin_ends_everything(app):
    assert app.run(post(app, "anna", "/abort_request", abort_all=True)).status_code == 403
    assert app.run(post(app, "root", "/abort_request", abort_all=True)).status_code == 200
