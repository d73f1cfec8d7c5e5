"""Actions of an operator on a running engine: pause it, empty its cache, replace the model's weights, release its
memory for a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from tureen.contract.types import PauseMode
from tureen.engine.adapters import Caller
from tureen.engine.scheduler import Scheduler
from tureen.engine.sequence import Sequence
from tureen.errors import Conflict, InvalidRequest, Unavailable

RELEASED_RETRY_S = 5
PARTS = ("kv_cache", "weights")
MOST_WAITING = 1024
"""Maximum number of waiting requests that an overview names."""


class Control:
    """Whether the engine is paused, and whether it accepts new requests."""

    def __init__(
        self,
        runner: Caller,
        scheduler: Scheduler,
        sequences: Collection[Sequence],
        *,
        abort: Callable[[str, str], None],
        clear: Callable[[], int],
    ) -> None:
        """sequences: a view of all unfinished ones. abort: ends one, with a reason. clear: drops all unused cache
        entries and returns the number of freed pages."""
        self.is_paused = False
        self.released: set[str] = set()  # parts of the model whose memory is released
        self._runner = runner
        self._scheduler = scheduler
        self._sequences = sequences
        self._abort = abort
        self._clear = clear

    @property
    def operations(self) -> dict[str, Callable[..., object]]:
        """Returns the operations of this class by the names under which `Engine.call` finds them."""
        return {
            "flush_cache": self.flush_cache,
            "overview": self.overview,
            "pause": self.pause,
            "resume": self.resume,
            "hold": self.hold,
            "let_go": self.let_go,
            "update_weights": self.update_weights,
            "release_memory": self.release_memory,
            "resume_memory": self.resume_memory,
            "weight": partial(self._ask_runner, "weight", needs=("weights",)),
            "start_profile": partial(self._ask_runner, "start_profile", needs=PARTS),
            "stop_profile": partial(self._runner.call, "stop_profile"),
            "start_expert_record": partial(self._ask_runner, "start_expert_record", needs=PARTS),
            "stop_expert_record": partial(self._ask_runner, "stop_expert_record", needs=PARTS),
            "take_expert_record": partial(self._ask_runner, "take_expert_record", needs=PARTS),
        }

    def check_there(self, parts: Iterable[str] = PARTS) -> None:
        """Raises Unavailable while the memory of one of these parts of the model is released."""
        missing = self.released.intersection(parts)
        if missing:
            raise Unavailable(
                f"the server has released memory ({', '.join(sorted(missing))}); call /resume_memory_occupation first",
                code="memory_released",
                retry_after_s=RELEASED_RETRY_S,
            )

    def pause(self, mode: PauseMode) -> int:
        """Stops stepping until `resume`; new requests wait. Returns the number of unfinished requests.

        mode: what happens to running requests. `abort` ends them, `retract` frees their pages so that they are
        recomputed, `in_place` keeps the pages.
        """
        num_requests = len(self._sequences)
        self.is_paused = True
        if mode == "abort":
            for sequence in tuple(self._sequences):
                self._abort(sequence.request.id, "pause")
        elif mode == "retract":
            self._scheduler.preempt_all()
        return num_requests

    def resume(self) -> None:
        """Continues stepping after `pause`. Does nothing if the engine is not paused."""
        self.is_paused = False

    def hold(self) -> int:
        """Holds back new sequences until `let_go`. Returns the number of sequences that have begun, which continue."""
        self._scheduler.is_held = True
        return 0 if self.is_paused else self._scheduler.num_begun

    def let_go(self) -> None:
        """Ends `hold`: waiting sequences may begin again."""
        self._scheduler.is_held = False

    def overview(self) -> dict[str, Any]:
        """Returns an overview for an operator: the ids of the first waiting requests, and the prefix cache without its
        tokens. Its size is bounded."""
        from tureen.cache.summary import summarise  # noqa: PLC0415 - for servers that somebody looks at

        cached = summarise(self._scheduler.cache)
        waiting = [sequence.request.id for sequence in self._scheduler.queue.waiting[:MOST_WAITING]]
        return {"waiting": waiting, "branches": cached.branches, "num_left_out": cached.num_left_out}

    def flush_cache(self) -> int:
        """Drops all cached prefixes and returns their memory to the system. Returns the number of freed pages.

        Raises InvalidRequest while requests run.
        """
        if self._scheduler.running:
            raise InvalidRequest(
                f"the cache cannot be flushed while {len(self._scheduler.running)} requests run; wait until they end"
            )
        num_pages = self._clear()
        self._runner.call("forget")  # only running sequences hold pages
        return num_pages

    def update_weights(self, **source: Any) -> int:
        """Replaces the weights. Returns the number of paused requests that will be recomputed with the new ones.

        source: the place of the weights, as the runner's operation `update_weights` takes it. If hidden states or
        prompt log-probabilities of the old weights were already sent, the request ends, because the rest would be of
        another model.

        Raises Conflict while requests run. Raises InvalidRequest, and changes nothing, if the weights cannot be loaded.
        """
        num_begun = self._scheduler.num_begun
        if num_begun and not self.is_paused:
            raise Conflict(f"{num_begun} requests are running; pause generation, or wait until they end", code="busy")
        self._runner.call("update_weights", **source)
        self.released.discard("weights")
        self._scheduler.preempt_all()
        mixed = [sequence.request.id for sequence in self._sequences if not sequence.start_again()]
        for request_id in mixed:
            self._abort(request_id, "weights")
        self._clear()
        return num_begun - len(mixed)

    def release_memory(self, tags: list[str]) -> None:
        """Releases the memory of these parts of the model: `weights`, `kv_cache`. Refuses requests meanwhile.

        Raises Conflict while there are unfinished requests.
        """
        if self._sequences:
            raise Conflict(
                f"{len(self._sequences)} requests are running; memory can be released when they have finished or are "
                "aborted",
                code="busy",
            )
        self._clear()
        self._runner.call("release_memory", tags=tags)
        self.released.update(tags)

    def resume_memory(self, tags: list[str]) -> None:
        """Allocates the memory of these parts again. Raises Conflict, and InvalidRequest if the weights cannot be
        reloaded."""
        self._runner.call("resume_memory", tags=tags)
        self.released.difference_update(tags)

    def _ask_runner(self, op: str, *, needs: Iterable[str], **args: object) -> object:
        """Raises Unavailable while a part that it needs is released."""
        self.check_there(needs)
        return self._runner.call(op, **args)
