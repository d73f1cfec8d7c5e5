"""Has long prompts computed by replicas that are for prompts, and read from --kv-disk by those that answer. Imported
only where replicas have roles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from tureen.contract.params import SamplingParams
from tureen.contract.types import GenerateRequest
from tureen.data_parallel.prefix_index import PrefixIndex
from tureen.data_parallel.replica import Passage, Replica
from tureen.data_parallel.routing_policy import choose_of, usable
from tureen.errors import TureenError
from tureen.log import get_logger
from tureen.serving.streams import Moved

log = get_logger("replicas")


class Handover:
    """Computes prompts before their requests are given to the replicas that answer."""

    def __init__(
        self, replicas: Callable[[], Sequence[Replica]], index: PrefixIndex, page_size: int, least_tokens: int
    ) -> None:
        """replicas: returns those that have an engine now. index: what each has cached. least_tokens: of a prompt, not
        cached, from which it is computed elsewhere."""
        self._replicas = replicas
        self._index = index
        self._page_size = page_size
        self._least_tokens = least_tokens

    async def prepare(self, passage: Passage) -> None:
        """Has the prompt of a request computed elsewhere, and its full pages saved, where that pays. Whoever is given
        the request computes what is missing: nothing is lost when this fails.

        Raises RequestFailed where the request is to blame for the death of engines.
        """
        pages = passage.pages[: _num_reusable(passage.live.request) // self._page_size]
        while passage.abort_reason is None and (replica := self._choose(passage, pages)) is not None:
            try:
                await self._compute(passage, pages, replica)
                return
            except Moved:
                log.info("replica %s leaves while it computes the prompt of a request", replica.label)
            except TureenError as error:
                if error.code == "poison":
                    raise
                log.info("replica %s cannot compute the prompt of a request: %s", replica.label, error.message)
                return

    def _choose(self, passage: Passage, pages: Sequence[int]) -> Replica | None:
        """Returns the replica that is to compute a prompt; None where whoever answers does that best."""
        answering = usable(self._replicas(), passage)
        if not answering or any(each.role == "prefill" for each in answering):
            return None
        known = self._index.num_known(pages)
        num_missing = len(pages) - max(known[each.number] for each in answering)
        if num_missing * self._page_size < self._least_tokens:
            return None
        able = [each for each in self._replicas() if _is_for_prompts(each) and any(_share(each, o) for o in answering)]
        if not any(each.role == "prefill" for each in able) and not any(each.role == "decode" for each in answering):
            return None
        best = [each for each in able if each.role == "prefill"] or able
        return choose_of(best, known, self._page_size, len(pages) * self._page_size) if best else None

    async def _compute(self, passage: Passage, pages: Sequence[int], replica: Replica) -> None:
        """Raises Moved where the replica is lost or drained meanwhile, TureenError where it refuses or fails."""
        num_new = (len(pages) - self._index.num_known(pages)[replica.number]) * self._page_size
        passage.enter(replica, num_new, num_new)
        self._index.give(replica.number, pages)
        request = passage.continued(_prompt_of(passage.live.request, len(pages) * self._page_size))
        try:
            async with contextlib.aclosing(replica.client.generate(request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if delta.finish is not None and delta.finish.type == "length":
                        passage.num_saved = len(pages)
                        passage.live.note_cached(0 if delta.usage is None else delta.usage.cached_tokens)
                        passage.prompt_times = delta.timeline
        finally:
            passage.leave()
            passage.num_moves += 1  # no other engine gets it under the same id


def fault_of(replicas: Sequence[Replica]) -> str:
    """Returns why pages cannot be handed over between replicas that are there; "" where they can."""
    there = [each for each in replicas if each.client.health.state == "healthy"]
    for replica in there:
        if replica.role != "both" and not replica.client.info.kv_folder:
            return (
                f"replica {replica.label} has the role {replica.role} but no --kv-disk, through which prompts are "
                "handed over; give all replicas the same"
            )
    for replica in there:
        others = [each for each in there if replica.role == "prefill" and each.role != "prefill"]
        for other in others:
            if replica.client.info.kv_folder != other.client.info.kv_folder:
                return (
                    f"replicas {replica.label} and {other.label} do not share the folder of --kv-disk, in which "
                    "prompts are handed over; name one that both machines have mounted"
                )
            if replica.client.info.kv_identity != other.client.info.kv_identity:
                return (
                    f"what replica {replica.label} computes, {other.label} cannot read: their processors, settings or "
                    "versions differ; give both the same, or the role both"
                )
    return ""


def _is_for_prompts(replica: Replica) -> bool:
    is_there = replica.client.health.state == "healthy" and not (replica.is_drained or replica.is_closed)
    return is_there and replica.role != "decode"


def _share(replica: Replica, other: Replica) -> bool:
    """Says whether one can read what the other saves."""
    first, second = replica.client.info, other.client.info
    is_same = (first.kv_folder, first.kv_identity) == (second.kv_folder, second.kv_identity)
    return bool(first.kv_folder) and is_same and replica.weights == other.weights


def _num_reusable(request: GenerateRequest) -> int:
    """Returns how many tokens of a prompt need not be computed where it is answered."""
    if request.hidden_states in ("all", "pooled"):
        return 0
    if request.logprobs is not None and request.logprobs.prompt_start >= 0:
        return max(0, request.logprobs.prompt_start - 1)
    return len(request.token_ids)


def _prompt_of(request: GenerateRequest, num_tokens: int) -> GenerateRequest:
    """Returns the request that computes the first tokens of another one's prompt, and draws nothing."""
    return msgspec.structs.replace(
        request,
        token_ids=request.token_ids if request.media else request.token_ids[:num_tokens],  # no picture is cut
        params=SamplingParams(),
        max_new_tokens=0,
        logprobs=None,
        hidden_states="none",
        explain=False,
        processor="",
        banned=None,
        grammar=None,
        later=None,
        awaits_saving=True,
    )
