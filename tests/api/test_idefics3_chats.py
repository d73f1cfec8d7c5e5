"""Chats with SmolVLM: its own templates, pictures among the parts of messages, and the text around their tiles."""

from __future__ import annotations

import base64
import io
import re
from functools import partial

import inline_workers
import pytest
import tiny_idefics3
from app_under_test import App
from byte_tokenizer import VOCAB_SIZE
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from tureen.media import decode_worker
from tureen.media.loader import MediaLoader

SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<|im_start|>", "<end_of_utterance>")
FACTS = {"vocab_size": VOCAB_SIZE + len(SPECIAL)}
MODEL = {
    "model_type": "smolvlm",
    "vision_config": tiny_idefics3.VARIANTS["smolvlm"][1],
    "text_config": {},
    "image_token_id": VOCAB_SIZE,
}
PARTS_ONLY = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The template of the first SmolVLMs, which takes no strings."""
ONE = "<fake_token_around_image><global-img>" + "<image>" * 4 + "<fake_token_around_image>"
TILES = [f"<fake_token_around_image><row_{row}_col_{column}>{'<image>' * 4}" for row in (1, 2, 3) for column in (1, 2)]
TALL = "".join(TILES[:2]) + "\n" + "".join(TILES[2:4]) + "\n" + "".join(TILES[4:]) + "\n\n" + ONE


@pytest.fixture(scope="module", params=[DEFAULT_CHAT_TEMPLATE, PARTS_ONLY], ids=["strings", "parts"])
def app(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "smolvlm.jinja"
    file.write_text(request.param)
    settings = tiny_idefics3.PREPROCESSORS["smolvlm"]
    with pytest.MonkeyPatch.context() as patch:
        inline_workers.use(patch, "tureen.media.loader", partial(decode_worker.program, decode_worker.family_of))
        loader = MediaLoader(MODEL, settings, media_path=None, allowed_domains=())
        with App(media=loader, special=SPECIAL, facts=FACTS, chat_template=str(file)) as running:
            yield running


def _part(width: int, height: int) -> dict:
    file = io.BytesIO()
    Image.effect_noise((width, height), 50).convert("RGB").save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def _text(text: str) -> dict:
    return {"type": "text", "text": text}


def _ids(text: str) -> list[int]:
    pieces = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [
        token
        for piece in pieces
        for token in ([VOCAB_SIZE + SPECIAL.index(piece)] if piece in SPECIAL else piece.encode())
    ]


def test_pictures_of_a_chat_are_where_the_template_puts_them(app: App):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [_part(56, 84), _text("What is this?")]},
        {"role": "assistant", "content": "A <image> of noise."},
        {"role": "user", "content": [_text("And these? "), _part(50, 80), _part(56, 84)]},
    ]
    answer = app.post("/tokenize", messages=messages)
    assert answer.status_code == 200, answer.text
    head, spelled, tail = (
        f"<|im_start|>System: Be short.<end_of_utterance>\nUser:{TALL}What is this?<end_of_utterance>\nAssistant: A ",
        b"<image>",
        f" of noise.<end_of_utterance>\nUser: And these? {TALL}{TALL}<end_of_utterance>\nAssistant:",
    )
    assert answer.json()["tokens"] == [*_ids(head), *spelled, *_ids(tail)]
    answer = app.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len([*_ids(head), *spelled, *_ids(tail)])


def test_a_video_is_refused(app: App):
    answer = app.post(
        "/generate", text="<image>", video_data=_part(56, 84)["image_url"]["url"], sampling_params={"max_new_tokens": 1}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "video_data"
    assert "takes no videos" in answer.json()["error"]["message"]
    app.check_idle()
