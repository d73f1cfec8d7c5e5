"""Asks for an explained answer, and recomputes each of its tokens from the explanation."""

import json
import math
import urllib.request

URL = "http://localhost:30000/generate"
PARAMS = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3, "max_new_tokens": 24}


def uniform(seed: int, position: int) -> float:
    """Returns the random number in [0, 1) of a position: Philox4x32-10, of which 53 bits are taken."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = position & low, position >> 32, 0, 0
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & low, first >> 32 ^ c3 ^ k1, first & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return (c0 << 21 | c1 >> 11) * 2.0**-53


def check(stage: dict, logits: list[float], temperature: float = 1.0) -> None:
    """Raises ValueError unless the tokens that are left have probabilities in proportion to their logits' powers."""
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    left = [(p, w) for p, w in zip(stage["probabilities"], weights, strict=True) if p > 0]
    for p, w in left:
        if not math.isclose(p * left[0][1], w * left[0][0], rel_tol=1e-9):
            raise ValueError(f"{stage['stage']}: {p} is not in proportion to the logits")


def recompute(token: dict, seed: int) -> int:
    """Returns the token that follows from the explanation. Raises ValueError where a number in it cannot be."""
    if token["chosen_by"] not in ("draw", "best"):
        return token["token_id"]  # the grammar, or the limit of the reasoning, left no choice
    ids, stages = [candidate["token_id"] for candidate in token["candidates"]], token["stages"]
    steps = [stage for stage in stages if "logits" in stage]
    for step in steps:  # null is minus infinity
        logits = [-math.inf if logit is None else logit for logit in step["logits"]]
        check(step, logits)
    if token["chosen_by"] == "best":
        return min(zip(logits, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[1]
    temperature = next((stage["value"] for stage in stages if stage["stage"] == "temperature"), 1.0)
    for stage in stages[len(steps) :]:
        check(stage, logits, temperature)
    drawn, random = stages[-1], uniform(seed, token["position"])
    shares = zip(ids, drawn["starts"], drawn["ends"], strict=True)
    return next(token_id for token_id, start, end in shares if start is not None and start <= random < end)


if __name__ == "__main__":
    body = {"text": "The capital of France is", "sampling_params": PARAMS, "explain": True}
    request = urllib.request.Request(URL, json.dumps(body).encode(), {"Content-Type": "application/json"})
    meta = json.load(urllib.request.urlopen(request))["meta_info"]
    for token in meta["explanations"]:
        print(repr(token["text"]), token["token_id"] == recompute(token, meta["sampling_seed"]))
