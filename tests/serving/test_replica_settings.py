"""What a server with several replicas refuses to start with, and what each of them gets."""

from __future__ import annotations

import pytest
import tiny_gguf
import tiny_models

from tureen.build import find_model
from tureen.config import Config
from tureen.data_parallel.engine_command import serve_engine
from tureen.data_parallel.start import check, check_roles, own_config, role_of
from tureen.devices import cpu
from tureen.errors import StartupError
from tureen.multi_model.settings import each_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return str(tiny_gguf.write_from_transformers(folder / "m.gguf", tiny_models.write(folder / "hf", "llama")))


def test_each_replica_gets_its_share_of_threads_helpers_and_memory(model_path, monkeypatch):
    monkeypatch.setattr(cpu, "num_threads", lambda: 8)
    config = Config(model_path=model_path, replicas=3, helper_memory_mib=300, device="cpu")
    own = own_config(config, find_model(config), 3)
    assert (own.num_threads, own.helper_memory_mib) == (2, 100)
    assert own.max_total_tokens > 0
    assert own_config(Config(model_path=model_path, replicas=3, num_threads=5), find_model(config), 3).num_threads == 5


def test_a_replica_has_room_for_all_that_the_front_lets_in_when_others_are_lost(model_path):
    config = Config(model_path=model_path, replicas=3, device="cpu", max_running_requests=8, max_queued_requests=4)
    own = own_config(config, find_model(config), 3)
    let_in = 3 * 8 + 4
    assert own.max_running_requests + own.max_queued_requests >= let_in


def test_more_replicas_than_fit_in_memory_are_refused_with_the_number_that_does(model_path, monkeypatch):
    config = Config(model_path=model_path, replicas=4, device="cpu")
    model = find_model(config)
    monkeypatch.setattr(cpu, "free_bytes", lambda: 300 << 20)
    with pytest.raises(
        StartupError, match=r"--replicas 4: each needs \d+ MiB, .* and 300 MiB are free; start at most \d"
    ):
        own_config(config, model, 4)


@pytest.mark.parametrize("wrong", [{"engine": "thread"}, {"device": "cuda"}])
def test_replicas_in_threads_or_on_one_gpu_are_refused(wrong):
    with pytest.raises(StartupError, match="--replicas 2"):
        check(Config(model_path="m", replicas=2, **wrong))


@pytest.mark.parametrize("setting", ["replicas", "prefill_replicas"])
def test_several_models_with_replicas_are_refused(setting):
    config = Config(model_path="m", **{setting: 2}, models=({"model_path": "a"}, {"model_path": "b"}))
    with pytest.raises(StartupError, match="2 models with --replicas or --prefill"):
        each_model(config)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"replicas": 1, "kv_disk": "kv"}, "--replicas 1: one at least must answer"),
        ({"replicas": 2, "prefill_replicas": 2, "kv_disk": "kv"}, "--replicas 2: one at least must answer"),
        ({"replicas": 2}, "no --kv-disk"),
        ({"replicas": 2, "max_replicas": 3, "kv_disk": "kv"}, "a role needs a replica that stays"),
        ({"replicas": "tcp://a:1,tcp://b:1", "kv_disk": "kv"}, "tureen engine --role"),
    ],
)
def test_roles_that_cannot_be_kept_to_are_refused(wrong, why):
    with pytest.raises(StartupError, match=why) as refused:
        check_roles(Config(model_path="m", **{"prefill_replicas": 1} | wrong))
    assert refused.value.field == "prefill_replicas"


def test_the_first_replicas_compute_prompts_and_all_are_alike_where_none_is_to():
    config = Config(model_path="m", replicas=3, prefill_replicas=1, kv_disk="kv")
    check_roles(config)
    assert [role_of(config, number) for number in range(3)] == ["prefill", "decode", "decode"]
    check_roles(Config(model_path="m", replicas=3))
    assert role_of(Config(model_path="m", replicas=3), 0) == "both"


def test_an_engine_with_a_role_and_no_folder_for_prompts_is_refused():
    with pytest.raises(StartupError, match="--role prefill needs --kv-disk"):
        serve_engine(Config(model_path="m"), "127.0.0.1:0", "prefill")
