"""The streams of a front that shares its engine with others: which of all fronts' requests kills engines is not known
here. Imported only where there are several fronts or engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tureen import errors
from tureen.serving.crash_bisection import POISON_AFTER
from tureen.serving.streams import Streams


class UnblamedStreams(Streams):
    """Streams that try no request alone. One under which POISON_AFTER engines died is ended, and may be sent again."""

    def __init__(self) -> None:
        super().__init__()
        self._deaths: Counter[str] = Counter()  # of engines, by the request that they had
        self.num_elsewhere: Callable[[], int] = lambda: 0  # returns how much the engine has to do for other fronts

    @property
    def is_waiting(self) -> bool:
        return self.is_busy or self.num_elsewhere() > 0

    def cut(self, reason: str, *, is_suspicious: bool) -> None:
        submitted = self.submitted
        super().cut(reason, is_suspicious=False)
        if is_suspicious:
            self._deaths = Counter({name: self._deaths[name] + 1 for name in submitted})
            for request_id in submitted:
                self._end_after(self._deaths[request_id], request_id, reason)

    def _end_after(self, count: int, request_id: str, reason: str) -> None:
        if count < POISON_AFTER:
            return
        self.end(
            request_id,
            errors.Unavailable(
                f"{count} engines died, the last one ({reason}), while they had this request and others; send it again",
                code="engine_dead",
            ),
        )
