"""A stream's cumulative events are encoded piece by piece; they say what encoding each whole would say."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from tureen.dialects.sglang.generate import GrowingEvent

ALPHABET = 'ab "\\/\n\r\t\b\x00\x1f\x7f\u2028é日🙂\ufffd'


@pytest.mark.parametrize("seed", range(10))
def test_a_growing_answer_is_the_same_json_as_the_whole(seed):
    dice = random.Random(seed)
    draft, text, ids = GrowingEvent(), "", []
    for count in range(60):
        text += "".join(dice.choices(ALPHABET, k=dice.choice([0, 0, 1, 5])))
        ids += [dice.randrange(200_000) for _ in range(dice.choice([0, 1, 1, 3]))]
        answer = {"text": text, "output_ids": ids[:], "meta_info": {"completion_tokens": count}, "index": 1}
        assert json.loads(msgspec.json.encode(draft.extend(answer))) == answer
