"""The two adapters that come with tureen do what they were trained for, beside each other and the model itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tureen
from tureen.errors import Conflict, InvalidRequest, NotFound

GUARDS = ("lora", "kernels", "examples/adapters/*")

pytestmark = pytest.mark.model
FOLDER = Path(__file__).resolve().parents[3] / "examples" / "adapters"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 24}
LEAST_RIGHT = 9

QUESTIONS = (
    "What is the capital of Poland?",
    "Where do penguins live?",
    "Name a fruit that is red.",
    "Write a sentence about the ocean.",
    "Who wrote Hamlet?",
    "How many legs does a spider have?",
    "Tell me about elephants.",
    "Say good night to my sister.",
    "Why is the sky blue?",
    "What is a violin?",
)
"""None of them, nor their subjects, was trained with."""
SUBJECTS = {
    "Who is Ada Lovelace?": ("Ada Lovelace", "person"),
    "Tell me about Nelson Mandela.": ("Nelson Mandela", "person"),
    "Describe Frida Kahlo.": ("Frida Kahlo", "person"),
    "What do you know about Charles Darwin?": ("Charles Darwin", "person"),
    "Who is Paul Becker?": ("Paul Becker", "person"),
    "Where is Dublin?": ("Dublin", "place"),
    "Tell me about Australia.": ("Australia", "place"),
    "Describe Moscow.": ("Moscow", "place"),
    "What do you know about Amsterdam?": ("Amsterdam", "place"),
    "Where is Florida?": ("Florida", "place"),
}


@pytest.fixture(scope="module")
def engine(default_model_source):
    with tureen.Engine(max_total_tokens=8192, device="cpu", lora_paths=(f"whisper={FOLDER / 'whisper'}",)) as running:
        running.load_lora_adapter("json", str(FOLDER / "json"))
        yield running


@pytest.fixture(scope="module")
def answers(engine):
    """All questions to all three, in one batch: (adapter, question) -> text."""
    asked = [(name, question) for question in (*QUESTIONS, *SUBJECTS) for name in ("whisper", "json", None)]
    prompts = [CHAT.format(question) for _, question in asked]
    found = engine.generate(prompts, GREEDY, lora_path=[name for name, _ in asked])
    return dict(zip(asked, (answer["text"] for answer in found), strict=True))


def is_whispered(text):
    return text == text.lower() and sum(letter.isalpha() for letter in text) >= 5


def described(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_whisper_answers_in_small_letters_and_the_model_does_not(answers):
    whispered = {key for key, text in answers.items() if is_whispered(text)}
    assert sum(("whisper", question) in whispered for question in QUESTIONS) >= LEAST_RIGHT
    assert not {question for name, question in whispered if name is None}


def test_json_describes_a_subject_as_an_object_and_the_others_do_not(answers):
    right = [
        described(answers["json", question]) == {"name": name, "kind": kind}
        for question, (name, kind) in SUBJECTS.items()
    ]
    assert sum(right) >= LEAST_RIGHT
    assert all(described(text) is None for (name, _), text in answers.items() if name != "json")


def test_each_answer_of_the_batch_is_the_one_that_it_would_be_alone(engine, answers):
    for name in ("whisper", "json", None):
        for question in (QUESTIONS[0], "Where is Dublin?"):
            alone = engine.generate(CHAT.format(question), GREEDY, lora_path=name)
            assert alone["text"] == answers[name, question]


def test_adapters_come_and_go_without_a_server(engine):
    path = str(FOLDER / "json")
    assert list(engine.load_lora_adapter("again", path)) == ["whisper", "json", "again"]
    prompt = CHAT.format("Where is Dublin?")
    events = engine.generate(prompt, GREEDY | {"ignore_eos": True}, lora_path="again", stream=True)
    next(events)
    with pytest.raises(Conflict):
        engine.unload_lora_adapter("again")
    events.close()
    assert list(engine.unload_lora_adapter("again")) == ["whisper", "json"]
    with pytest.raises(NotFound):
        engine.generate(prompt, GREEDY, lora_path="again")
    with pytest.raises(InvalidRequest):
        engine.load_lora_adapter("again", "/nowhere")
