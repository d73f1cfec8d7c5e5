"""Pictures in OpenAI's chats: their modality, and their tokens in answers and in `/tokenize`."""

from __future__ import annotations

import base64
import io

import pytest
import tiny_llava
from app_under_test import App
from byte_tokenizer import VOCAB_SIZE
from PIL import Image

from tureen.media.base import PicturePart
from tureen.media.loader import MediaLoader

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% set content = messages[-1]['content'] %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{{ '<' ~ part['type'] ~ '>' if part['type'] != 'text' else part['text'] }}{% endfor %}"
    "{% endif %}"
)
IMAGE, VIDEO = VOCAB_SIZE, VOCAB_SIZE + 1
ONEVISION = {
    "model_type": "llava_onevision",
    "vision_config": {"model_type": "siglip_vision_model", **tiny_llava.SIGLIP},
    "text_config": {},
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "image_grid_pinpoints": tiny_llava.LARGE_GRID,
    "vision_aspect_ratio": "anyres_max_3",
}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "parts.jinja"
    file.write_text(TEMPLATE)
    loader = MediaLoader(ONEVISION, tiny_llava.PREPROCESSORS["onevision"], media_path=None, allowed_domains=())
    with App(media=loader, special=("<image>", "<video>"), chat_template=str(file)) as running:
        yield running


@pytest.fixture(scope="module")
def tall() -> str:
    """A picture of four tiles, or one if it is one of several."""
    file = io.BytesIO()
    Image.effect_noise((28, 112), 50).convert("RGB").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def body_of(picture: str, *modalities: str | None) -> dict:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        | ({} if modality is None else {"modalities": modality})
        for modality in modalities
    ]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "look"}]}]}


def num_tokens(app: App, body: dict) -> int:
    answer = app.post(PATH, **body, max_tokens=1)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens"]


def of_generate(app: App, picture: str, count: int, modality: str) -> int:
    return app.generate(
        text="<image>\n" * count + "look",
        image_data=[picture] * count,
        modalities=[modality],
        sampling_params={"max_new_tokens": 1},
    )["meta_info"]["prompt_tokens"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("modality", ["image", "multi-images"])
def test_a_modality_acts_as_that_of_generate(app: App, tall, count, modality):
    expected = of_generate(app, tall, count, modality)
    assert num_tokens(app, body_of(tall, *[modality] * count)) == expected
    assert num_tokens(app, body_of(tall, *[None] * (count - 1), modality)) == expected
    assert of_generate(app, tall, count, "image") > of_generate(app, tall, count, "multi-images")


@pytest.mark.parametrize("modalities", [("image", "multi-images"), ("video",)])
def test_modalities_that_cannot_be_are_refused(app: App, tall, modalities):
    answer = app.post(PATH, **body_of(tall, *modalities), max_tokens=1)
    assert answer.status_code == 400
    field = f"messages[0].content[{len(modalities) - 1}].modalities"
    assert answer.json()["error"]["param"] == field


def test_the_tokens_of_a_picture_are_its_placeholders(app: App, tall):
    answer = app.post(PATH, **body_of(tall, None), max_tokens=1, return_token_ids=True).json()
    ids = answer["prompt_token_ids"]
    assert ids[-5:] == list(b"\nlook")
    assert set(ids[:-5]) == {IMAGE}
    assert len(ids) == answer["usage"]["prompt_tokens"]
    told = app.post("/tokenize", **body_of(tall, None)).json()
    assert told["tokens"] == ids
    assert told["count"] == len(ids)


def test_a_picture_has_no_log_probabilities_and_is_not_cut(app: App, tall):
    for name, value in (("prompt_logprobs", 1), ("truncate_prompt_tokens", 5)):
        answer = app.post(PATH, **body_of(tall, None), max_tokens=1, **{name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    app.check_idle()


def test_text_between_the_parts_of_a_picture_is_text_in_the_prompt(app: App, tall, monkeypatch):
    family = app.state.media.family
    [whole] = {of_generate(app, tall, 1, "image") - len("\nlook")}

    def parts(prepared):
        return PicturePart(2, "before"), PicturePart(prepared.num_tokens - 2, "between"), PicturePart(0, "after")

    monkeypatch.setattr(family, "parts", parts)
    told = app.post("/tokenize", **body_of(tall, None)).json()["tokens"]
    assert told == [*b"before", IMAGE, IMAGE, *b"between", *[IMAGE] * (whole - 2), *b"after\nlook"]
    monkeypatch.setattr(family, "parts", lambda prepared: [PicturePart(1)])
    assert app.post(PATH, **body_of(tall, None), max_tokens=1).status_code == 500
