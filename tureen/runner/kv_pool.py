"""Computes how many tokens the KV cache can hold, and the bounds that follow from it. No torch."""

from __future__ import annotations

from tureen.config import Config
from tureen.contract.runner import Capacity
from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError
from tureen.log import get_logger
from tureen.models.config import ModelConfig
from tureen.sandbox.budget import helper_bytes

CPU_CONTEXTS, CPU_TOKENS = 4, 65536  # on CPU the computed pool holds at most this many contexts or tokens
STATE_SHARE = 0.25  # of the free memory, for the states of layers without attention
MOST_SAVED = 4096  # states that are saved for later requests
GIB = 1 << 30

log = get_logger("runner")


def plan_capacity(
    config: Config, model: ModelConfig, *, token_bytes: int, weight_bytes: int, device: DeviceInfo
) -> Capacity:
    """Computes how much a runner can hold beside its weights, which take `weight_bytes` of the memory that is free now.

    token_bytes: K and V of one token in all layers. The context is no longer than the pool.
    Raises StartupError when the settings cannot be met, with the numbers and the settings to change.
    """
    wanted_len = _context_len(config, model)
    free = device.free_bytes() - weight_bytes
    log.info(
        "memory: the weights need %d MiB, a context of %d tokens %d MiB of KV cache; %d MiB are free",
        weight_bytes >> 20, wanted_len, wanted_len * token_bytes >> 20, device.free_bytes() >> 20,
    )  # fmt: skip
    max_rows, num_states = _fit_states(config, model, free)
    free -= num_states * state_bytes(model)
    num_pages = _fit_pages(config, token_bytes=token_bytes, context_len=wanted_len, free=free, device=device)
    pool_len = num_pages * config.page_size
    if pool_len < wanted_len:
        log.warning(
            "the KV cache holds %d tokens, so that is the context length too, not %d; --kv-cache-dtype int8 makes it "
            "hold more, --context-length %d says that it is enough",
            pool_len, wanted_len, pool_len,
        )  # fmt: skip
    context_len = min(wanted_len, pool_len)
    _log_rope_factors(model, context_len)
    return Capacity(
        num_pages=num_pages,
        page_size=config.page_size,
        max_rows=max_rows,
        vocab_size=model.vocab_size,
        context_len=context_len,
        hidden_size=model.hidden_size,
        kv_bytes_per_token=token_bytes,
        num_states=num_states,
    )


def state_bytes(model: ModelConfig) -> int:
    """Returns the bytes of a sequence's state in layers without attention; 0: all layers have attention."""
    return 4 * model.state_floats


def _fit_states(config: Config, model: ModelConfig, free: int) -> tuple[int, int]:
    """Returns the numbers of sequences that run together and of states: two for each, one for tests, the rest to save.

    States take at most STATE_SHARE of the free bytes, and are as many as MOST_SAVED allows.
    """
    each = state_bytes(model)
    if not each:
        return config.max_running_requests, 0
    most = int(free * STATE_SHARE) // each
    rows = min(config.max_running_requests, max(1, most // 4))
    if rows < config.max_running_requests:
        log.warning(
            "%d requests run together, not --max-running-requests %d: the state of each takes %d MiB",
            rows, config.max_running_requests, each >> 20,
        )  # fmt: skip
    saved = 0 if config.disable_radix_cache else min(most - 2 * rows - 1, MOST_SAVED)
    return rows, 2 * rows + 1 + max(0, saved)


def _context_len(config: Config, model: ModelConfig) -> int:
    if config.context_length is not None and config.context_length > model.context_len:
        raise StartupError(
            f"--context-length {config.context_length} is more than the model's own {model.context_len}; "
            f"use at most {model.context_len}",
            field="context_length",
        )
    return config.context_length or model.default_context


def _log_rope_factors(model: ModelConfig, context_len: int) -> None:
    """Logs which factors of LongRoPE are used, and how to get the others."""
    factors, original = model.rope_factors(context_len), model.original_context
    if factors == "short" and model.default_context < model.context_len:
        log.info(
            "LongRoPE uses its short factors, for contexts of up to %d tokens; start with a larger --context-length "
            "(at most %d) to use the long ones",
            original, model.context_len,
        )  # fmt: skip
    elif factors == "long":
        log.warning(
            "LongRoPE uses its long factors, for a context of %d tokens; texts of up to %d tokens get other answers "
            "than with the short ones; start with --context-length %d to use those",
            context_len, original, original,
        )  # fmt: skip


def _fit_pages(config: Config, *, token_bytes: int, context_len: int, free: int, device: DeviceInfo) -> int:
    """Returns the number of pages: as asked by max_total_tokens, else what mem_fraction_static of the free bytes
    holds."""
    size = config.page_size
    where = f"{device.name} has {free / GIB:.2f} GiB free after the weights"
    if config.max_total_tokens is not None:
        pages = config.max_total_tokens // size
        if pages < 1:
            raise StartupError(
                f"--max-total-tokens {config.max_total_tokens} is less than one page of {size} tokens; "
                "raise it or lower --page-size",
                field="max_total_tokens",
            )
        if pages * size * token_bytes > free:
            raise StartupError(
                f"--max-total-tokens {config.max_total_tokens} needs {pages * size * token_bytes / GIB:.2f} GiB, but "
                f"{where}; lower it to at most {max(0, free // token_bytes)}",
                field="max_total_tokens",
            )
        return pages
    usable = int(free * config.mem_fraction_static)
    if device.type == "cpu":  # half of the free memory at least: helper processes rarely take all that they may
        usable = min(usable, max(free - helper_bytes(config), free // 2))
    pages = usable // (size * token_bytes)
    if pages < 1:
        raise StartupError(
            f"{where}: not enough for one page of the KV cache ({size * token_bytes / GIB:.2g} GiB) at "
            f"--mem-fraction-static {config.mem_fraction_static}; raise that, lower --page-size, take a smaller "
            "model or --quantization int4, or free memory",
            field="mem_fraction_static",
        )
    if device.type == "cpu":
        pages = min(pages, -(-max(CPU_CONTEXTS * context_len, CPU_TOKENS) // size))
    return pages
