"""Gives a request to a replica: to one that may have it, by its state, its weights and its role, and has little to do
for it."""

from __future__ import annotations

from collections.abc import Sequence

from tureen.contract.types import GenerateRequest
from tureen.data_parallel.prefix_index import PrefixIndex, Standing, choose
from tureen.data_parallel.replica import Passage, Replica

PREFERENCE: dict[str, int] = {"healthy": 0, "suspect": 1, "replacing": 2}
"""States of an engine in which requests can be given to it; first the one that answers soonest."""


EXPECTED_TOKENS = 256
"""Output tokens that a request is expected to have at most, when loads are compared."""


def place(
    passage: Passage, rest: GenerateRequest, replicas: Sequence[Replica], index: PrefixIndex, page_size: int
) -> Replica | None:
    """Gives a request to a replica, and returns it; None where there is none that takes it.

    rest: of the request, what is left to do. replicas: those that have an engine.
    """
    able = usable(replicas, passage)
    if not able:
        return None
    known = index.num_known(passage.pages)
    num_prompt = len(rest.token_ids) + len(rest.resumed)
    expected = min(rest.max_new_tokens - len(rest.resumed), EXPECTED_TOKENS)
    replica = choose_of(able, known, page_size, num_prompt + expected)
    num_uncached = num_prompt - max(known[replica.number], passage.num_saved) * page_size
    passage.enter(replica, num_uncached, num_uncached + expected)
    index.give(replica.number, passage.pages)
    return replica


def usable(replicas: Sequence[Replica], passage: Passage) -> list[Replica]:
    """Returns the replicas that may be chosen: those in the best state that any is in, none that is drained unless all
    are, and none that is for prompts unless all are."""
    ranks = {
        replica: (replica.is_drained, PREFERENCE[replica.client.health.state], replica.role == "prefill")
        for replica in replicas
        if replica.client.health.state in PREFERENCE and _may_take(replica, passage, replicas)
    }
    best = min(ranks.values(), default=None)
    return [replica for replica, rank in ranks.items() if rank == best]


def choose_of(replicas: Sequence[Replica], known: Sequence[int], page_size: int, num_tokens: int) -> Replica:
    """Returns the replica, of at least one, that a request is given to.

    known: pages of its prompt that each of all replicas is likely to have cached, by number. num_tokens: that it makes
    one compute which has none of them.
    """
    standings = [Standing(each.number, each.total_load, each.num_given, known[each.number]) for each in replicas]
    most = max(standing.num_known for standing in standings)
    number = choose(standings, num_tokens - most * page_size)
    return next(each for each in replicas if each.number == number)


def _may_take(replica: Replica, passage: Passage, replicas: Sequence[Replica]) -> bool:
    """Says whether a replica may be given a request. While another front exchanges its weights, it takes what can go on
    nowhere else, and is waited for; other requests would get unknown weights."""
    if not passage.may_be_in(replica):
        return False
    if not replica.is_closed:
        return True
    return passage.weights is not None and sum(map(passage.may_be_in, replicas)) == 1
