"""Fields of the documentation pages that need a model's own logits: over HTTP, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from app_under_test import App
from real_app import RealApp, write_model


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, seed=5)
    with RealApp(folder) as running:
        yield running


def test_both_kinds_of_logprobs_stand_side_by_side(app: App):
    body = {"text": "abcd", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    body["sampling_params"] = {"max_new_tokens": 3, "sampling_seed": 3, "temperature": 0.5}
    metas = {mode: app.generate(**body, logprobs_mode=mode)["meta_info"] for mode in ("processed", "raw", "both")}
    for kind in ("token_logprobs", "top_logprobs"):
        assert metas["both"][f"output_{kind}"] == metas["processed"][f"output_{kind}"]
        assert metas["both"][f"raw_output_{kind}"] == metas["raw"][f"output_{kind}"]
        assert metas["raw"][f"output_{kind}"] != metas["processed"][f"output_{kind}"]
        assert metas["both"][f"input_{kind}"] == metas["raw"][f"input_{kind}"]
    assert not [name for mode in ("processed", "raw") for name in metas[mode] if name.startswith("raw_")]
    assert (
        app.events(**body, logprobs_mode="both")[-1]["meta_info"]["raw_output_token_logprobs"]
        == (metas["both"]["raw_output_token_logprobs"])
    )
