"""What several fronts cannot be combined with is refused at the start, by name."""

from __future__ import annotations

import pytest
from app_under_test import App

from tureen.api_workers.session_proxy import Entrance
from tureen.api_workers.start import check
from tureen.api_workers.worker import own_config
from tureen.config import Config
from tureen.errors import StartupError


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"engine": "thread"}, "engine", "leave --engine out"),
        ({"models": ({"model_path": "a"}, {"model_path": "b"})}, "models", "leave --api-workers out"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(settings, field, words):
    with pytest.raises(StartupError) as refused:
        check(Config(api_workers=2, **settings))
    assert refused.value.field == field
    assert refused.value.message.startswith("--api-workers 2 with ")
    assert words in refused.value.message


def test_an_engine_in_a_process_is_what_fronts_share():
    check(Config(api_workers=2))
    check(Config(api_workers=2, engine="process"))
    check(Config(api_workers=2, replicas=2))
    check(Config(api_workers=2, replicas="tcp://127.0.0.1:7000,tcp://127.0.0.1:7001"))
    check(Config(api_workers=2, replicas="ray://auto?n=2"))


def test_only_the_owner_has_the_file_of_what_clients_use_and_it_answers_all():
    config = Config(api_workers=2, usage_db="use.db")
    assert own_config(config).usage_db is None
    call = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    with App() as app:
        assert Entrance(app.app, config, "").is_owners(call)
        assert not Entrance(app.app, Config(api_workers=2), "").is_owners(call)
