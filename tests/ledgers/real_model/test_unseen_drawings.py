"""A model that sees names unseen drawings, each by its colour and its shape."""

from __future__ import annotations

import base64
import io

import httpx
import pytest
import shape_drawings

GUARDS = ("media", "vision", "runner", "recipes")

pytestmark = pytest.mark.model
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


def test_unseen_drawings_are_named_by_colour_and_shape(named):
    wrong = [(shown, said) for shown, said in named if said != shown]
    assert len(wrong) <= MOST_WRONG, wrong
