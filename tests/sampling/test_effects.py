"""Every sampling parameter does something: here, or in the part of the package that this table names."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from sampling_reference import make_logits, make_state

import tureen
from tureen.sampling.params import SamplingParams
from tureen.sampling.sampler import Sampler

VOCAB = 200

# parameter: a value that must change what the sampler draws
CHANGES_TOKENS = {
    "min_new_tokens": 50,
    "temperature": 0.05,
    "top_p": 0.05,
    "top_k": 2,
    "min_p": 0.9,
    "frequency_penalty": -2.0,
    "presence_penalty": -2.0,
    "repetition_penalty": 0.1,
    "logit_bias": {7: 20.0},
}

# parameter: folders with a module that acts on it
ACTED_ON_IN = {
    "max_new_tokens": ("engine",),
    "stop": ("text",),
    "stop_token_ids": ("engine",),
    "stop_regex": ("text",),
    "ignore_eos": ("engine",),
    "skip_special_tokens": ("text",),
    "spaces_between_special_tokens": ("text",),
    "no_stop_trim": ("engine", "text"),
    "n": ("api",),
    "custom_params": ("sampling",),
    "sampling_seed": ("api",),
    "stream_interval": ("api",),
}


def _drawn(**params):
    """Forty tokens of one sequence."""
    state = make_state(seed=4, prompt=(1, 2), ends=range(100), **params)
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.set_slot(state)
    logits = make_logits(0, VOCAB, scale=0.5, rows=40)
    return [
        sampler.sample(torch.from_numpy(np.array(row[None])), [0], [2 + step])[0].token_id
        for step, row in enumerate(logits)
    ]


def test_every_parameter_has_an_effect_that_is_tested():
    names = [field.name for field in msgspec.structs.fields(SamplingParams)]
    assert sorted([*CHANGES_TOKENS, *ACTED_ON_IN]) == sorted(names)


@pytest.mark.parametrize("name", CHANGES_TOKENS)
def test_the_parameter_changes_the_tokens_drawn(name):
    assert _drawn(**{name: CHANGES_TOKENS[name]}) != _drawn()


@pytest.mark.parametrize(("name", "folder"), [(name, folder) for name in ACTED_ON_IN for folder in ACTED_ON_IN[name]])
def test_the_parameter_is_acted_on_where_the_table_says(name, folder):
    sources = [path.read_text(encoding="utf-8") for path in (Path(tureen.__file__).parent / folder).glob("*.py")]
    assert any(re.search(rf"\.{name}\b", source) for source in sources)
