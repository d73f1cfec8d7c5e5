"""The client of an engine that several fronts use, each with requests that the others do not know."""

from __future__ import annotations

from collections import Counter

from tureen import errors
from tureen.config import Config
from tureen.serving.healing import HealingClient, MakeHost
from tureen.serving.trials import POISON_AFTER


class FrontClient(HealingClient):
    """A client that blames no request: which of all fronts' requests kills engines is not known here. A request under
    which POISON_AFTER engines died is ended, and may be sent again."""

    def __init__(self, make_host: MakeHost, config: Config) -> None:
        super().__init__(make_host, watchdog_timeout_s=config.watchdog_timeout_s, freeze_grace_s=config.freeze_grace_s)
        self._deaths: Counter[str] = Counter()  # of engines, by the request that they had

    def _replace(self, reason: str, *, is_suspicious: bool) -> None:
        submitted = self._streams.submitted if is_suspicious else []
        self._deaths = Counter({name: self._deaths[name] + 1 for name in submitted})
        super()._replace(reason, is_suspicious=False)
        for request_id, count in self._deaths.items():
            if count >= POISON_AFTER:
                self._streams.end(
                    request_id,
                    errors.Unavailable(
                        f"{count} engines died, the last one ({reason}), while they had this request and others; send "
                        "it again",
                        code="engine_dead",
                    ),
                )
