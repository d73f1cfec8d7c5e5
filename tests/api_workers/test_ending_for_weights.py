"""Where all requests are ended for other weights, those of all fronts are."""

from __future__ import annotations

import pytest
from app_under_test import App


class OtherFronts:
    """Fronts that note what is ended."""

    num_running = 0

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def abort_all(self, reason: str) -> int:
        self.reasons.append(reason)
        return 0


@pytest.mark.parametrize(("asked", "reasons"), [(True, ["weights"]), (False, [])])
def test_requests_of_other_fronts_end_before_the_weights_have_another_name(asked, reasons):
    with App() as app:
        fronts = app.state.common.fronts = OtherFronts()
        answer = app.post("/update_weight_version", new_version="step-2", abort_all_requests=asked)
        app.state.common.fronts = None
    assert answer.status_code == 200
    assert fronts.reasons == reasons
