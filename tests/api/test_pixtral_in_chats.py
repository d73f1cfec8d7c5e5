"""Pictures of models with Pixtral's tower: rows of tokens, with special tokens between them, in prompts and chats."""

from __future__ import annotations

import base64
import io
from functools import partial

import inline_workers
import msgspec
import pytest
import tiny_pixtral
from app_under_test import App, asked_by
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from fake_engine import make_engine
from PIL import Image

from tureen.config import Config
from tureen.errors import StartupError
from tureen.media import decode_worker
from tureen.media.loader import MediaLoader
from tureen.requests.state import make_context

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for block in message['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}"
    "{% elif block['type'] in ['image', 'image_url'] %}[IMG]{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""Mistral Small 3.1's way to write a picture."""
SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
IMG, BREAK, END = range(VOCAB_SIZE, VOCAB_SIZE + 3)
MODEL = {
    "model_type": "mistral3",
    "vision_config": tiny_pixtral.TOWER,
    "text_config": {},
    "image_token_index": IMG,
}
LARGER = {"vocab_size": VOCAB_SIZE + 3}


def _loader() -> MediaLoader:
    return MediaLoader(MODEL, {"size": {"longest_edge": 48}}, media_path=None, allowed_domains=())


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "parts.jinja"
    file.write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        inline_workers.use(patch, "tureen.media.loader", partial(decode_worker.program, decode_worker.family_of))
        with App(media=_loader(), special=SPECIAL, chat_template=str(file), facts=LARGER) as running:
            yield running


def _picture(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.effect_noise((width, height), 50).convert("RGB").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _shown(request) -> list[int]:
    """The prompt with IMG in place of embeddings."""
    return [IMG if token < 0 else token for token in request.token_ids]


def test_a_picture_becomes_rows_with_a_break_after_each_and_an_end(app: App):
    picture = _picture(24, 16)
    sampling = {"max_new_tokens": 1}
    request = asked_by(app, "/generate", text="a[IMG]b", image_data=picture, sampling_params=sampling)
    row = [IMG] * 3
    assert _shown(request)[-10:] == [ord("a"), *row, BREAK, *row, END, ord("b")]
    assert [item.num_tokens for item in request.media] == [3, 3]


def test_a_chat_shows_pictures_where_the_template_says(app: App):
    content = [
        {"type": "text", "text": "x"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_picture(8, 8)}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_picture(8, 16)}"}},
        {"type": "text", "text": "[IMG]"},
    ]
    request = asked_by(app, "/v1/chat/completions", max_tokens=1, messages=[{"role": "user", "content": content}])
    assert _shown(request)[-11:] == [ord("x"), IMG, END, IMG, BREAK, IMG, END, *b"[IMG]"][-11:]


@pytest.mark.parametrize(
    ("special", "vocab_size", "missing"),
    [(("[IMG]",), VOCAB_SIZE + 3, "IMG_BREAK"), (SPECIAL, VOCAB_SIZE + 2, "IMG_END")],
)
def test_a_tokenizer_without_the_tokens_between_rows_is_refused(special, vocab_size, missing):
    info = msgspec.structs.replace(make_engine()[1], vocab_size=vocab_size)
    with pytest.raises(StartupError, match=rf"no token \[{missing}\]") as error:
        make_context(make_byte_tokenizer(*special), info, Config(), _loader())
    assert error.value.field == "tokenizer_path"
