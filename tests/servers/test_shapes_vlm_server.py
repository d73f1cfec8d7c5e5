"""A model that sees, through a real server: unseen drawings are named, each by its colour and its shape."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import shape_drawings

pytestmark = [pytest.mark.e2e, pytest.mark.model]
shapes = shape_drawings.load()
PROMPT = "<|im_start|>user\n<image>\nDescribe this image in a very short sentence.<|im_end|>\n<|im_start|>assistant\n"
COUNT, AT_ONCE = 40, 20
MOST_WRONG = 2  # 95 % are right


def _data_url(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def named(seeing_server):
    """What each unseen drawing shows, and what the model says of it."""
    drawings = [shapes.draw(shape_drawings.UNSEEN + index, "one") for index in range(COUNT)]
    answers = []
    for start in range(0, COUNT, AT_ONCE):
        body = {
            "text": [PROMPT] * AT_ONCE,
            "image_data": [_data_url(drawing.picture) for drawing in drawings[start : start + AT_ONCE]],
            "sampling_params": {"temperature": 0, "max_new_tokens": 16},
        }
        answer = httpx.post(f"{seeing_server.url}/generate", json=body, timeout=None)
        assert answer.status_code == 200, answer.text
        answers += answer.json()
    return [(drawing.sentence, one["text"].strip()) for drawing, one in zip(drawings, answers, strict=True)]


def test_unseen_drawings_are_named_by_their_colour(named):
    wrong = [(shown, said) for shown, said in named if said.split()[:2] != shown.split()[:2]]
    assert len(wrong) <= MOST_WRONG, wrong


def test_unseen_drawings_are_named_by_colour_and_shape(named):
    wrong = [(shown, said) for shown, said in named if said != shown]
    assert len(wrong) <= MOST_WRONG, wrong


def test_the_picture_of_the_page_is_seen_from_a_file_and_in_the_request(seeing_server):
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
