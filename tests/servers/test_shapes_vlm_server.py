"""A model that sees, through a real server: from a file and in the request, and from nowhere else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.model

PROMPT = "<|im_start|>user\n<image>\nDescribe this image in a very short sentence.<|im_end|>\n<|im_start|>assistant\n"
FORBIDDEN = {
    "/proc/self/environ": "local_media_disabled",
    "file:///etc/passwd": "local_media_disabled",
    "../example_image.png": "local_media_disabled",
    "not-there.png": "local_media_disabled",
    "http://127.0.0.1:9/x.png": "media_url_forbidden",
    "http://2130706433/x.png": "media_url_forbidden",
}


def test_the_picture_of_the_page_is_seen_and_no_other_file_or_address_is_read(seeing_server):
    the_picture_of_the_page_is_seen_from_a_file_and_in_the_request(seeing_server)
    no_other_file_and_no_address_of_this_machine_is_read(seeing_server)


def the_picture_of_the_page_is_seen_from_a_file_and_in_the_request(seeing_server):
    page = (Path(__file__).parents[2] / "docs" / "media.md").read_text(encoding="utf-8")
    first, second = (
        block.replace("http://127.0.0.1:30000", seeing_server.url).replace("curl ", "curl -sS ")
        for block in re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        if "shape.png" in block
    )
    draw = first[first.index("python -c") :].replace("python -c", f"{sys.executable} -c")
    folder = Path(f"/proc/{seeing_server.process.pid}/cwd").resolve()
    for script in (draw, second):
        done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True, check=True)
        assert "circle" in json.loads(done.stdout)["text"]


def no_other_file_and_no_address_of_this_machine_is_read(seeing_server):
    assert httpx.get(f"{seeing_server.url}/model_info").json()["has_image_understanding"] is True
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}}
    route = f"{seeing_server.url}/generate"
    assert httpx.post(route, json=body | {"image_data": "example_image.png"}).status_code == 200
    answers = {name: httpx.post(route, json=body | {"image_data": name}) for name in FORBIDDEN}
    told = {name: (answer.status_code, answer.json()["error"]["code"]) for name, answer in answers.items()}
    assert told == {name: (403, code) for name, code in FORBIDDEN.items()}
