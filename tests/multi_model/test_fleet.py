"""Several models within a limit of memory: who is loaded when, and that nobody notices but by waiting."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from exchange import Exchange
from samples import some

from tureen.multi_model.sharing import CommonWeights
from tureen.requests import preparing
from tureen.requests.state import Context
from tureen.runner.shared_weights import SharedWeights

THREE = {"one": 40, "two": 40, "three": 50}


async def answered(*exchanges: Exchange) -> list[dict]:
    for exchange in exchanges:
        await exchange.wait()
        assert exchange.status == 200, exchange.text
    return [json.loads(exchange.text) for exchange in exchanges]


async def listed(fleet, path: str) -> list[str]:
    return [card["name"] for card in json.loads((await fleet.ask("GET", path)).text)["models"]]


def test_a_model_is_loaded_by_the_first_who_asks_and_once_for_many(simulate):
    async def body(fleet):
        assert [member.standing for member in fleet.fleet.members] == ["loaded", "unloaded", "unloaded"]
        answers = await answered(*(fleet.generate("two", f"say:{number}") for number in range(8)))
        assert [answer["text"] for answer in answers] == [str(number) for number in range(8)]
        assert fleet.member("two").loads.count == 1
        assert fleet.member("three").loads.count == 0

    simulate(body, THREE, 1000)


def test_a_body_without_a_model_is_for_the_first(simulate):
    async def body(fleet):
        await answered(fleet.generate(None, "say:a"), fleet.generate("default", "say:a"))
        assert [member.loads.count for member in fleet.fleet.members] == [1, 0, 0]

    simulate(body, THREE, 1000)


def test_the_time_until_the_model_is_loaded_counts_in_the_latency_and_is_shown(simulate):
    async def body(fleet):
        fleet.launcher.launch_s = 30
        exchange = fleet.generate("two", "say:a")
        await asyncio.sleep(10)
        [_, two, _] = json.loads((await fleet.ask("GET", "/status")).text)["models"]
        assert (two["status"], two["num_waiting"]) == ("loading", 1)
        assert 9 < two["longest_wait_s"] < 11
        [answer] = await answered(exchange)
        assert 30 <= answer["meta_info"]["e2e_latency"] < 40
        first = fleet.member("two").state.metrics.histogram("time_to_first_token_seconds")
        assert 30 <= first._sum < 40

    simulate(body, THREE, 1000)


def test_the_model_used_longest_ago_makes_room(simulate):
    async def body(fleet):
        await answered(fleet.generate("two", "say:a"))
        await answered(fleet.generate("one", "say:a"))
        await answered(fleet.generate("three", "say:a"))
        assert [member.standing for member in fleet.fleet.members] == ["loaded", "unloaded", "loaded"]
        [answer] = await answered(fleet.generate("two", "say:again"))
        assert answer["text"] == "again"
        assert fleet.fleet.most_bytes <= 95

    simulate(body, THREE, 95)


def _share(fleet, *names, num_bytes):
    weights = SharedWeights()
    for name in names:
        fleet.member(name).share = CommonWeights(weights, num_bytes)


def test_weights_that_two_models_have_in_common_count_once(simulate):
    async def body(fleet):
        _share(fleet, "one", "two", num_bytes=30)
        await answered(fleet.generate("two", "say:a"), fleet.generate("one", "say:b"))
        assert [member.standing for member in fleet.fleet.members] == ["loaded", "loaded", "unloaded"]
        status = json.loads((await fleet.ask("GET", "/status")).text)
        assert [model["memory_bytes"] for model in status["models"][:2]] == [40, 40]
        assert [model["shared_weights_bytes"] for model in status["models"]] == [30, 30, None]
        assert status["memory"]["used_bytes"] == 50
        await answered(fleet.generate("three", "say:c"))
        assert fleet.fleet.room.used_bytes == 50

    simulate(body, THREE, 50)


def test_a_model_that_was_given_other_weights_has_them_for_itself(simulate):
    async def body(fleet):
        _share(fleet, "one", "two", num_bytes=30)
        await answered(fleet.generate("two", "say:a"))
        fleet.member("two").client._streams.journal.note("update_weights", {"path": "/elsewhere"}, None)
        assert fleet.fleet.room.used_bytes == 80

    simulate(body, THREE, 100)


def test_a_model_that_works_is_waited_for_and_who_comes_later_waits_behind(simulate):
    async def body(fleet):
        long = fleet.generate("one", "abc", num_tokens=300)
        await asyncio.sleep(0.2)
        other = fleet.generate("two", "say:b")
        await asyncio.sleep(0.2)
        assert fleet.member("two").standing == "unloaded"
        late = fleet.generate("one", "say:late")
        texts = [answer["text"] for answer in await answered(long, other, late)]
        assert len(texts[0]) == 300
        assert texts[1:] == ["b", "late"]
        assert (fleet.member("one").loads.count, fleet.member("two").loads.count) == (2, 1)

    simulate(body, {"one": 60, "two": 60}, 100)


def test_a_model_that_can_never_fit_is_refused_with_what_it_needs_and_what_there_is(simulate):
    async def body(fleet):
        exchange = fleet.generate("huge", "say:a")
        await exchange.wait()
        assert exchange.status == 400
        assert exchange.error["code"] == "model_too_large"
        assert "needs 9.31 GiB" in exchange.error["message"]
        assert "may use 0.93 GiB" in exchange.error["message"]
        await answered(fleet.generate("one", "say:a"))

    simulate(body, {"one": 10, "huge": 10 * 10**9}, 10**9)


def test_a_model_that_does_not_start_is_503_to_all_who_wait_and_tried_again_later(simulate):
    async def body(fleet):
        fleet.launcher.broken.add("two")
        waiting = [fleet.generate("two", "say:a") for _ in range(3)]
        for exchange in waiting:
            await exchange.wait()
            assert (exchange.status, exchange.error["code"]) == (503, "model_not_loaded")
            assert "secret" not in exchange.text
        assert int(waiting[0].headers["retry-after"]) >= 1
        await answered(fleet.generate("one", "say:fine"))
        fleet.launcher.broken.clear()
        await asyncio.sleep(5)
        await answered(fleet.generate("two", "say:a"))

    simulate(body, THREE, 1000)


@pytest.mark.parametrize("field", ["deadline_ms", "ttft_deadline_ms"])
def test_a_deadline_ends_the_wait_for_a_model(simulate, field):
    async def body(fleet):
        fleet.launcher.launch_s = 60
        began_s = asyncio.get_running_loop().time()
        exchange = fleet.generate("two", "say:a", **{field: 2000})
        await exchange.wait()
        assert (exchange.status, exchange.error["code"]) == (503, "deadline_unreachable")
        assert asyncio.get_running_loop().time() - began_s < 3

    simulate(body, THREE, 1000)


def test_what_is_left_of_a_deadline_holds_after_the_wait(simulate):
    async def body(fleet):
        fleet.launcher.launch_s = 10
        [answer] = await answered(fleet.generate("two", "abc", num_tokens=1500, deadline_ms=12_000))
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 11 < answer["meta_info"]["e2e_latency"] < 14

    simulate(body, THREE, 1000)


def test_a_client_that_leaves_while_it_waits_is_forgotten_and_nothing_is_loaded_for_it(simulate):
    async def body(fleet):
        long = fleet.generate("one", "abc", num_tokens=300)
        await asyncio.sleep(0.2)
        other = fleet.generate("two", "say:b")
        await asyncio.sleep(0.2)
        await other.leave()
        await answered(long)
        await asyncio.sleep(20)
        assert fleet.member("two").loads.count == 0
        assert not fleet.member("two").waiters
        assert fleet.member("one").is_ready

    simulate(body, {"one": 60, "two": 60}, 100)


def test_the_templates_of_a_further_model_are_probed_before_its_first_chat_once_no_request_runs(simulate, monkeypatch):
    async def body(fleet):
        probed = []
        monkeypatch.setattr(Context, "probe_templates", lambda context: probed.append(context.info.model_name))
        monkeypatch.setattr(preparing, "IDLE_S", 0.1)
        long = fleet.generate("two", "abc", num_tokens=300)
        while not fleet.member("two").is_ready:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert (long.running.done(), probed) == (False, [])
        await answered(long)
        await asyncio.sleep(1)
        assert probed == ["two"]

    simulate(body, THREE, 1000)


def test_clients_share_the_places_of_those_who_wait_for_a_model(simulate, monkeypatch):
    async def body(fleet):
        fleet.launcher.launch_s = 60
        greedy = [fleet.generate("two", "say:a") for _ in range(5)]
        await asyncio.sleep(1)
        assert fleet.member("two").report()["num_waiting"] == 4
        monkeypatch.setattr(Exchange, "address", "192.0.2.1")
        modest = [fleet.generate("two", "say:a") for _ in range(3)]
        for exchange in greedy + modest:
            await exchange.wait()
        for exchanges in (greedy, modest):
            assert [exchange.status for exchange in exchanges].count(200) == 2
        assert {exchange.error["code"] for exchange in greedy + modest if exchange.status != 200} == {"queue_full"}
        assert fleet.member("two").num_users == 0

    simulate(body, THREE, 1000, max_queued_requests=4)


def test_an_engine_that_dies_harms_no_other_model(simulate):
    async def body(fleet):
        await answered(fleet.generate("two", "say:a"))
        long = fleet.generate("one", "abc", num_tokens=200)
        await asyncio.sleep(0.2)
        [host] = fleet.launcher.around["two"].hosts
        await host.close(at_once=True)
        fleet.member("two").client._lose(1, "it was killed")
        [answer] = await answered(long)
        assert len(answer["text"]) == 200
        assert (await fleet.ask("GET", "/health")).status == 200
        await answered(fleet.generate("two", "say:back"))
        assert fleet.member("one").client.health.num_replacements == 0

    simulate(body, THREE, 1000)


def test_keep_alive_0_unloads_after_the_answer(simulate):
    async def body(fleet):
        chat = {"model": "two", "prompt": "say:a", "raw": True, "stream": False, "options": {"num_predict": 4}}
        await answered(fleet.send("/api/generate", **chat, keep_alive="5m"))
        assert await listed(fleet, "/api/ps") == ["one", "two"]
        [answer] = await answered(fleet.send("/api/generate", **chat, keep_alive=0))
        assert answer["response"] == "a"
        await asyncio.sleep(5)
        assert await listed(fleet, "/api/ps") == ["one"]
        assert await listed(fleet, "/api/tags") == ["one", "two", "three"]

    simulate(body, THREE, 1000)


def test_a_session_goes_on_after_its_model_was_away(simulate):
    async def body(fleet):
        opened = await fleet.ask("POST", "/open_session", {"capacity_of_str_len": 1000, "session_id": "s"})
        assert opened.status == 200
        session = {"id": "s", "rid": None, "replace": False, "offset": -1}
        [first] = await answered(fleet.generate("one", "say:ab", session_params=session))
        await answered(fleet.generate("two", "say:b"))
        assert fleet.member("one").standing == "unloaded"
        session["rid"] = first["meta_info"]["id"]
        [second] = await answered(fleet.generate("one", "cd", session_params=session, num_tokens=1))
        assert second["meta_info"]["prompt_tokens"] > first["meta_info"]["prompt_tokens"] + 2

    simulate(body, {"one": 60, "two": 60}, 100)


def test_operators_load_and_unload_and_a_busy_model_stays(simulate):
    async def body(fleet):
        assert (await fleet.ask("POST", "/models/load", {"model": "two"})).status == 200
        assert fleet.member("two").is_ready
        long = fleet.generate("two", "abc", num_tokens=200)
        await asyncio.sleep(0.2)
        refused = await fleet.ask("POST", "/models/unload", {"model": "two"})
        assert (refused.status, refused.error["code"]) == (409, "model_busy")
        await answered(long)
        assert (await fleet.ask("POST", "/models/unload", {"model": "two"})).status == 200
        assert fleet.member("two").standing == "unloaded"
        missing = await fleet.ask("POST", "/models/load", {"model": "nobody"})
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        assert "there is no model nobody" in missing.error["message"]
        assert len(fleet.fleet.members) == 3

    simulate(body, THREE, 1000)


def test_a_model_that_an_operator_loads_by_a_new_name_joins_the_others(simulate):
    async def body(fleet):
        fleet.launcher.sizes["fourth"] = 60
        assert (await fleet.ask("POST", "/generate", {"text": "say:a", "model": "fourth"})).status == 404
        both = [fleet.send("/models/load", model="fourth"), fleet.send("/models/load", model="fourth")]
        for exchange in both:
            await exchange.wait()
            assert exchange.status == 200, exchange.text
        [answer] = await answered(fleet.generate("fourth", "say:new"))
        assert answer["text"] == "new"
        assert await listed(fleet, "/api/tags") == ["one", "two", "three", "fourth"]
        assert fleet.fleet.most_bytes <= 95

    simulate(body, THREE, 95)


def test_a_model_that_can_never_fit_does_not_join(simulate):
    async def body(fleet):
        fleet.launcher.sizes["huge"] = 2000
        refused = await fleet.ask("POST", "/models/load", {"model": "huge"})
        assert (refused.status, refused.error["code"]) == (400, "model_too_large")
        assert await listed(fleet, "/api/tags") == ["one", "two", "three"]

    simulate(body, THREE, 1000)


def test_a_pause_of_all_models_holds_for_those_that_are_loaded_later_until_it_ends(simulate):
    async def body(fleet):
        await fleet.ask("POST", "/pause_generation", {"mode": "in_place"})
        waiting = fleet.generate("two", "say:b")
        await asyncio.sleep(1000)
        assert not waiting.running.done()
        assert fleet.member("two").standing == "loaded"
        assert (await fleet.ask("POST", "/continue_generation")).status == 200
        [answer] = await answered(waiting)
        assert answer["text"] == "b"

    simulate(body, THREE, 1000)


def test_a_model_that_was_unloaded_while_all_were_paused_goes_on_when_all_do(simulate):
    async def body(fleet):
        await answered(fleet.generate("two", "say:b"))
        await fleet.ask("POST", "/pause_generation", {"mode": "in_place"})
        assert (await fleet.ask("POST", "/models/unload", {"model": "two"})).status == 200
        await fleet.ask("POST", "/continue_generation")
        [answer] = await answered(fleet.generate("two", "say:again"))
        assert answer["text"] == "again"

    simulate(body, THREE, 1000)


def test_ollama_is_told_how_long_the_model_took_to_load(simulate):
    async def body(fleet):
        fleet.launcher.launch_s = 30
        chat = [{"role": "user", "content": "say:abc"}]
        asked = {"model": "two", "messages": chat, "stream": False, "options": {"num_predict": 4}}
        [first] = await answered(fleet.send("/api/chat", **asked))
        assert 30e9 <= first["load_duration"] < 31e9
        assert first["prompt_eval_duration"] < 5e9
        parts = first["load_duration"] + first["prompt_eval_duration"] + first["eval_duration"]
        assert abs(parts - first["total_duration"]) < 1e9
        [second] = await answered(fleet.send("/api/chat", **asked))
        assert second["load_duration"] == 0

    simulate(body, THREE, 1000, chat_template="chatml")


def test_a_shutdown_refuses_who_waits_and_lets_all_models_finish(simulate):
    async def body(fleet):
        long = fleet.generate("one", "abc", num_tokens=100)
        await asyncio.sleep(0.2)
        other = fleet.generate("two", "say:b")
        await asyncio.sleep(0.2)
        fleet.common.lifecycle.drain()
        await other.wait()
        assert (other.status, other.error["code"]) == (503, "draining")
        assert fleet.common.num_running == 1
        await answered(long)

    simulate(body, {"one": 60, "two": 60}, 100)


def test_the_metrics_have_the_model_as_a_label_and_each_name_once(simulate):
    async def body(fleet):
        await answered(fleet.generate("two", "say:a"), fleet.generate("one", "say:a"))
        text = (await fleet.ask("GET", "/metrics")).text
        assert text.count("# TYPE sglang:prompt_tokens_total counter") == 1
        for name in ("one", "two"):
            assert f'sglang:num_requests_total{{finish_reason="stop",model_name="{name}"}} 1.0' in text
            assert f'sglang:time_to_first_token_seconds_count{{model_name="{name}"}} 1.0' in text

    simulate(body, THREE, 1000)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(150), 25))
def test_whoever_comes_when_every_answer_is_right_within_the_limit(simulate, seed):
    """Clients ask for three models of which one or two fit; some leave; engines are late."""
    rng = random.Random(f"plan {seed}")
    limit = rng.choice([50, 95, 130])

    async def client(fleet, number):
        for turn in range(rng.choice([1, 2, 4])):
            await asyncio.sleep(rng.choice([0, 0, 0.5, 3, 20]))
            text = f"{number}-{turn}" * rng.choice([1, 8])
            exchange = fleet.generate(rng.choice(list(THREE)), f"say:{text}", num_tokens=400)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.choice([0, 0.1, 1, 4]))
                await exchange.leave()
                continue
            [answer] = await answered(exchange)
            assert answer["text"] == text

    async def body(fleet):
        fleet.launcher.launch_s = rng.choice([0, 0.1, 5])
        await asyncio.gather(*(client(fleet, number) for number in range(rng.choice([2, 5, 9]))))
        await asyncio.sleep(60)
        assert fleet.fleet.most_bytes <= limit
        for member in fleet.fleet.members:
            assert (member.num_users, member.is_busy, member.waiters) == (0, False, {})
            assert not member.is_leaving
        assert not fleet.fleet._loading

    simulate(body, THREE, limit, seed=seed)
