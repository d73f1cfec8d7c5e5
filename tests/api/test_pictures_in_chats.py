"""A picture is shown by every API of chats: each makes the prompt that `/generate` makes of it."""

from __future__ import annotations

import base64
import io

import pytest
import tiny_llava
from app_under_test import App, asked_by
from byte_tokenizer import VOCAB_SIZE
from PIL import Image

from tureen.media.loader import MediaLoader

TEMPLATE = (
    "{% set content = messages[-1]['content'] %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
)
SETTINGS = {"model_type": "clip_vision_model", **tiny_llava.CLIP}
MODEL = {"model_type": "llava", "vision_config": SETTINGS, "text_config": {}, "image_token_index": VOCAB_SIZE}


@pytest.fixture(scope="module")
def picture() -> str:
    file = io.BytesIO()
    Image.effect_noise((28, 28), 50).convert("RGB").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "parts.jinja"
    file.write_text(TEMPLATE)
    loader = MediaLoader(MODEL, tiny_llava.PREPROCESSORS["llava-clip"], media_path=None, allowed_domains=())
    with App(media=loader, special=("<image>",), chat_template=str(file)) as running:
        yield running


def _anthropic(picture: str) -> dict:
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "look"}]
    return {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


def _ollama(picture: str) -> dict:
    options = {"model": "default", "options": {"num_predict": 1}, "stream": False}
    return options | {"messages": [{"role": "user", "content": "look", "images": [picture]}]}


def _responses(picture: str) -> dict:
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}", "detail": "auto"}
    content = [shown, {"type": "input_text", "text": "look"}]
    return {"max_output_tokens": 1, "input": [{"role": "user", "content": content}]}


BODIES = {"/v1/messages": _anthropic, "/api/chat": _ollama, "/v1/responses": _responses}


@pytest.mark.parametrize("path", BODIES)
def test_each_api_shows_a_picture_as_generate_does(app: App, picture, path):
    sampling = {"max_new_tokens": 1}
    plain = asked_by(app, "/generate", text="<image>\nlook", image_data=picture, sampling_params=sampling)
    shown = asked_by(app, path, **BODIES[path](picture))
    assert min(shown.token_ids) < 0
    assert [one for one in shown.token_ids if one < 0] == [one for one in plain.token_ids if one < 0]
    assert bytes(one for one in shown.token_ids if one >= 0).strip() == b"look"
    assert [item.digest for item in shown.media] == [item.digest for item in plain.media]


def test_pictures_count_as_tokens(app: App, picture):
    body = {name: value for name, value in _anthropic(picture).items() if name != "max_tokens"}
    counted = app.post("/v1/messages/count_tokens", **body).json()["input_tokens"]
    assert counted == len(asked_by(app, "/v1/messages", **_anthropic(picture)).token_ids)


@pytest.mark.parametrize("path", BODIES)
def test_files_of_the_server_are_no_pictures_of_a_chat(app: App, path):
    body = BODIES[path]("x")
    message = (body.get("messages") or body["input"])[0]
    if path == "/api/chat":
        message["images"] = ["/etc/passwd"]
    elif path == "/v1/messages":
        message["content"][0]["source"] = {"type": "url", "url": "file:///etc/passwd"}
    else:
        message["content"][0]["image_url"] = "/etc/passwd"
    response = app.post(path, **body)
    assert response.status_code in (400, 403)
    assert "root:" not in response.text
