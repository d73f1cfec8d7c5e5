"""Explanations of tokens: what they say is what the sampler did, and anybody can compute the token again from them."""

import importlib.util
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from arithmetics import arithmetic, make_rows, make_sampler
from byte_tokenizer import make_byte_tokenizer
from sampling_reference import log_softmax, make_logits, make_state, processed_logits

from tureen.contract.runner import Row, SlotState
from tureen.requests.explanations import rendered
from tureen.runner.drawing import draw
from tureen.runner.forward import ForwardOutput
from tureen.sampling import filtered
from tureen.sampling.custom import CustomProcessors
from tureen.sampling.explaining import CANDIDATES
from tureen.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("each_arithmetic")

VOCAB = 600
PROMPT = (1, 2, 3)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recompute.py"

PARAMS = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.2, "typical_p": 0.6, "top_k": 100},
    {"frequency_penalty": 1.1, "presence_penalty": -0.4, "top_p": 0.95},
    {"repetition_penalty": 1.3, "logit_bias": {7: 6.0, 8: -3.0}, "temperature": 0.8, "top_p": 0.99},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 0.0},
    {"min_new_tokens": 9, "allowed_token_ids": tuple(range(50, 120)), "temperature": 2.0},
)


class Vocabulary:
    """As much of a context as showing an explanation needs: every token has the text of its number."""

    tokenizer = property(lambda self: self)
    token_text = staticmethod(str)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("recompute_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def explained(state: SlotState) -> SlotState:
    return msgspec.structs.replace(state, explain=True)


def run(states, *, steps, scale=3.0, masks=None, processors=None):
    """Draws `steps` tokens of each sequence; returns the draws, step by step."""
    sampler = make_sampler(len(states), VOCAB, processors)
    for state in states:
        sampler.set_slot(state)
    slots, draws = [state.slot for state in states], []
    for step in range(steps):
        logits = make_rows([make_logits(100 * step + abs(state.seed), VOCAB, scale=scale) for state in states])
        positions = [len(state.prompt_ids) + len(state.output_ids) + step for state in states]
        draws.append(sampler.sample(logits, slots, positions, masks or {}))
    return draws


def states_of(*, is_explained=True, seed=0):
    states = [make_state(slot, seed=seed + slot, ends=(0,), **params) for slot, params in enumerate(PARAMS)]
    return [explained(state) for state in states] if is_explained else states


def shown(draw_of_row):
    """The explanation as a client reads it: through JSON."""
    [fields] = rendered([draw_of_row.explanation], Vocabulary())
    return msgspec.json.decode(msgspec.json.encode(fields))


def stage(fields, name):
    return next(part for part in fields["stages"] if part["stage"] == name)


def bits_of(token_ids):
    mask = np.zeros((VOCAB + 31) // 32, dtype=np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


def test_the_example_recomputes_500_tokens_of_many_parameters(example):
    num_tokens, kinds = 0, set()
    for part, scale in enumerate((0.5, 3.0)):
        states = states_of(seed=1000 * part + 5)
        for draws in run(states, steps=25, scale=scale):
            for state, drawn in zip(states, draws, strict=True):
                fields = shown(drawn)
                assert example.recompute(fields, state.seed) == drawn.token_id == fields["token_id"]
                kinds |= {fields["chosen_by"], *(part["stage"] for part in fields["stages"])}
                num_tokens += 1
    assert num_tokens == 500
    assert kinds == {
        "draw", "best", "model", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens",
        "logit_bias", "allowed_token_ids", "temperature", "top_k", "top_p", "min_p", "typical_p",
    }  # fmt: skip


def test_a_number_that_is_not_the_sampler_s_own_is_found_out(example):
    [[drawn]] = run([explained(make_state(seed=3, temperature=0.8, top_k=30))], steps=1)
    fields = shown(drawn)
    fields["stages"][0]["probabilities"][1] *= 1.01
    with pytest.raises(ValueError, match="model"):
        example.recompute(fields, 3)


def test_the_random_number_is_that_of_seed_and_position(example):
    states = states_of(seed=-7)
    for step, draws in enumerate(run(states, steps=3)):
        for state, drawn in zip(states, draws, strict=True):
            why = drawn.explanation
            assert why.position == len(PROMPT) + step
            greedy = state.params.is_greedy
            assert why.random == (None if greedy else example.uniform(state.seed, why.position))
            assert why.chosen_by == ("best" if greedy else "draw")


def test_a_token_is_the_same_whether_it_is_explained_or_not_alone_or_among_others():
    plain = [[one.token_id for one in draws] for draws in run(states_of(is_explained=False), steps=6)]
    together = run(states_of(), steps=6)
    assert [[one.token_id for one in draws] for draws in together] == plain
    mixed = states_of(is_explained=False)
    mixed[3], mixed[6] = explained(mixed[3]), explained(mixed[6])
    for draws, all_explained in zip(run(mixed, steps=6), together, strict=True):
        assert [place for place, one in enumerate(draws) if one.explanation] == [3, 6]
        for place in (3, 6):
            assert draws[place] == all_explained[place]


CHANGING = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias")


def test_logits_and_probabilities_after_each_stage_equal_float64():
    values = {
        "frequency_penalty": 0.9,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.4,
        "min_new_tokens": 20,
        "logit_bias": {11: 4.0, 12: -100.0},
    }
    output = tuple(make_logits(0, VOCAB).argsort()[-6:].tolist())  # the best tokens: penalties are seen
    ends = tuple(make_logits(0, VOCAB).argsort()[-9:-7].tolist())
    state = make_state(seed=0, output=output, ends=ends, temperature=0.6, **values)
    [[drawn]] = run([explained(state)], steps=1)
    fields = shown(drawn)
    assert [part["stage"] for part in fields["stages"]] == ["model", *CHANGING, "temperature", "draw"]
    ids = [candidate["token_id"] for candidate in fields["candidates"]]
    raw = make_logits(0, VOCAB)
    for count, part in enumerate(fields["stages"][:-2]):
        known = {name: values[name] for name in CHANGING[:count]}
        expected = processed_logits(raw, make_state(output=output, ends=ends, **known))
        assert set(np.lexsort((np.arange(VOCAB), -expected))[:CANDIDATES].tolist()) <= set(ids)
        assert part["logits"] == [None if np.isinf(expected[i]) else float(expected[i]) for i in ids]
        assert part["probabilities"] == pytest.approx(np.exp(log_softmax(expected)[ids]), rel=1e-12)
    cooled = np.exp(log_softmax(expected, 0.6))
    assert stage(fields, "temperature")["probabilities"] == pytest.approx(cooled[ids], rel=1e-12)
    starts = np.concatenate(([0.0], np.cumsum(cooled)))
    possible = [place for place, i in enumerate(ids) if cooled[i] > 0]
    assert 0 < len(possible) < len(ids)
    for name, step in (("starts", 0), ("ends", 1)):
        shares = stage(fields, "draw")[name]
        assert [place for place, share in enumerate(shares) if share is not None] == possible
        expected = [starts[ids[place] + step] for place in possible]
        assert [shares[place] for place in possible] == pytest.approx(expected, abs=1e-12)


def test_each_cut_says_how_many_tokens_it_leaves_and_what_becomes_of_the_rest():
    state = make_state(seed=0, temperature=1.5, top_k=40, top_p=0.7, min_p=0.5)
    [[drawn]] = run([explained(state)], steps=1, scale=2.0)
    fields = shown(drawn)
    ids = [candidate["token_id"] for candidate in fields["candidates"]]
    probabilities = np.exp(log_softmax(make_logits(0, VOCAB, scale=2.0), 1.5))
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order]
    kept = 40
    for name, own in (
        ("top_k", 40),
        ("top_p", int(np.argmax(np.cumsum(ranked) >= 0.7)) + 1),
        ("min_p", int((ranked >= 0.5 * ranked[0]).sum())),
    ):
        kept = min(kept, own)
        part = stage(fields, name)
        assert part["value"] == getattr(state.params, name)
        assert part["kept"] == kept
        left = np.where(np.isin(np.arange(VOCAB), order[:kept]), probabilities, 0.0)
        assert part["probabilities"] == pytest.approx((left / left.sum())[ids], rel=1e-9)
    assert kept < CANDIDATES  # some candidates are removed, so that what follows can fail
    removed = [share is None for share in stage(fields, "draw")["starts"]]
    assert removed == [p == 0 for p in stage(fields, "draw")["probabilities"]]
    assert any(removed)


def test_typical_p_shows_which_tokens_it_took_out():
    state = make_state(seed=2, typical_p=0.3)
    [[drawn]] = run([explained(state)], steps=1, scale=2.0)
    part = stage(shown(drawn), "typical_p")
    assert 0 < part["kept"] < VOCAB
    assert 0.0 in part["probabilities"]


def test_what_a_grammar_forbids_is_gone_after_its_stage_and_not_before():
    best = make_logits(4, VOCAB).argsort()[::-1]
    mask = bits_of(best[3:90].tolist())
    [[drawn]] = run([explained(make_state(seed=4))], steps=1, masks={0: mask})
    fields = shown(drawn)
    ids = [candidate["token_id"] for candidate in fields["candidates"]]
    allowed = set(best[3:90].tolist())
    assert set(best[:3].tolist()) <= set(ids)  # the best of the model are shown, though none may be drawn
    assert all(logit is not None for logit in stage(fields, "model")["logits"])
    assert [logit is not None for logit in stage(fields, "grammar")["logits"]] == [i in allowed for i in ids]


def test_a_custom_logit_processor_is_a_stage_of_its_own():
    def forbid_all_but(logits, params):
        logits[:, :500] = -math.inf
        return logits

    state = msgspec.structs.replace(explained(make_state(seed=5)), processor="high")
    [[drawn]] = run([state], steps=1, processors=CustomProcessors({"high": forbid_all_but}))
    fields = shown(drawn)
    assert [part["stage"] for part in fields["stages"]] == ["model", "custom_logit_processor", "draw"]
    assert drawn.token_id >= 500
    for candidate, before, after in zip(
        fields["candidates"], fields["stages"][0]["logits"], fields["stages"][1]["logits"], strict=True
    ):
        assert after == (before if candidate["token_id"] >= 500 else None)


@pytest.mark.parametrize("width", [1, 2, VOCAB])
def test_where_the_ranking_is_widened_the_explanation_is_the_same(width, monkeypatch):
    states = states_of()
    expected = run(states, steps=2)
    monkeypatch.setattr(filtered, "RANKING_WIDTHS", (width,))
    assert run(states, steps=2) == expected


def test_a_token_that_was_guessed_says_so():
    state = explained(make_state(seed=6, prompt=PROMPT, temperature=0.8))
    logits = np.stack([make_logits(seed, VOCAB) for seed in range(3)])

    def outputs(guesses):
        sampler = make_sampler(1, VOCAB)
        sampler.set_slot(state)
        row = Row(0, (*PROMPT, *guesses), 0, (0,), True, num_drafts=len(guesses))
        output = ForwardOutput(logits=make_rows(logits[: 1 + len(guesses)]))
        return draw(sampler, [row], output, {})[0]

    [first] = outputs(()).token_ids
    right = outputs((first, (outputs((first, 0)).token_ids[1] + 1) % VOCAB))
    assert [why.guessed for why in right.explanations] == [True, False]
    assert [why.token_id for why in right.explanations] == list(right.token_ids)
    assert [why.position for why in right.explanations] == [3, 4]


class Counting:
    """An arithmetic that notes which of its operations are called."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.inner, name)


def calls_of(states):
    counting = Counting(arithmetic())
    sampler = Sampler(len(states), VOCAB, counting)
    for state in states:
        sampler.set_slot(state)
    logits = make_rows([make_logits(state.seed, VOCAB) for state in states])
    counting.calls.clear()
    sampler.sample(logits, [state.slot for state in states], [3] * len(states))
    return counting.calls


def test_a_step_without_explanations_does_nothing_for_them():
    params = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5}
    plain = make_state(0, seed=1, output=(4,), **params)
    assert calls_of([plain]) == ["prepare", "peaks", "change", "peaks", "rank"]
    with_one = calls_of([plain, explained(make_state(1, seed=2, output=(4,), **params))])
    assert len(with_one) < 3 * len(calls_of([plain]))
    assert calls_of([make_state(seed=1, temperature=0.0)]) == ["prepare", "greedy"]


def test_a_row_that_fails_has_no_explanation():
    sampler = make_sampler(1, VOCAB)
    sampler.set_slot(explained(make_state()))
    [drawn] = sampler.sample(make_rows([[math.nan] * VOCAB]), [0], [3])
    assert drawn.error is not None
    assert drawn.explanation is None


def test_the_slot_s_next_sequence_is_explained_only_if_it_asks():
    sampler = make_sampler(1, VOCAB)
    for is_explained in (True, False, True):
        sampler.set_slot(explained(make_state()) if is_explained else make_state())
        [drawn] = sampler.sample(make_rows([make_logits(0, VOCAB)]), [0], [3])
        assert (drawn.explanation is not None) == is_explained


def test_texts_are_the_tokenizer_s():
    context = type("Context", (), {"tokenizer": make_byte_tokenizer()})()
    [[drawn]] = run([explained(make_state(seed=1, allowed_token_ids=(65,)))], steps=1)
    [fields] = rendered([drawn.explanation], context)
    assert fields["text"] == "A"
