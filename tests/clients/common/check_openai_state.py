"""OpenAI's official Python client: what the server keeps, responses, conversations, files and batches."""

from __future__ import annotations

import json

import openai
import pytest
from questions import CAPITAL, LONG
from timeouts import wait_until

CLIENT = "OpenAI's SDK (Python): responses and batches that are kept"
PACKAGES = ("openai",)
SHORT = {"model": "default", "max_output_tokens": 40, "temperature": 0}


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", max_retries=0) as client:
        yield client


def test_a_response_is_kept_continued_and_deleted(client):
    first = client.responses.create(input=CAPITAL, **SHORT)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(input="And of Spain?", previous_response_id=first.id, **SHORT)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_conversation_grows(client):
    conversation = client.conversations.create()
    client.responses.create(input="My name is Ada.", conversation=conversation.id, **SHORT)
    answer = client.responses.create(input="What is my name?", conversation=conversation.id, **SHORT)
    assert answer.conversation.id == conversation.id
    assert len(client.conversations.items.list(conversation.id).data) == 4


def test_a_response_in_the_background_is_finished(client):
    begun = client.responses.create(input=CAPITAL, background=True, **SHORT)
    assert begun.status in ("queued", "in_progress")
    wait_until(lambda: client.responses.retrieve(begun.id).status == "completed", "the response")
    assert "Paris" in client.responses.retrieve(begun.id).output_text


def test_a_response_in_the_background_is_cancelled(client):
    begun = client.responses.create(model="default", input=LONG, background=True, max_output_tokens=4000)
    assert client.responses.cancel(begun.id).status == "cancelled"


def test_a_batch_is_run(client):
    def line(name, text):
        body = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})

    content = "\n".join(
        [line("right", CAPITAL), line("wrong", CAPITAL).replace('"temperature": 0', '"temperature": -1')]
    )
    file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(content)
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"run": "1"}
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
    batch = client.batches.retrieve(batch.id)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 1, 1)
    right = json.loads(client.files.content(batch.output_file_id).text)
    wrong = json.loads(client.files.content(batch.error_file_id).text)
    assert (right["custom_id"], right["response"]["status_code"]) == ("right", 200)
    assert "Paris" in right["response"]["body"]["choices"][0]["message"]["content"]
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("wrong", 400)
    assert batch.id in [listed.id for listed in client.batches.list()]
    client.files.delete(file.id)
    assert file.id not in [listed.id for listed in client.files.list()]
