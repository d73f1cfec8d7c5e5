"""Prompts are computed by one replica and answered by another: every output is that of one engine without roles,
whoever is lost meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import resumable_requests
from fake_engine import make_engine
from resumable_requests import request
from stepped_host import answers_undisturbed
from stepped_replicas import Worlds

from tureen.contract.types import LogprobSpec
from tureen.errors import RequestFailed, StartupError
from tureen.serving import healing

LONG = "abcdefghijklmnop" * 9 + "xyz"  # nine pages, and three tokens that are in no full page
NUM_FULL = 9 * 16
LEAST = 64


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0)


def engine_of(**facts):
    """A factory of engines that say this of the pages that they keep."""

    def make(*args, **more):
        engine, info = make_engine(*args, **more)
        return engine, msgspec.structs.replace(info, **{"kv_folder": "here", "kv_identity": "same"} | facts)

    return make


class RoledWorlds(Worlds):
    """Replicas with these roles. `prompts`: what each was given to compute, by number, in order."""

    def __init__(self, *roles, factories=None):
        super().__init__(len(roles), engine_of())
        for place, role, factory in zip(self.places, roles, factories or [engine_of()] * len(roles), strict=True):
            place.role, place.factory = role, factory
        self.client._prefill_min_tokens = LEAST

    async def start(self):
        def maker(place):
            def make(on_turn):
                client = place.make_client(on_turn)
                client.role = place.role
                return client

            return make

        await self.client.start([maker(place) for place in self.places])
        for place in self.places:
            place.client._tasks.pop("watch").cancel()
        return self

    def tokens(self, number):
        """How many prompt tokens a replica was given."""
        return self.places[number].client.stats.total_prompt_tokens


def requests():
    """One of each kind with a long prompt, and as they are."""
    short = resumable_requests.requests()
    long = [
        msgspec.structs.replace(each, id=f"long-{each.id}", token_ids=(*LONG.encode(), *each.token_ids))
        for each in short
        if not each.media and each.id != "said"
    ]
    return [*long, *short]


@pytest.fixture(scope="module")
def undisturbed():
    """What one engine answers, without a router."""
    return answers_undisturbed(requests())


def outputs(answers):
    """All but how many tokens were cached: that depends on who computed what before."""
    told = {}
    for name, answer in answers.items():
        usage = answer["usage"]
        told[name] = answer | {"usage": usage and msgspec.structs.replace(usage, cached_tokens=0)}
    return told


async def disturbed(roles, *events):
    worlds = await RoledWorlds(*roles).start()
    worlds.submit(*requests())
    turns = 0
    for turn, act in events:
        await worlds.turns(turn - turns)
        turns = turn
        act(worlds)
    await worlds.finish()
    loads = [replica.load for replica in worlds.client.replicas]
    assert (loads, worlds.client.num_live) == ([0] * len(roles), 0)
    assert not any(replica.passages for replica in worlds.client.replicas)
    await worlds.close()
    return {name: worlds.answer(name) for name in worlds.tasks}, worlds


def kill(number):
    return lambda worlds: worlds.places[number].host.lose("it was killed")


def drain(number):
    return lambda worlds: worlds.client.replicas[number].drain(is_drained=True)


def freeze(number):
    def act(worlds):
        worlds.places[number].host.is_frozen = True
        worlds.look(number, 1)

    return act


def one_of(*roles, factories=None):
    """Answers of requests that come one after the other, and the worlds."""

    async def scenario(*asked):
        worlds = await RoledWorlds(*roles, factories=factories).start()
        for each in asked:
            worlds.submit(each)
            await worlds.finish()
        await worlds.close()
        return [worlds.answer(each.id) for each in asked], worlds

    return lambda *asked: asyncio.run(scenario(*asked))


ROLES = [
    ("prefill", "decode"),
    ("decode", "prefill", "decode"),
    ("prefill", "both"),
    ("prefill", "prefill", "decode"),
    ("both", "decode"),
]


@pytest.mark.parametrize("roles", ROLES)
def test_requests_of_every_kind_are_answered_as_without_roles(undisturbed, roles):
    answers, worlds = asyncio.run(disturbed(roles))
    assert outputs(answers) == outputs(undisturbed)
    assert worlds.client.health.num_resumed == 0


def test_a_long_prompt_is_computed_by_the_one_for_prompts_and_a_short_one_is_not():
    answers, worlds = one_of("prefill", "decode")(request("long", LONG), request("short", "abc"))
    assert worlds.tokens(0) == NUM_FULL
    assert worlds.tokens(1) == len(LONG) + 3
    assert [answer["usage"].cached_tokens for answer in answers] == [0, 0]


@pytest.mark.parametrize("is_timed", [True, False])
def test_the_times_of_a_request_have_those_of_the_engine_that_computed_its_prompt(is_timed):
    _, worlds = one_of("prefill", "decode")(request("long", LONG, timed=is_timed), request("short", "abc", timed=True))
    times, short = (worlds.deltas[name][-1].timeline for name in ("long", "short"))
    if is_timed:
        assert sum(step.num_tokens for step in times.prompt.steps) == NUM_FULL
        assert times.prompt.drawn_ns == 0
        assert times.prompt.ended_ns <= times.received_ns
    else:
        assert times is None
    assert short.prompt is None


def test_a_replica_that_reads_a_prompt_is_not_taken_for_busy_with_it():
    asked = request("long", LONG)
    _, worlds = one_of("prefill", "decode")(asked)
    assert worlds.client.replicas[1].num_given == len(LONG) - NUM_FULL + asked.max_new_tokens


def test_a_prompt_that_the_answering_replica_has_cached_stays_there():
    _, worlds = one_of("prefill", "decode")(request("long", LONG), request("again", LONG + "and more"))
    assert worlds.tokens(0) == NUM_FULL


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": LogprobSpec(prompt_start=0)}, {"hidden_states": "all"}],
    ids=["scored", "states"],
)
def test_a_prompt_whose_tokens_are_all_asked_for_is_computed_where_it_is_answered(fields):
    _, worlds = one_of("prefill", "decode")(request("long", LONG, **fields))
    assert worlds.tokens(0) == 0


def test_a_prompt_whose_last_scores_are_asked_for_is_handed_over_up_to_there():
    _, worlds = one_of("prefill", "decode")(request("long", LONG, logprobs=LogprobSpec(prompt_start=100)))
    assert worlds.tokens(0) == 96


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill", "prefill", "decode", "decode")])
@pytest.mark.parametrize("act", [kill, freeze, drain])
@pytest.mark.parametrize("turn", range(6))
def test_outputs_are_the_same_whenever_the_one_for_prompts_leaves(undisturbed, roles, act, turn):
    answers, _ = asyncio.run(disturbed(roles, (turn, act(0))))
    assert outputs(answers) == outputs(undisturbed)


@pytest.mark.parametrize("turn", range(8))
def test_outputs_are_the_same_when_the_only_one_that_answers_is_lost(undisturbed, turn):
    answers, worlds = asyncio.run(disturbed(("prefill", "decode"), (turn, kill(1))))
    assert outputs(answers) == outputs(undisturbed)
    assert len(worlds.places[1].hosts) == 2


@pytest.mark.parametrize("drained", [0, 1], ids=["prefill", "decode"])
def test_without_one_of_a_role_the_other_computes_and_answers(drained):
    async def scenario():
        worlds = await RoledWorlds("prefill", "decode").start()
        drain(drained)(worlds)
        worlds.submit(request("long", LONG))
        await worlds.finish()
        await worlds.close()
        return worlds

    worlds = asyncio.run(scenario())
    assert (worlds.tokens(drained), worlds.tokens(1 - drained)) == (0, len(LONG))


def test_a_request_that_is_aborted_while_its_prompt_is_computed_ends_and_leaves_nothing():
    async def scenario():
        worlds = await RoledWorlds("prefill", "decode").start()
        worlds.submit(request("long", LONG))
        await worlds.settle()
        assert worlds.at(0) == ["long"]
        worlds.client.abort("long")
        await worlds.finish()
        await worlds.close()
        return worlds

    worlds = asyncio.run(scenario())
    assert [each.type for each in worlds.answer("long")["finish"]] == ["abort"]
    assert worlds.tokens(1) == 0


def test_a_client_that_leaves_while_its_prompt_is_computed_leaves_nothing():
    async def scenario():
        worlds = await RoledWorlds("prefill", "decode").start()
        worlds.submit(request("long", LONG))
        await worlds.settle()
        worlds.tasks["long"].cancel()
        await worlds.turns(3)
        live = [place.host.loop._live for place in worlds.places]
        loads = [replica.load for replica in worlds.client.replicas]
        await worlds.close()
        return live, loads

    assert asyncio.run(scenario()) == ([{}, {}], [0, 0])


def test_a_request_that_kills_engines_ends_wherever_its_prompt_is_computed():
    async def scenario():
        worlds = await RoledWorlds("prefill", "decode").start()
        worlds.submit(request("deadly", LONG, cache_salt="die", tokens=40), request("other", LONG))
        await worlds.finish()
        await worlds.close()
        return worlds

    worlds = asyncio.run(scenario())
    error = worlds.answer("deadly")["error"]
    assert isinstance(error, RequestFailed)
    assert error.code == "poison"
    assert worlds.answer("other")["error"] is None


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"kv_folder": ""}, "has the role .* but no --kv-disk"),
        ({"kv_folder": "elsewhere"}, "do not share the folder of --kv-disk"),
        ({"kv_identity": "other"}, "cannot read"),
    ],
)
def test_replicas_that_cannot_read_each_others_pages_are_refused_at_the_start(facts, why):
    with pytest.raises(StartupError, match=why) as refused:
        one_of("prefill", "decode", factories=[engine_of(), engine_of(**facts)])()
    assert refused.value.field == "replicas"


def test_nothing_is_handed_over_while_the_weights_differ():
    async def scenario():
        worlds = await RoledWorlds("prefill", "decode").start()
        worlds.client.replicas[0].weights = 1
        worlds.submit(request("long", LONG))
        await worlds.finish()
        await worlds.close()
        return worlds

    worlds = asyncio.run(scenario())
    assert (worlds.tokens(0), worlds.tokens(1)) == (0, len(LONG))
