"""A real server whose engine process is killed or stopped: every output equals that of an undisturbed run.

The model sees pictures, and clients send code. tests/serving/test_healing.py loses the engine at each step,
tests/engine/test_resumed_models.py resumes registered processors, and test_engine_clients.py kills by one request.
"""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import shape_drawings
from followers import (
    PATIENCE_S,
    TEXT,
    engine,
    follow_all,
    follow_through_death,
    health,
    streams,
    wait_until,
    wait_well,
)
from server_process import PATIENT_SANDBOX, ServerProcess, metric

from tureen.log import no_progress
from tureen.logit_processor import CustomLogitProcessor
from tureen.recipes import shapes_vlm

pytestmark = pytest.mark.model

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
LONG = {"max_new_tokens": 48, "ignore_eos": True}
WARM = LONG | {"temperature": 0.8, "sampling_seed": 7}
PROMPT = "<|im_start|>user\n<image>\nDescribe this image.<|im_end|>\n<|im_start|>assistant\n"
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
    flags = ["--model-path", folder, "--engine", "process", "--enable-custom-logit-processor"]
    flags += ["--resume-grace-s", "120", "--grammar-compile-timeout-s", "120", "--freeze-grace-s", str(PATIENCE_S)]
    with ServerProcess(*flags, env=PATIENT_SANDBOX, threads=None) as running:
        running.wait_ready()
        post(running, "/load_lora_adapter", lora_name="late", lora_path=str(ADAPTERS / "whisper"))
        wait_until(lambda: knows_its_grammar(running), "the grammar is compiled")
        yield running


def knows_its_grammar(server: ServerProcess) -> bool:
    """A machine that is very busy may not compile it within a request's time at first."""
    answer = httpx.post(f"{server.url}/generate", json=streams(48)["grammar"], timeout=PATIENCE_S)
    return answer.status_code == 200


def picture(number: int) -> str:
    file = io.BytesIO()
    shape_drawings.load().draw(shape_drawings.UNSEEN + number, "one").picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def client_code() -> str:
    """The payload that a client's script would send."""
    scope = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor}
    exec(CODE, scope)
    return scope["Counting"].to_str()


def post(server: ServerProcess, path: str, **body: object) -> object:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()


def begun_session(server: ServerProcess) -> dict:
    """Open a session and take its first turn. Return the parameters of the next turn."""
    session = post(server, "/open_session", capacity_of_str_len=10_000)
    first = post(
        server,
        "/generate",
        text=TEXT,
        sampling_params={"sampling_seed": 9, "max_new_tokens": 12},
        session_params={"id": session, "rid": None},
    )
    return {"id": session, "rid": first["meta_info"]["id"]}


def all_streams(server: ServerProcess) -> dict[str, dict]:
    """Return one stream of each kind. One continues a new session."""
    return streams(48) | {
        "stop": {"text": TEXT, "sampling_params": LONG | {"sampling_seed": 4, "stop": ["zzz", "in the end of the "]}},
        "picture": {"text": PROMPT, "image_data": picture(0), "sampling_params": LONG | {"temperature": 0}},
        "pictures": {
            "text": PROMPT.replace("<image>", "<image>\n<image>"),
            "image_data": [picture(1), picture(2)],
            "sampling_params": WARM | {"n": 2},
        },
        "code": {"text": TEXT, "custom_logit_processor": client_code(), "sampling_params": LONG | {"temperature": 0}},
        "session": {"text": "Then", "sampling_params": WARM, "session_params": begun_session(server)},
        "returning": {"text": TEXT, "sampling_params": WARM},
        "returning picture": {"text": PROMPT, "image_data": picture(3), "sampling_params": WARM},
    }


def follow(server: ServerProcess, disturb: Callable[[], None] | None = None) -> dict[str, list[tuple]]:
    """Follow one stream of each kind; another session takes its second turn after all of them."""
    turn = begun_session(server)
    found = follow_all(server, all_streams(server), disturb, leaving=LEAVING)
    wait_well(server)
    after = post(server, "/generate", text="Then", sampling_params=WARM, session_params=turn)
    return found | {"later turn": [(after["text"], after["output_ids"])]}


@pytest.fixture(scope="module")
def undisturbed(server) -> dict[str, list[tuple]]:
    found = follow(server)
    assert {name for name, outputs in found.items() if len(outputs) == 2} == {"samples", "pictures"}
    assert all(one[1] for outputs in found.values() for one in outputs)
    return found


def test_a_killed_engine_is_a_pause_for_every_kind_of_stream_and_between_turns_of_a_session(server, undisturbed):
    killed = partial(follow, server, lambda: os.kill(engine(server), signal.SIGKILL))
    assert follow_through_death(killed, server, len(undisturbed) - 1) == undisturbed
    wait_well(server)


def test_a_stopped_engine_is_suspect_and_goes_on_where_it_was(server, undisturbed):
    before = metric(server.url, "sglang:engine_replacements_total")

    def stop() -> None:
        pid = engine(server)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: health(server) == (503, "engine_suspect"), "it is noticed")
        assert metric(server.url, "sglang:engine_suspect") == 1
        os.kill(pid, signal.SIGCONT)
        wait_well(server)

    assert follow(server, stop) == undisturbed
    assert metric(server.url, "sglang:engine_replacements_total") == before
