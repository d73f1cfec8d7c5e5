"""Adapters of models that see: log-probabilities and tokens after pictures equal those of peft's adapted model."""

import gemma_checks
import idefics3_checks
import llava_checks
import msgspec
import pytest
import qwen_checks
import tiny_llava
import tiny_pixtral
from samples import some
from tiny_adapters import write_adapter

from tureen.errors import InvalidRequest

PLAIN = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
DELTA = "in_proj_qkv|in_proj_z|out_proj"
FAMILIES = {
    **dict.fromkeys(("qwen2", "qwen2.5", "qwen3", "qwen3.5"), (qwen_checks, None)),
    **dict.fromkeys(("gemma3", "gemma4", "gemma4-causal"), (gemma_checks, None)),
    **dict.fromkeys(("smolvlm", "idefics3"), (idefics3_checks, None)),
    **dict.fromkeys(("llava-clip", "llava-siglip", "next-vicuna", "onevision"), (llava_checks, tiny_llava)),
    **dict.fromkeys(("mistral-small", "ministral3"), (llava_checks, tiny_pixtral)),
}


def adapted(tmp_path, name, **settings):
    """Returns the checks of a model's family, the model with peft's copy as its oracle, and the adapter's folder."""
    checks, tiny = FAMILIES[name]
    model = checks.make_model(tmp_path / "model", name, **({} if tiny is None else {"tiny": tiny}))
    targets = rf".*(language_model|text_model)\..*\.({PLAIN}|{DELTA})"
    oracle = write_adapter(model.oracle, tmp_path / "adapter", **({"target_modules": targets} | settings))
    return checks, msgspec.structs.replace(model, oracle=oracle.base_model.model), tmp_path / "adapter"


def check(checks, model, **changes):
    if checks is qwen_checks:
        checks.check_end_to_end(model, qwen_checks.PICTURES, **changes)
    elif checks is llava_checks:
        checks.check_end_to_end(model, [tiny_llava.picture(57, 31)], "image", **changes)
    else:
        checks.check_end_to_end(model, 2, **changes)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        (name, kernels)
        for place, name in enumerate(FAMILIES)
        for kernels in some(("auto", "torch")[:: (-1) ** place], 1)
    ],
)
def test_tokens_after_pictures_equal_those_of_peft_s_adapted_model(tmp_path, name, kernels):
    checks, model, folder = adapted(tmp_path, name)
    check(checks, model, adapter=folder, kernels=kernels, beside=True, chunk=50)
    with pytest.raises(AssertionError):
        check(checks, model, kernels=kernels)


def test_an_adapter_that_changes_the_vision_encoder_is_refused(tmp_path):
    checks, model, folder = adapted(tmp_path, "gemma3", target_modules=["q_proj"])
    with pytest.raises(InvalidRequest, match=r"vision_tower.*for which adapters are not supported"):
        check(checks, model, adapter=folder)
