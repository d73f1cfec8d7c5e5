"""Compares the log-probabilities of servers with float32, computed by transformers from the same GGUF file.

    tureen serve --port 30000 &
    llama-server -m MODEL.gguf --port 8080 -t 2 --no-ui &
    python bench/accuracy.py MODEL.gguf ours=tureen@http://127.0.0.1:30000 llama=llamacpp@http://127.0.0.1:8080

Chats: the first tokens that float32 answers greedily to each line of data/chats.txt. At each of these positions the
ten tokens that float32 holds likeliest are compared, and whether the likeliest is the same.
Text: perplexity of the first decision notes of docs/, in windows of 512 tokens.
The token ids are those of the first tureen server named.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

HERE = Path(__file__).parent
# The text that is judged. The results of 2026-11-23 are for the wording that these notes had that day.
NOTES = sorted((HERE.parent / "docs" / "decisions").glob("00[0-1]*.md"))[:14]
FIRST = 4  # tokens of an answer
LIKELIEST = 10
WINDOW, WINDOWS = 512, 4
SHOWN = 400  # tokens that llama.cpp is asked for, to find the likeliest ten of float32 among them


class Chat(NamedTuple):
    """A chat's tokens, those that float32 goes on with, and the log-probabilities of the likeliest at each."""

    prompt: list[int]
    answer: list[int]
    likeliest: list[dict[int, float]]


class Reference(NamedTuple):
    """What float32 says."""

    chats: list[Chat]
    windows: list[list[int]]
    scores: list[list[float]]  # log-probability of each token of a window but the first


class Server:
    """A server that is asked for log-probabilities of given tokens."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=600)

    def post(self, path: str, **body: Any) -> Any:
        response = self.http.post(path, json=body)
        response.raise_for_status()
        return response.json()

    def likeliest(self, chat: Chat) -> list[tuple[int, dict[int, float]]]:
        """Returns for each position of the answer the likeliest token, and the log-probabilities of float32's ten."""
        raise NotImplementedError

    def scores(self, window: list[int]) -> list[float]:
        """Returns the log-probability of each token but the first."""
        raise NotImplementedError


class Tureen(Server):
    """tureen's `/generate`."""

    def tokens(self, **body: Any) -> list[int]:
        ids: list[int] = self.post("/tokenize", **body)["tokens"]
        return ids

    def _prompt(self, ids: list[int], start: int, **fields: Any) -> dict[str, Any]:
        params = {"max_new_tokens": 0}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": start}
        meta: dict[str, Any] = self.post("/generate", **body, **fields)["meta_info"]
        return meta

    def likeliest(self, chat: Chat) -> list[tuple[int, dict[int, float]]]:
        asked = sorted({token for ten in chat.likeliest for token in ten})
        start = len(chat.prompt) - 1  # the first has none
        meta = self._prompt(chat.prompt + chat.answer, start, top_logprobs_num=1, token_ids_logprob=asked)
        return [
            (best[0][1], {token: value for value, token, _ in values if token in ten})
            for best, values, ten in zip(
                meta["input_top_logprobs"][-FIRST:],
                meta["input_token_ids_logprobs"][-FIRST:],
                chat.likeliest,
                strict=True,
            )
        ]

    def scores(self, window: list[int]) -> list[float]:
        return [value for value, _, _ in self._prompt(window, 0)["input_token_logprobs"][1:]]


class LlamaCpp(Server):
    """llama.cpp's `/completion`, a token at a time: it has no log-probabilities of a prompt."""

    def _next(self, ids: list[int], shown: int, **fields: Any) -> dict[str, Any]:
        body = {"prompt": ids, "n_predict": 1, "n_probs": shown, "temperature": 0, "cache_prompt": True}
        [drawn] = self.post("/completion", **body, **fields)["completion_probabilities"]
        return dict(drawn)

    def likeliest(self, chat: Chat) -> list[tuple[int, dict[int, float]]]:
        tops = []
        for index, ten in enumerate(chat.likeliest):
            top = self._next(chat.prompt + chat.answer[:index], SHOWN)["top_logprobs"]
            values = {entry["id"]: entry["logprob"] for entry in top}
            tops.append((top[0]["id"], {token: values.get(token, top[-1]["logprob"]) for token in ten}))
        return tops

    def scores(self, window: list[int]) -> list[float]:
        forced = (self._next(window[:end], 1, logit_bias=[[window[end], 1000]]) for end in range(1, len(window)))
        return [drawn["logprob"] for drawn in forced]


BACKENDS = {"tureen": Tureen, "llamacpp": LlamaCpp}


def prompts(server: Tureen) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the tokens of every chat, and the windows of the text."""
    lines = (HERE / "data" / "chats.txt").read_text(encoding="utf-8").splitlines()
    chats = [server.tokens(messages=[{"role": "user", "content": line}]) for line in lines]
    text = server.tokens(prompt="\n\n".join(note.read_text(encoding="utf-8") for note in NOTES))
    return chats, [text[at : at + WINDOW] for at in range(0, WINDOW * WINDOWS, WINDOW)]


def reference(gguf: Path, chats: list[list[int]], windows: list[list[int]]) -> Reference:
    """Returns what transformers says in float32."""
    import torch  # noqa: PLC0415 - seconds
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()

    def rows(ids: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def answered(prompt: list[int]) -> Chat:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, max_new_tokens=FIRST, min_new_tokens=FIRST, do_sample=False)[0].tolist()
        top = rows(whole)[len(prompt) - 1 : -1].topk(LIKELIEST)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Chat(prompt, whole[len(prompt) :], [dict(zip(*pair, strict=True)) for pair in pairs])

    scores = [rows(window)[:-1].gather(1, torch.tensor(window[1:])[:, None])[:, 0].tolist() for window in windows]
    return Reference([answered(prompt) for prompt in chats], windows, scores)


def kept(file: Path | None, gguf: Path, server: Tureen) -> Reference:
    """Returns the reference from a file, or makes it and keeps it there."""
    if file is not None and file.exists():
        chats, windows, scores = json.loads(file.read_text())
        ten = [
            Chat(*chat[:2], [{int(token): value for token, value in at.items()} for at in chat[2]]) for chat in chats
        ]
        return Reference(ten, windows, scores)
    made = reference(gguf, *prompts(server))
    if file is not None:
        file.write_text(json.dumps(made))
    return made


def compared(server: Server, truth: Reference) -> dict[str, Any]:
    """Returns how far a server is from float32."""
    distances: list[float] = []
    num_same = 0
    for chat in truth.chats:
        for (best, values), ten in zip(server.likeliest(chat), chat.likeliest, strict=True):
            num_same += best == next(iter(ten))
            distances += [abs(values[token] - value) for token, value in ten.items()]
    distances.sort()
    pairs = list(_pairs(server, truth))
    return {
        "mean": sum(distances) / len(distances),
        "p99": distances[math.ceil(0.99 * len(distances)) - 1],
        "argmax": num_same,
        "positions": len(distances) // LIKELIEST,
        "perplexity": math.exp(-sum(score for score, _ in pairs) / len(pairs)),
        "float32 perplexity": math.exp(-sum(true for _, true in pairs) / len(pairs)),
        "text mean": sum(abs(score - true) for score, true in pairs) / len(pairs),
    }


def _pairs(server: Server, truth: Reference) -> Iterator[tuple[float, float]]:
    for window, scores in zip(truth.windows, truth.scores, strict=True):
        yield from zip(server.scores(window), scores, strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("server", nargs="+", help="NAME=tureen@URL or NAME=llamacpp@URL")
    parser.add_argument("--reference", type=Path, help="file that keeps what float32 says")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    servers: dict[str, Server] = {}
    for text in args.server:
        name, _, target = text.partition("=")
        backend, _, url = target.partition("@")
        servers[name] = BACKENDS[backend](url)
    own = next(server for server in servers.values() if isinstance(server, Tureen))
    truth = kept(args.reference, args.model, own)
    results = {}
    print(f"{'':16} {'mean':>7} {'p99':>7} {'argmax':>9} {'perplexity':>11}")
    for name, server in servers.items():
        figures = results[name] = compared(server, truth)
        same = f"{figures['argmax']}/{figures['positions']}"
        print(
            f"{name:16} {figures['mean']:7.4f} {figures['p99']:7.4f} {same:>9} {figures['perplexity']:11.4f}",
            flush=True,
        )
    print(f"{'float32':16} {0:7.4f} {0:7.4f} {'':9} {figures['float32 perplexity']:11.4f}")
    if args.json:
        args.json.write_text(json.dumps({"model": args.model.name, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
