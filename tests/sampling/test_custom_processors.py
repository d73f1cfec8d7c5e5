"""Custom logit processors in the sampler: what they change, what they see, and that they harm only their own rows."""

from __future__ import annotations

import numpy as np
import pytest
from arithmetics import make_array, make_rows
from client_processors import (
    END,
    HANG,
    VOCAB,
    another,
    applied,
    hanging,
    load,
    sent,
    state,
    steps,
    use_inline_workers,
)  # fmt: skip
from sampling_reference import make_logits

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.errors import InvalidRequest, StartupError
from tureen.fields.processor import check_processor
from tureen.logit_processor import BUILT_IN, CustomLogitProcessor
from tureen.sampling.custom import CustomProcessors, load_registered
from tureen.sampling.processor_pool import ProcessorPool

pytestmark = pytest.mark.usefixtures("patient_sandbox", "each_arithmetic")

ROWS = 4
FIELD = "custom_logit_processor"

PAGE = sent("""
assert logits.shape[0] == len(custom_param_list)
key = "token_id"
for i, param_dict in enumerate(custom_param_list):
    logits[i, :] = -float("inf")
    logits[i, param_dict[key]] = 0.0
return logits
""")


@pytest.fixture(scope="module")
def processors():
    with pytest.MonkeyPatch.context() as patch:
        use_inline_workers(patch)
        made = CustomProcessors(load_registered(()), ProcessorPool(ROWS + 2, VOCAB))
    made.pool.charges.suspend = lambda client, why: None  # what comes of a charge is tested elsewhere
    yield made
    made.close()


def test_the_class_of_the_documentation_decides_every_token(processors):
    found = steps(processors, [state(0, PAGE, params={"token_id": 5}), state(1, PAGE, params={"token_id": 9})])
    assert [[row.token_id for row in step] for step in found] == [[5, 9]] * 3


def test_rows_with_the_same_processor_are_one_call(processors):
    body = "logits[:, :] = -float('inf')\nlogits[:, len(custom_param_list)] = 0.0\nreturn logits"
    found = steps(processors, [state(0, sent(body)), state(1), state(2, sent(body)), state(3, sent(body))], 1)
    assert [found[0][row].token_id for row in (0, 2, 3)] == [3, 3, 3]


def test_processors_come_after_penalties_and_bias_and_before_the_cuts(processors):
    body = "params = custom_param_list[0]\nlogits[0, :] = -100.0\nlogits[0, 7] = params['bias']\nreturn logits"
    [[row]] = steps(processors, [state(0, sent(body), params={"bias": 3.0}, logit_bias={7: -90.0}, top_k=1)], 1)
    assert row.token_id == 7


HOSTILE = {
    "raises": ("raise KeyError('token_id')", "KeyError"),
    "asserts": ("assert False, 'x' * 5000", "AssertionError"),
    "exits": ("import sys\nsys.exit(3)", "SystemExit"),
    "ends the process": (END, "ended its process"),
    "hangs": (HANG, "did not return within 120 s"),
    "wants too much memory": ("bytearray(1 << 62)", "MemoryError"),
    "recurses": ("f = lambda: f()\nf()", "RecursionError"),
    "returns nothing": ("pass", "NoneType"),
    "returns a number": ("return 5", "int"),
    "another shape": ("return logits[:, :5]", "shape"),
    "another shape by one row": ("return torch.zeros(logits.shape[0] + 1, logits.shape[1])", "shape"),
    "NaN": ("logits[:, 3] = float('nan')\nreturn logits", "NaN"),
    "plus infinity": ("logits[:, 3] = float('inf')\nreturn logits", "NaN"),
    "forbids everything": ("logits[:, :] = -float('inf')\nreturn logits", "no token"),
    "names a file": ("open('/x')", "FileNotFoundError"),
}
"""What breaks out of Python, or needs the sandbox, is in tests/servers/test_client_code.py."""


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", [0, 2])
def test_a_hostile_processor_fails_its_own_rows_and_its_neighbours_are_bit_equal(processors, name, place):
    body, complaint = HOSTILE[name]
    spec = LogprobSpec(top=5)
    neighbours = [state(slot, logprobs=spec, temperature=0.9, top_p=0.9, frequency_penalty=0.5) for slot in range(4)]
    plain = steps(processors, neighbours)
    mixed = list(neighbours)
    marker = f"marker = {name!r}, {place}, {next(another)}\n"  # another payload each time: none is refused from before
    mixed[place] = state(place, sent(marker + body), logprobs=spec)
    found = steps(processors, mixed)
    for step, expected in zip(found, plain, strict=True):
        for slot in range(4):
            if slot != place:
                assert step[slot] == expected[slot]
        error = step[place].error
        assert error.code in (f"{FIELD}_failed", f"{FIELD}_rejected")
        assert error.field == FIELD
        assert FIELD in error.message
        assert len(error.message) < 250
        assert "Traceback" not in error.message
        assert "/" not in error.message.replace("'/x'", "")
    assert complaint in found[0][place].error.message
    assert found[0][place].error.code == f"{FIELD}_failed"


def test_only_the_rows_that_are_wrong_fail(processors):
    body = "for i, p in enumerate(custom_param_list):\n    if p.get('bad'): logits[i, 0] = float('nan')\nreturn logits"
    code = sent(body)
    [step] = steps(processors, [state(0, code), state(1, code, params={"bad": True}), state(2, code)], 1)
    assert [row.error is None for row in step] == [True, False, True]


def test_a_processor_that_hung_is_not_called_again(processors):
    first, second, _ = steps(processors, [state(0, hanging())])
    assert first[0].error == second[0].error
    assert (first[0].error.status, first[0].error.code) == (500, f"{FIELD}_failed")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return logits.double() * 2", 2.0),
        ("return logits.numpy() * 3", 3.0),
        ("logits *= 4\nreturn logits", 4.0),
        ("import math\nreturn logits * math.sqrt(4)", 2.0),
        ("return np.float32(2) * logits", 2.0),
    ],
)
def test_tensors_arrays_and_changes_in_place_are_taken(processors, body, expected):
    given = make_logits(1, VOCAB, rows=1)
    logits = make_rows(given)
    one = state(0, sent(body))
    load(processors, [one])
    assert applied(processors, logits, [processors.start(one)]) == {}
    np.testing.assert_allclose(make_array(logits), given * expected, rtol=1e-6)


def test_it_sees_the_prompt_and_the_output_as_it_grows_and_keeps_its_dictionary(processors):
    body = """
p = custom_param_list[0]
p["calls"] = p.get("calls", 0) + 1
request = p["__req__"]
logits[:, :] = -float("inf")
logits[0, 10 * p["calls"] + sum(request.output_ids[-1:]) % 10 + request.origin_input_ids[0]] = 0.0
return logits
"""
    found = steps(processors, [state(0, sent(body), prompt=(4, 5))], 4)
    expected, outputs = [], [0]
    for call in range(1, 5):
        outputs.append(10 * call + outputs[-1] % 10 + 4)
        expected.append(outputs[-1])
    assert [step[0].token_id for step in found] == expected


def test_a_resumed_sequence_shows_the_output_it_had(processors):
    body = (
        "logits[:, :] = -float('inf')\nlogits[0, len(custom_param_list[0]['__req__'].output_ids)] = 0.0\nreturn logits"
    )
    found = steps(processors, [state(0, sent(body), output=(1, 2, 3))], 3)
    assert [step[0].token_id for step in found] == [3, 4, 5]


def test_more_processors_than_workers_take_turns(processors):
    codes = [sent(f"logits[:, :] = -float('inf')\nlogits[0, {index}] = 0.0\nreturn logits") for index in range(20)]
    for index, code in enumerate(codes):
        [[row]] = steps(processors, [state(0, code)], 1)
        assert row.token_id == index


# ---- built in and registered


def test_disallowed_tokens_are_never_drawn(processors):
    given = np.zeros((2, VOCAB))
    given[:, 7], given[:, 9] = 5.0, 4.0
    logits = make_rows(given)
    custom = processors.start(state(0, "disallowed_tokens", params={"token_ids": [7, 11]}))
    assert applied(processors, logits, [custom, None]) == {}
    first, second = make_array(logits)
    assert first.argmax() == 9
    assert np.flatnonzero(np.isinf(first)).tolist() == [7, 11]
    assert second.argmax() == 7


def test_no_ngram_of_the_output_comes_twice(processors):
    rng = np.random.default_rng(0)
    for size in (1, 2, 3):
        output = rng.integers(0, 5, 30).tolist()
        custom = processors.start(state(0, "no_repeat_ngram", output=output, params={"ngram_size": size}))
        logits = make_rows(np.zeros((1, VOCAB)))
        assert applied(processors, logits, [custom]) == {}
        seen = {tuple(output[at : at + size]) for at in range(len(output) - size + 1)}
        forbidden = {token for token in range(VOCAB) if (*output[len(output) - size + 1 :], token) in seen}
        assert set(np.flatnonzero(np.isinf(make_array(logits)[0])).tolist()) == forbidden


def test_a_built_in_processor_without_its_parameters_fails_its_request(processors):
    [[row, other]] = steps(processors, [state(0, "disallowed_tokens"), state(1)], 1)
    assert (row.error.code, row.error.status, row.error.field) == (f"{FIELD}_failed", 400, "custom_params")
    assert other.error is None


class Halve(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        return logits / 2


def test_an_operator_s_processor_is_asked_for_by_name():
    made = CustomProcessors(load_registered(("halve=test_custom_processors:Halve",)))
    logits = make_rows(np.full((1, VOCAB), 3.0))
    assert applied(made, logits, [made.start(state(0, "halve"))]) == {}
    assert np.array_equal(make_array(logits), np.full((1, VOCAB), 1.5))


@pytest.mark.parametrize(
    "entry",
    ["x", "x=y", "=a:B", "x=no.such:Thing", "x=math:nothing", "x=math:pi", "disallowed_tokens=math:floor", "{=a:b"],
)
def test_a_wrong_registration_stops_the_start(entry):
    with pytest.raises(StartupError, match="--logit-processor") as caught:
        load_registered((entry,))
    assert "\n" not in caught.value.message


# ---- the field


ON, OFF = Config(enable_custom_logit_processor=True), Config(logit_processor=("mine=a:B",))


@pytest.mark.parametrize("name", [*BUILT_IN, "mine"])
def test_names_are_always_allowed(name):
    assert check_processor(name, OFF, FIELD) == name


@pytest.mark.parametrize(
    ("value", "config", "code"),
    [
        ("", OFF, "custom_logit_processor_unknown"),
        ("nobody", ON, "custom_logit_processor_unknown"),
        (PAGE, OFF, "custom_logit_processor_disabled"),
        ("{}", ON, "invalid_custom_logit_processor"),
        ("{", ON, "invalid_custom_logit_processor"),
        ('{"callable": 5}', ON, "invalid_custom_logit_processor"),
        ('{"callable": "xyz"}', ON, "invalid_custom_logit_processor"),
        ('{"callable": "80", "more": 1}', ON, "invalid_custom_logit_processor"),
        ('{"callable": "' + "80" * (1 << 20) + '"}', ON, "invalid_custom_logit_processor"),
        ('{"callable": ' + "[" * 100_000, ON, "invalid_custom_logit_processor"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_value_is_refused_before_anything_runs(value, config, code):
    with pytest.raises(InvalidRequest) as caught:
        check_processor(value, config, FIELD)
    assert (caught.value.code, caught.value.field) == (code, FIELD)
    assert len(caught.value.message) < 500  # the names that there are, but not a long value
    assert check_processor(PAGE, ON, FIELD) == PAGE
