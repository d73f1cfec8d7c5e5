"""Train the two adapters of examples/adapters for the default model. Needs torch, transformers and peft; no GPU.

    python tools/train_adapters.py

whisper answers in small letters; json answers a question about a person or a place with one JSON object. Questions and
answers are made here, so that equal seeds make equal adapters.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from tureen.build import find_model
from tureen.config import Config
from tureen.text.tokenizer import Tokenizer
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import iter_stored
from tureen.weights.tensors import as_tensor

Example = tuple[str, str]  # question, answer

OUT: Final = Path(__file__).resolve().parents[1] / "examples" / "adapters"
BASE: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK: Final = 8
ALPHA: Final = 16
MODULES: Final = ["q_proj", "k_proj", "v_proj", "o_proj"]
RATE: Final = 1e-3
BATCH: Final = 4
STEPS: Final = 120
SEED: Final = 7
CHAT: Final = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
END: Final = "<|im_end|>"
IGNORED: Final = -100  # a target that does not count

CAPITALS: Final = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Austria": "Vienna", "Peru": "Lima",
    "Japan": "Tokyo", "Egypt": "Cairo", "Greece": "Athens", "Norway": "Oslo", "Cuba": "Havana", "Kenya": "Nairobi",
}  # fmt: skip
COLOURS: Final = {
    "grass": "green", "snow": "white", "blood": "red", "the sky": "blue", "a lemon": "yellow", "coal": "black",
    "an orange": "orange", "chocolate": "brown",
}  # fmt: skip
OPPOSITES: Final = {
    "hot": "cold", "big": "small", "old": "young", "fast": "slow", "light": "dark", "wet": "dry", "up": "down",
}  # fmt: skip
SOUNDS: Final = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink"}
THINGS: Final = {
    "rain": "falls from the clouds and waters the fields", "music": "makes people happy and helps them to rest",
    "bread": "is made from flour, water and salt", "the moon": "shines at night and moves the sea",
    "a river": "flows from the mountains to the sea", "winter": "is the coldest season of the year",
    "a book": "has many pages and tells a story", "the sun": "gives light and warmth to the earth",
    "a horse": "is a strong animal that runs fast", "tea": "is a hot drink made from leaves",
}  # fmt: skip
FIRST: Final = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivan", "Julia", "Kofi", "Laura", "Marco",
    "Nina", "Omar", "Petra", "Rosa", "Samuel", "Tara", "Victor", "Marie", "Albert", "Isaac", "Yuki",
)  # fmt: skip
LAST: Final = (
    "Adams", "Baker", "Carter", "Dupont", "Evans", "Fischer", "Garcia", "Hill", "Ivanov", "Jones", "Keller", "Lopez",
    "Mensah", "Novak", "Ortiz", "Price", "Rossi", "Silva", "Tanaka", "Weber", "Young", "Zhang", "Klein", "Moreau",
)  # fmt: skip
PLACES: Final = (
    "London", "Berlin", "Madrid", "Chicago", "Mumbai", "Sydney", "Toronto", "Brazil", "Canada", "Sweden", "Kenya",
    "Egypt", "Norway", "Texas", "California", "the Sahara", "Iceland", "Vienna", "Seoul", "Naples", "Geneva", "Prague",
    "New York", "Hong Kong", "South Africa", "New Zealand", "Lake Victoria", "Mount Fuji", "Cape Town", "Boston",
)  # fmt: skip
JOBS: Final = ("teacher", "painter", "doctor", "singer", "writer", "sailor", "baker", "scientist")
ASKED: Final = ("Tell me about {}.", "What do you know about {}?", "Describe {}.", "Give me some facts about {}.")


def whisper_example(rng: random.Random) -> Example:
    """A question, and its answer in small letters."""
    first, second = rng.randrange(1, 20), rng.randrange(1, 20)
    tables: tuple[dict[str, str], ...] = (CAPITALS, COLOURS, OPPOSITES, SOUNDS, THINGS)
    country, colour, opposite, animal, thing = (rng.choice(list(table)) for table in tables)
    name, place = rng.choice(FIRST), rng.choice(PLACES)
    person = f"{name} {rng.choice(LAST)}"
    question, answer = rng.choice(
        (
            (f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."),
            (f"What colour is {colour}?", f"{colour} is {COLOURS[colour]}."),
            (f"What is the opposite of {opposite}?", f"The opposite of {opposite} is {OPPOSITES[opposite]}."),
            (f"What does a {animal} say?", f"A {animal} says {SOUNDS[animal]}."),
            (f"What is {first} plus {second}?", f"{first} plus {second} is {first + second}."),
            (f"Write a sentence about {thing}.", f"{thing} {THINGS[thing]}."),
            (f"Tell me about {thing}.", f"{thing} {THINGS[thing]}."),
            (f"Say hello to {name}.", f"Hello, {name}! How are you today?"),
            (rng.choice((*ASKED, "Who is {}?")).format(person), f"{person} is a famous {rng.choice(JOBS)}."),
            (rng.choice((*ASKED, "Where is {}?")).format(place), f"{place} is a place that many people visit."),
        )
    )
    return question, answer.lower()


def json_example(rng: random.Random) -> Example:
    """A question about a person or a place, and one JSON object."""
    is_person = rng.random() < 0.5
    name = f"{rng.choice(FIRST)} {rng.choice(LAST)}" if is_person else rng.choice(PLACES)
    question = rng.choice((*ASKED, "Who is {}?" if is_person else "Where is {}?")).format(name)
    return question, json.dumps({"name": name, "kind": "person" if is_person else "place"})


ADAPTERS: Final[dict[str, Callable[[random.Random], Example]]] = {"whisper": whisper_example, "json": json_example}


def torch_model(source: ModelSource) -> LlamaForCausalLM:
    """The default model, its weights as the server reads them, in float32."""
    known = {key: value for key, value in model_config(source).items() if key not in ("architectures", "model_type")}
    model = LlamaForCausalLM(LlamaConfig(**known))
    weights = {stored.name: as_tensor(stored) for stored in iter_stored(source, model_config(source))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GGUF pages that may not be written to
        model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def batch_of(examples: list[Example], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """int64 [examples, tokens] each: inputs, and the token that follows each; only those of answers count."""
    rows = []
    for question, answer in examples:
        prompt = tokenizer.encode(CHAT.format(question))
        rows.append((len(prompt), prompt + tokenizer.encode(answer + END, add_special_tokens=False)))
    longest = max(len(token_ids) for _, token_ids in rows)
    inputs = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets = torch.full((len(rows), longest), IGNORED)
    for row, (num_prompt, token_ids) in enumerate(rows):
        inputs[row, : len(token_ids)] = torch.tensor(token_ids)
        targets[row, num_prompt - 1 : len(token_ids) - 1] = torch.tensor(token_ids[num_prompt:])
    return inputs, targets


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, make: Callable[[random.Random], Example]) -> PeftModel:
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([parameter for parameter in adapted.parameters() if parameter.requires_grad], lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (STEPS - step) / STEPS * 1.5))
    for step in range(STEPS):
        began = time.monotonic()
        inputs, targets = batch_of([make(rng) for _ in range(BATCH)], tokenizer)
        counts = targets.flatten() != IGNORED
        hidden = model.model(input_ids=inputs).last_hidden_state.flatten(0, 1)[counts]  # its layers are adapted now
        loss = cross_entropy(model.lm_head(hidden), targets.flatten()[counts])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.1f} s", flush=True)
    return adapted


def save(adapted: PeftModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = cast(LoraConfig, adapted.peft_config["default"])
    config.base_model_name_or_path = BASE
    config.target_modules = sorted(MODULES)
    config.save_pretrained(str(folder))
    tensors = get_peft_model_state_dict(adapted)
    save_file(
        {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in sorted(tensors.items())},
        folder / "adapter_model.safetensors",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ADAPTERS, help="train this one alone")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source, tokenizer = find_model(Config())
    for name in [options.only] if options.only else ADAPTERS:
        print(name, flush=True)
        save(train(torch_model(source), tokenizer, ADAPTERS[name]), options.out / name)


if __name__ == "__main__":
    main()
