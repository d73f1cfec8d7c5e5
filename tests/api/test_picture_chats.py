"""Chats with pictures: of a GGUF model with its mmproj file, and of a Gemma 3, whose pictures bring lines of text."""

from __future__ import annotations

import base64
import io
import json
import logging
from functools import partial

import inline_workers
import numpy as np
import pytest
import tiny_gemma
import tiny_qwen_vl
import torch
from converted_vision import write_pair
from PIL import Image
from real_app import RealApp

from tureen.config import Config
from tureen.media import decode_worker
from tureen.runner.load import load_runner
from tureen.weights.source import open_model

TOKENS = {"<|vision_start|>": 252, "<|image_pad|>": tiny_qwen_vl.IMAGE, "<|vision_end|>": 253}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}."
    "{% endfor %}"
)
"""As Qwen2.5-VL's puts pictures."""
BLIND = "{% for message in messages %}{{ message.role }}:{{ message.content }}.{% endfor %}"
TEXT = "A small red car"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return tiny_qwen_vl.write(tmp_path_factory.mktemp("hf"), "qwen2.5")


def _pair(folder, oracle, template):
    return write_pair(folder, oracle, tiny_qwen_vl.PREPROCESSOR, TOKENS, {"tokenizer.chat_template": template})


@pytest.fixture(scope="module", params=[TEMPLATE, BLIND], ids=["with pictures", "without"])
def app(request, oracle, tmp_path_factory):
    path = _pair(tmp_path_factory.mktemp("gguf") / "m", oracle, request.param)
    with pytest.MonkeyPatch.context() as patch:
        inline_workers.use(patch, "tureen.media.loader", partial(decode_worker.program, decode_worker.family_of))
        with RealApp(path, context_length=512) as running:
            yield running, request.param


def _picture():
    return Image.fromarray(np.random.default_rng(1).integers(0, 255, (31, 57, 3), np.uint8))


def _messages():
    file = io.BytesIO()
    _picture().save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]}
    ]


@torch.no_grad()
def _expected(oracle, prompt, inputs, count):
    given = list(prompt)
    for _ in range(count):
        ids = torch.tensor([given])
        kinds = (ids == tiny_qwen_vl.IMAGE).int() * (torch.arange(len(given)) < len(prompt))
        output = oracle(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **inputs)
        given.append(int(output.logits[0, -1].argmax()))
    return given[len(prompt) :]


def test_a_chat_with_a_picture_gets_the_tokens_that_transformers_computes(app, oracle):
    running, template = app
    inputs = dict(tiny_qwen_vl.processor()([_picture()], return_tensors="pt"))
    count = int(inputs["image_grid_thw"][0].prod()) // 4
    around = ([252], [253]) if template == TEMPLATE else ([], [])
    shown = [*around[0], *[tiny_qwen_vl.IMAGE] * count, *around[1]]
    rest = TEXT if template == TEMPLATE else f"\n{TEXT}"
    prompt = [*b"user:", *shown, *rest.encode(), *b"."]
    answer = running.post("/tokenize", messages=_messages())
    assert answer.json()["tokens"] == prompt
    limits = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    url = _messages()[0]["content"][0]["image_url"]["url"]
    at = prompt.index(tiny_qwen_vl.IMAGE)
    once = [*prompt[: at + 1], *prompt[at + count :]]
    plain = running.post("/generate", input_ids=once, image_data=url, sampling_params=limits).json()
    assert plain["output_ids"] == _expected(oracle, prompt, inputs, 6)
    chat = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = running.post("/v1/chat/completions", messages=_messages(), **chat).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == plain["text"]


def test_lines_around_the_picture_of_a_gemma_are_tokenized_with_the_chats_text(tmp_path):
    tiny_gemma.write(tmp_path, "gemma3")
    tiny_gemma.backend("gemma3").save(str(tmp_path / "tokenizer.json"))
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>").replace(
        ":{%", "\n{%"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    [message] = _messages()
    message["content"][1]["text"] = "\nA car, <start_of_image>"  # a client's spelling is text
    text = "user\n<start_of_image>\nA car, @."
    expected = tiny_gemma.inputs("gemma3", text, [_picture()])["input_ids"][0].tolist()
    spelt = tiny_gemma.backend("gemma3").encode("@", add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        inline_workers.use(patch, "tureen.media.loader", partial(decode_worker.program, decode_worker.family_of))
        with RealApp(tmp_path, context_length=512) as running:
            tokens = running.post("/tokenize", messages=[message]).json()["tokens"]
    at = expected.index(spelt[0])
    assert tokens[:at] == expected[:at]
    assert tokens[-1] == expected[-1]
    assert tiny_gemma.START not in tokens[at:]


def _refusal(path, **settings):
    with RealApp(path, context_length=512, **settings) as running:
        answer = running.post("/v1/chat/completions", messages=_messages())
        assert answer.status_code == 400
        text = running.post("/v1/chat/completions", messages=[{"role": "user", "content": TEXT}], max_tokens=1)
        assert text.status_code == 200
        return answer.json()["error"]["message"]


def test_without_the_mmproj_file_a_picture_is_refused_and_the_answer_names_the_setting(oracle, tmp_path):
    path = _pair(tmp_path / "m", oracle, TEMPLATE)
    assert "takes only text on this server (--language-model-only)" in _refusal(path, language_model_only=True)
    path.with_name("mmproj-tiny-f32.gguf").unlink()
    assert "only with the mmproj file that was made for it (--mmproj FILE)" in _refusal(path)


@pytest.mark.parametrize("others", [0, 1])
def test_the_log_of_the_start_says_which_file_was_found(oracle, tmp_path, caplog, others):
    path = _pair(tmp_path / "m", oracle, TEMPLATE)
    for number in range(others):
        path.with_name(f"mmproj-{number}.gguf").write_bytes(b"GGUF")
    with caplog.at_level(logging.INFO, "tureen.runner"):
        load_runner(open_model(path, Config()), Config(device="cpu", max_total_tokens=256, num_threads=1)).close()
    [record] = [one for one in caplog.records if "mmproj" in one.message]
    assert record.levelno == (logging.WARNING if others else logging.INFO)
    assert ("several mmproj files are next to it" if others else "takes pictures with mmproj-tiny") in record.message
