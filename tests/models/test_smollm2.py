import os
import random
import warnings

import pytest
import torch
from recorded_texts import CLEAR, RECORDED
from runner_driver import GREEDY, Running, generate, step
from samples import either
from tiny_models import greedy, logprobs

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.types import LogprobSpec
from tureen.runner.load import load_runner
from tureen.weights.source import load_tokenizer, model_config
from tureen.weights.stored import iter_stored
from tureen.weights.tensors import as_tensor

pytestmark = pytest.mark.model
DEVICE = os.environ.get("TUREEN_TEST_DEVICE", "cpu")
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n", made with the model's tokenizer
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
TOP = LogprobSpec(prompt_start=0, top=50)


def make_runner(source, **settings):
    settings = {"device": DEVICE, "num_threads": 2, "max_total_tokens": 16384} | settings
    return load_runner(source, Config(**settings))


@pytest.fixture(scope="module")
def weights(default_model_source):
    """As we read them."""
    config = model_config(default_model_source)
    return {stored.name: as_tensor(stored) for stored in iter_stored(default_model_source, config)}


@pytest.fixture(scope="module")
def oracle(default_model_source, weights):
    """transformers' model with our dequantised weights; some of these are compared with the gguf package's below."""
    import transformers

    hf = model_config(default_model_source)
    known = {key: value for key, value in hf.items() if key not in ("architectures", "model_type")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**known))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.float().eval()


def test_weights_are_those_that_the_gguf_package_reads(default_model_source, weights):
    gguf = pytest.importorskip("gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(str(default_model_source.path)).tensors}

    def theirs(name, rows=slice(None)):
        return torch.from_numpy(gguf.dequantize(stored[name].data[rows], stored[name].tensor_type).copy())

    for rows in either((slice(None),), (slice(1000), slice(-1000, None))):
        assert torch.equal(weights["model.embed_tokens.weight"][rows].float(), theirs("token_embd.weight", rows))
    assert torch.equal(weights["model.layers.17.mlp.down_proj.weight"], theirs("blk.17.ffn_down.weight"))
    assert torch.equal(weights["model.layers.3.self_attn.v_proj.weight"], theirs("blk.3.attn_v.weight"))
    permuted = theirs("blk.29.attn_k.weight").view(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    assert torch.equal(weights["model.layers.29.self_attn.k_proj.weight"], permuted)


@pytest.fixture(scope="module")
def float32_runner(default_model_source):
    return make_runner(default_model_source, dtype="float32")


@pytest.mark.sampled
def test_greedy_tokens_and_logprobs_equal_transformers_in_float32(float32_runner, oracle):
    count = either(24, 12)
    sequence = Running(0, PROMPT, [40, 3, 17, 88], logprobs=TOP)
    found = generate(float32_runner, sequence, count, chunk=7, score=True)
    assert found == greedy(oracle, PROMPT, count, draft=sequence.output)
    expected = logprobs(oracle, sequence.token_ids[:-1])
    for report, row in zip(sequence.prompt_logprobs + sequence.output_logprobs, expected, strict=True):
        assert abs(report.token[0] - float(row[report.token[1]])) < 1e-4
        assert max(abs(value - float(row[token])) for value, token in report.top) < 1e-4


@pytest.mark.parametrize("prompt", RECORDED)
def test_a_recorded_text_is_transformers_and_no_token_of_it_is_a_close_call(default_model_source, oracle, prompt):
    tokenizer = load_tokenizer(default_model_source)
    text, num_tokens = RECORDED[prompt]
    draft = tokenizer.encode(text, add_special_tokens=False)
    found = greedy(oracle, tokenizer.encode(prompt), num_tokens, clear=CLEAR, draft=draft)
    assert tokenizer.decode(found, skip_special_tokens=False) == text


@pytest.mark.sampled
def test_a_long_prompt_in_chunks_equals_transformers_in_float32(float32_runner, oracle):
    rng = random.Random(2)
    prompt = [rng.randrange(49152) for _ in range(either(650, 140))]
    expected = logprobs(oracle, prompt, last=1)[-1]
    sequence = Running(0, prompt, range(100, 145), logprobs=TOP)
    generate(float32_runner, sequence, 1, chunk=either(256, 128))
    assert max(abs(value - float(expected[token])) for value, token in sequence.output_logprobs[0].top) < 1e-4


@pytest.mark.skipif(DEVICE != "cpu", reason="bit for bit on CPU only")
@pytest.mark.sampled
def test_a_request_gives_the_same_tokens_and_logprobs_alone_in_pieces_and_among_others(default_model_source):
    runner = make_runner(default_model_source)
    repeats, num_mates, longest, count = either(20, 3), either(30, 7), either(90, 40), either(12, 3)
    rng = random.Random(4)

    def run(params, chunk, mates):
        sequence = Running(0, PROMPT * repeats, range(30), params=params, logprobs=TOP, seed=3)
        while len(sequence.output) < count:
            step(runner, [*mates, sequence], [either(40, 16)] * len(mates) + [chunk])
        return sequence.output, sequence.output_logprobs

    for params in (GREEDY, SamplingParams(temperature=1.0)):
        mates = [
            Running(
                slot, [rng.randrange(49152) for _ in range(rng.randrange(1, longest))], range(30 * slot, 30 * slot + 30)
            )
            for slot in range(1, num_mates + 1)
        ]
        alone = run(params, 1000, [])
        assert run(params, 5 * repeats, []) == alone
        assert run(params, 5 * repeats // 2, mates) == alone
