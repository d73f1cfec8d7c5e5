"""The real server with a model that sees and with code of clients: its engine is killed, every output is the same."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import pytest
import shape_drawings
from followers import PATIENCE_S, engine, follow_all, follow_through_death, wait_well
from server_process import PATIENT_SANDBOX, ServerProcess

from tureen.log import no_progress
from tureen.logit_processor import CustomLogitProcessor
from tureen.recipes import shapes_vlm

pytestmark = pytest.mark.model

LONG = {"max_new_tokens": 60, "ignore_eos": True}
PROMPT = "<|im_start|>user\n<image>\nDescribe this image.<|im_end|>\n<|im_start|>assistant\n"
TEXT = "Once upon a time there was a small town by the sea. "
CODE = """
class Counting(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            params["calls"] = params.get("calls", 0) + 1
            if params["calls"] % 3 == 0:
                logits[row, logits[row].argmax()] = -float("inf")
        return logits
"""
"""What it does depends on how often it was called."""

LEAVING = ("returning", "returning picture")


@pytest.fixture(scope="module")
def server(default_model_source) -> Iterator[ServerProcess]:
    folder = str(shapes_vlm.build(default_model_source.path.parents[2], no_progress))
    flags = ("--engine", "process", "--enable-custom-logit-processor", "--resume-grace-s", "120")
    with ServerProcess("--model-path", folder, *flags, env=PATIENT_SANDBOX) as running:
        yield running.wait_ready()


def picture(number: int) -> str:
    file = io.BytesIO()
    shape_drawings.load().draw(shape_drawings.UNSEEN + number, "one").picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def client_code() -> str:
    """The payload that a client's script would send."""
    scope = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor}
    exec(CODE, scope)
    return scope["Counting"].to_str()


def streams(server: ServerProcess) -> dict[str, dict]:
    """Each time with a new session, which has had a turn."""
    session = post(server, "/open_session", capacity_of_str_len=10_000)
    turn = {"id": session, "rid": None}
    first = post(server, "/generate", text=TEXT, sampling_params={"sampling_seed": 9}, session_params=turn)
    warm = LONG | {"temperature": 0.8, "sampling_seed": 7}
    return {
        "picture": {"text": PROMPT, "image_data": picture(0), "sampling_params": LONG | {"temperature": 0}},
        "pictures": {
            "text": PROMPT.replace("<image>", "<image>\n<image>"),
            "image_data": [picture(1), picture(2)],
            "sampling_params": warm | {"n": 2},
        },
        "code": {"text": TEXT, "custom_logit_processor": client_code(), "sampling_params": LONG | {"temperature": 0}},
        "session": {
            "text": "Then",
            "sampling_params": warm,
            "session_params": {"id": session, "rid": first["meta_info"]["id"]},
        },
        "returning": {"text": TEXT, "sampling_params": warm},
        "returning picture": {"text": PROMPT, "image_data": picture(3), "sampling_params": warm},
    }


def post(server: ServerProcess, path: str, **body: object) -> object:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()


def follow(server: ServerProcess, disturb: Callable[[], None] | None = None) -> dict[str, list[tuple]]:
    return follow_all(server, streams(server), disturb, leaving=LEAVING)


def test_a_killed_engine_is_a_pause_for_pictures_clients_code_sessions_and_clients_that_return(server):
    undisturbed = follow(server)
    assert [len(outputs) for outputs in undisturbed.values()] == [1, 2, 1, 1, 1, 1]
    assert all(one[1] for outputs in undisturbed.values() for one in outputs)
    killed = partial(follow, server, lambda: os.kill(engine(server), signal.SIGKILL))
    assert follow_through_death(killed, server, len(undisturbed)) == undisturbed
    wait_well(server)
