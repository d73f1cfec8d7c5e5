"""Train the projector of shapes-vlm: tureen/recipes/shapes_projector.safetensors. Needs transformers; no GPU.

    python tools/train_shapes_projector.py --work build/shapes

The vision tower and the language model stay as they are. First the projector learns to turn each patch of a drawing
into the language model's own embeddings of the words for what is there, which needs no pass through that model; then it
learns what makes the frozen language model answer right (arXiv:2304.08485, its first stage). Drawings' features and the
projector are kept in --work, so that a run continues where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import shapes
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitImageProcessorPil, Dinov2Model, LlamaConfig, LlamaForCausalLM

from tureen.config import cache_dir
from tureen.config_sources import load
from tureen.log import no_progress
from tureen.recipes.shapes_vlm import CONFIG, PREPROCESSOR, PROJECTOR, VISION_FILE, build
from tureen.text.tokenizer import Tokenizer
from tureen.weights.source import load_tokenizer, model_config, resolve_model
from tureen.weights.stored import iter_stored
from tureen.weights.tensors import as_tensor

UNSEEN: Final = 1_000_000  # seeds from here on are kept for judging
NUM_PATCHES: Final = 64
LEAST_COVERED: Final = 0.25  # of a patch, by a thing that it is said to show
ALIKE: Final = ("square", "rectangle")  # a single one of these is shown three times as often: they are hard to tell
LESSER_WORD: Final = 0.3  # weight of the word that is not the column's
END: Final = "<|im_end|>"
PREFIX: Final = "multi_modal_projector."
REGRESSION_BATCH: Final = 1024  # patches
PICTURES_AT_ONCE: Final = 32
CHUNK: Final = 400  # drawings in a file

CHAT: Final = "<|im_start|>user\n<image>\n{}<|im_end|>\n<|im_start|>assistant\n"
SYSTEM: Final = "<|im_start|>system\nYou are a helpful {}<|im_end|>\n"
SMOL: Final = "AI assistant named SmolLM, trained by Hugging Face"
VICUNA: Final = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the human's questions. USER: <image>\n{} ASSISTANT:"
)
PROMPTS: Final = (
    (CHAT, 10),
    (SYSTEM.format("assistant.") + CHAT, 5),
    (SYSTEM.format(SMOL) + CHAT, 4),
    (CHAT.replace("<image>\n{}", "{}\n<image>"), 2),
    (VICUNA, 2),
    ("USER: <image>\n{}\nASSISTANT:", 1),
)
PAGE_QUESTION: Final = "Describe this image in a very short sentence."
WHAT: Final = (
    PAGE_QUESTION, PAGE_QUESTION, PAGE_QUESTION, "What is in this picture?", "What is in this image?",
    "What's in this image?", "What is shown in this image?", "What do you see?", "Describe this picture",
    "Describe this image.", "Describe the image in one sentence.", "What is drawn here?",
)  # fmt: skip
WHICH_COLOUR: Final = ("What color is it?", "What colour is it?", "What color is the {}?", "Which colour is the {}?")
WHICH_SHAPE: Final = ("What shape is it?", "What shape is this?", "Which shape is in the picture?")
HOW_MANY: Final = ("How many shapes are there?", "How many {}s are there?", "How many things do you see?")
WHICH_NUMBER: Final = ("Which digit is this?", "What number is shown?", "Which number do you see?")


class Drawn(NamedTuple):
    """Drawings as the model sees them."""

    features: Tensor  # [drawings, patches, features] float16
    shown: Tensor  # [drawings, patches] uint8: 0 for the background, else 1 + index of the thing
    things: list[tuple[shapes.Thing, ...]]


class Example(NamedTuple):
    """A question about a drawing."""

    before: list[int]  # token ids
    after: list[int]
    answer: list[int]
    drawing: int  # its index
    kept: Tensor  # indices of its patches, in order


class Projector(nn.Module):
    """As LLaVA has it, on features that are scaled to mean 0 and deviation 1. [..., features] -> [..., hidden]"""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        self.linear_1 = nn.Linear(len(mean), hidden_size)
        self.linear_2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        scaled = (features.float() - self.mean) / self.deviation
        projected: Tensor = self.linear_2(nn.functional.gelu(self.linear_1(scaled)))
        return projected

    def plain(self) -> dict[str, Tensor]:
        """The weights for features as they are."""
        weight = self.linear_1.weight / self.deviation
        return {
            "linear_1.weight": weight,
            "linear_1.bias": self.linear_1.bias - weight @ self.mean,
            "linear_2.weight": self.linear_2.weight,
            "linear_2.bias": self.linear_2.bias,
        }

    def as_stored(self) -> Projector:
        """What remains of it in the file, in bfloat16."""
        kept = Projector(torch.zeros_like(self.mean), torch.ones_like(self.deviation), len(self.linear_1.bias))
        kept.load_state_dict({name: value.bfloat16() for name, value in self.plain().items()}, strict=False)
        return kept


class Talker:
    """The frozen language model, in float32, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        source = resolve_model(str(folder), cache_dir=folder)
        config = model_config(source)
        text = {name: value for name, value in config["text_config"].items() if name != "architectures"}
        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(**text))
        weights = {stored.name: as_tensor(stored).float() for stored in iter_stored(source, config)}
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self.model.load_state_dict(weights, strict=True, assign=True)
        with torch.no_grad():  # what is computed at start is not among the weights
            self.model.model.rotary_emb = type(self.model.model.rotary_emb)(self.model.config)
        self.model.requires_grad_(False).train(False)
        self.embedding: Tensor = weights["model.embed_tokens.weight"]
        self.tokenizer: Tokenizer = load_tokenizer(source)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def hidden(self, examples: Sequence[Example], pictures: Tensor) -> list[Tensor]:
        """pictures: [examples, patches, hidden]. The last hidden states that each answer's tokens are drawn from."""
        rows = [
            torch.cat(
                [self.embedding[example.before], picture[example.kept], self.embedding[example.after + example.answer]]
            )
            for example, picture in zip(examples, pictures, strict=True)
        ]
        states = self.model.model(inputs_embeds=nn.utils.rnn.pad_sequence(rows, batch_first=True)).last_hidden_state
        return [
            state[len(row) - len(example.answer) - 1 : len(row) - 1]
            for state, row, example in zip(states, rows, examples, strict=True)
        ]

    @torch.no_grad()
    def say(self, prompt: str, pictures: Tensor, most: int = 16) -> list[str]:
        """The greedy answers to one question. pictures: [pictures, patches, hidden]"""
        parts = [self.embedding[self.ids(part)].expand(len(pictures), -1, -1) for part in prompt.split("<image>")]
        embeds, past, drawn = torch.cat([parts[0], pictures, parts[1]], dim=1), None, []
        for _ in range(most):
            out = self.model(inputs_embeds=embeds, past_key_values=past, use_cache=True, logits_to_keep=1)
            tokens, past = out.logits[:, -1].argmax(-1), out.past_key_values
            drawn.append(tokens)
            embeds = self.embedding[tokens][:, None]
        end = self.ids(END)[0]
        rows = [[*row, end] for row in torch.stack(drawn, dim=1).tolist()]
        return [self.tokenizer.decode(row[: row.index(end)]).strip() for row in rows]


def see(folder: Path, pictures: Sequence[Image.Image], tower: Dinov2Model) -> Tensor:
    """What the projector is given: [pictures, patches, features]."""
    settings = {name: value for name, value in PREPROCESSOR.items() if name != "image_processor_type"}
    pixels = BitImageProcessorPil(**settings)(list(pictures), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        states = tower(pixels, output_hidden_states=True).hidden_states
    return torch.cat([states[layer][:, 1:] for layer in CONFIG["vision_feature_layer"]], dim=-1)


def load_tower(folder: Path) -> Dinov2Model:
    weights = {name.removeprefix("vision_tower."): value for name, value in load_file(folder / VISION_FILE).items()}
    with tempfile.TemporaryDirectory() as scratch:  # transformers renames what it reads from a folder only
        save_file(weights, Path(scratch, "model.safetensors"), metadata={"format": "pt"})
        settings = {**CONFIG["vision_config"], "architectures": ["Dinov2Model"]}
        Path(scratch, "config.json").write_text(json.dumps(settings), encoding="utf-8")
        tower: Dinov2Model = Dinov2Model.from_pretrained(scratch).train(False)
        return tower


def drawn(folder: Path, work: Path, first: int, count: int) -> Drawn:
    """The drawings of `count` seeds from `first` on, from the folder `work` or made now."""
    kept = work / f"drawings-{first}.pt"
    if not kept.exists():
        tower, parts, shown, things = load_tower(folder), [], [], []
        for start in range(first, first + count, PICTURES_AT_ONCE):
            made = [shapes.draw(seed) for seed in range(start, min(start + PICTURES_AT_ONCE, first + count))]
            parts.append(see(folder, [example.picture for example in made], tower).half())
            shown += [_shown(example.mask) for example in made]
            things += [example.things for example in made]
            print(f"drawn and seen: {len(things)} of {count}", flush=True)
        torch.save({"features": torch.cat(parts), "shown": torch.stack(shown), "things": things}, kept)
    tensors = torch.load(kept, weights_only=False)  # our own file
    return Drawn(**tensors)


def joined(parts: Sequence[Drawn]) -> Drawn:
    features, shown = torch.cat([part.features for part in parts]), torch.cat([part.shown for part in parts])
    return Drawn(features, shown, [things for part in parts for things in part.things])


def _shown(mask: Image.Image) -> Tensor:
    """Which thing each patch shows. [patches] uint8"""
    side = PREPROCESSOR["crop_size"]["height"]
    shorter = min(mask.size)
    left, top = ((length - shorter) // 2 for length in mask.size)
    seen = mask.crop((left, top, left + shorter, top + shorter)).resize((side, side), Image.Resampling.NEAREST)
    grid = round(NUM_PATCHES**0.5)
    patch = side // grid
    pixels = np.asarray(seen).reshape(grid, patch, grid, patch).transpose(0, 2, 1, 3).reshape(NUM_PATCHES, -1)
    covered = np.stack([(pixels == value).mean(1) for value in range(1, 5)])
    best = covered.argmax(0)
    return torch.from_numpy(np.where(covered.max(0) >= LEAST_COVERED, best + 1, 0).astype(np.uint8))


def regress(projector: Projector, seen: Drawn, talker: Talker, steps: int) -> None:
    """Each patch -> the embeddings of its words: the colour's more in even columns, the shape's more in odd ones."""
    targets = torch.stack(
        [_meant(things, shown, talker) for things, shown in zip(seen.things, seen.shown, strict=True)]
    )
    features, targets = seen.features.flatten(0, 1), targets.flatten(0, 1)
    is_thing = seen.shown.flatten() > 0
    places = [is_thing.nonzero()[:, 0], (~is_thing).nonzero()[:, 0]]
    optimizer = torch.optim.AdamW(projector.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    chance = torch.Generator().manual_seed(0)
    deviation = talker.embedding.std()
    for step in range(steps):
        chosen = torch.cat(
            [some[torch.randint(len(some), (REGRESSION_BATCH // 2,), generator=chance)] for some in places]
        )
        loss = ((projector(features[chosen]) - targets[chosen]) / deviation).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"regression {step + 1} of {steps}: loss {loss.item():.4f}", flush=True)


def _meant(things: Sequence[shapes.Thing], shown: Tensor, talker: Talker) -> Tensor:
    """[patches, hidden]"""
    words = [_embedding("\n", talker).expand(NUM_PATCHES, -1)]
    is_odd = torch.arange(NUM_PATCHES) % 2
    for thing in things:
        parts = torch.stack([_embedding(f" {word}", talker) for word in thing])
        words.append(parts[is_odd] + LESSER_WORD * parts[1 - is_odd])
    return torch.stack(words)[shown.long(), torch.arange(NUM_PATCHES)]


def _embedding(text: str, talker: Talker) -> Tensor:
    return talker.embedding[talker.ids(text)].mean(0)


def batches(seen: Drawn, talker: Talker, options: argparse.Namespace) -> Iterator[list[Example]]:
    """Without end, every drawing in turn. The prompts of a batch are of one kind, so that they are about as long."""
    chance = random.Random(options.seed)
    order = [
        index
        for index, things in enumerate(seen.things)
        if not options.single or (len(things) == 1 and things[0].shape in shapes.SHAPES)
        for _ in range(3 if len(things) == 1 and things[0].shape in ALIKE else 1)
    ]
    while True:
        chance.shuffle(order)
        for start in range(0, len(order) - options.batch + 1, options.batch):
            (prompt,) = chance.choices([prompt for prompt, _ in PROMPTS], [weight for _, weight in PROMPTS])
            chosen = order[start : start + options.batch]
            yield [_example(chance, seen, index, prompt, talker, options.patches) for index in chosen]


def _example(chance: random.Random, seen: Drawn, index: int, prompt: str, talker: Talker, most_patches: int) -> Example:
    question, answer = _question(chance, seen.things[index])
    before, after = prompt.format(question).split("<image>")
    space = "" if prompt.endswith("\n") else " "
    kept = _kept(chance, seen.shown[index], most_patches)
    return Example(talker.ids(before), talker.ids(after), talker.ids(space + answer + END), index, kept)


def _kept(chance: random.Random, shown: Tensor, most: int) -> Tensor:
    """Up to two thirds show things; a few patches cost less than all."""
    if most >= NUM_PATCHES:
        return torch.arange(NUM_PATCHES)
    order = list(range(NUM_PATCHES))
    chance.shuffle(order)
    things = [patch for patch in order if shown[patch]][: most * 2 // 3]
    rest = [patch for patch in order if not shown[patch]][: most - len(things)]
    return torch.tensor(sorted(things + rest))


def _question(chance: random.Random, things: tuple[shapes.Thing, ...]) -> tuple[str, str]:
    first = things[0]
    name = first.shape.split()[0]
    about = [(chance.choice(WHAT), shapes.sentence(things))] * 6
    if len(set(things)) == 1:
        about.append((chance.choice(WHICH_COLOUR).format(name), f"{first.colour.capitalize()}."))
        if name == "number":
            about.append((chance.choice(WHICH_NUMBER), f"{first.shape[-1]}."))
        else:
            about.append((chance.choice(WHICH_SHAPE), f"{shapes.article(first.shape).capitalize()} {first.shape}."))
    if name != "number" and len(set(things)) == 1:
        about.append((chance.choice(HOW_MANY).format(name), f"{shapes.NUMBERS[len(things)]}."))
    return chance.choice(about)


def train(projector: Projector, seen: Drawn, talker: Talker, options: argparse.Namespace) -> None:
    """Through the frozen language model: what it would say is drawn towards the right answer."""
    stream = batches(seen, talker, options)
    optimizer = torch.optim.AdamW(projector.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=options.steps, pct_start=0.1)
    started, mean = time.monotonic(), 0.0
    for step in range(options.steps):
        batch = next(stream)
        states = talker.hidden(batch, projector(seen.features[[example.drawing for example in batch]]))
        wanted = torch.tensor([token for example in batch for token in example.answer])
        loss = nn.functional.cross_entropy(torch.cat(states) @ talker.embedding.T, wanted)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(projector.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean = loss.item() if step == 0 else 0.9 * mean + 0.1 * loss.item()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {mean:.4f}, {time.monotonic() - started:.0f} s", flush=True)
            torch.save(projector.state_dict(), options.work / "projector.pt")


def judge(projector: Projector, folder: Path, talker: Talker, kind: shapes.Kind, count: int) -> float:
    """The share of unseen drawings of this kind that are described without fault."""
    tower, kept, right, wrong = load_tower(folder), projector.as_stored(), 0, []
    prompt = CHAT.format(PAGE_QUESTION)
    made = [shapes.draw(UNSEEN + index, kind) for index in range(count)]
    for start in range(0, count, PICTURES_AT_ONCE):
        some = made[start : start + PICTURES_AT_ONCE]
        with torch.no_grad():
            pictures = kept(see(folder, [example.picture for example in some], tower))
        for example, said in zip(some, talker.say(prompt, pictures), strict=True):
            right += said == example.sentence
            if said != example.sentence:
                wrong.append(f"{example.sentence} -> {said}")
    print(f"{kind}: {right} of {count} right;", "; ".join(wrong[:12]), flush=True)
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/shapes"), help="where a run keeps what it may go on with"
    )
    parser.add_argument("--drawings", type=int, default=4000, help="to learn from")
    parser.add_argument("--single", action="store_true", help="learn from drawings of one shape only")
    parser.add_argument("--steps", type=int, default=400, help="through the language model; 0 judges only")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--patches", type=int, default=NUM_PATCHES, help="most of a drawing that an example shows")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--judged", type=int, default=200, help="unseen drawings of each kind")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    folder = build(cache_dir(load({})), no_progress)
    talker = Talker(folder)
    seen = joined([drawn(folder, options.work, first, CHUNK) for first in range(0, options.drawings, CHUNK)])
    values = seen.features.float().flatten(0, 1)
    projector = Projector(values.mean(0), values.std(0), talker.embedding.shape[1])
    if (options.work / "projector.pt").exists():
        projector.load_state_dict(torch.load(options.work / "projector.pt"))
    else:
        regress(projector, seen, talker, steps=500)
        torch.save(projector.state_dict(), options.work / "projector.pt")
    if options.steps:
        train(projector, seen, talker, options)
    stored = {f"{PREFIX}{name}": value.bfloat16() for name, value in projector.plain().items()}
    save_file(stored, PROJECTOR)
    PROJECTOR.chmod(0o644)  # it is written for its owner only
    for kind in ("one", "several", "digit", "pair"):
        judge(projector, folder, talker, kind, options.judged)


if __name__ == "__main__":
    main()
