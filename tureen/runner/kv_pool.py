"""Computes how many tokens the KV cache can hold, and the bounds that follow from it. No torch."""

from __future__ import annotations

from typing import NamedTuple

from tureen.config import Config
from tureen.config_facts import has_ranks
from tureen.contract.runner import Capacity
from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError
from tureen.log import get_logger
from tureen.models.config import ModelConfig
from tureen.sandbox.budget import helper_bytes

CPU_CONTEXTS, CPU_TOKENS = 4, 65536  # on CPU the computed pool holds at most this many contexts or tokens
STATE_SHARE = 0.25  # of the free memory, for the states of layers without attention
MOST_SAVED = 4096  # states that are saved for later requests
WINDOW_SHARE = 4  # pages per window page, not counting the window pages that one sequence needs
GIB = 1 << 30

log = get_logger("runner")


class KvBytes(NamedTuple):
    """The bytes of a token's K and V in pages and in window pages, the pool of layers with a window."""

    in_pages: int
    in_window_pages: int = 0
    window_tokens: int = 0  # tokens that one sequence needs window pages for; 0: there are no window pages

    @property
    def per_token(self) -> int:
        """The bytes of a token of the pool, with its share of the window pages."""
        return self.in_pages + -(-self.in_window_pages // WINDOW_SHARE)

    @property
    def fixed(self) -> int:
        """The bytes that do not depend on the size of the pool."""
        return self.window_tokens * self.in_window_pages

    @property
    def break_even(self) -> int:
        """The tokens of a pool from which window pages save memory."""
        return -(-self.window_tokens * WINDOW_SHARE // (WINDOW_SHARE - 1))

    def together(self) -> KvBytes:
        """Returns the bytes without window pages."""
        return KvBytes(self.in_pages + self.in_window_pages)

    def num_window_pages(self, num_pages: int, page_size: int) -> int:
        """Returns the number of window pages of a pool of `num_pages`."""
        if not self.window_tokens:
            return 0
        return min(num_pages, -(-self.window_tokens // page_size) + num_pages // WINDOW_SHARE)


class DraftNeed(NamedTuple):
    """The bytes that a draft model takes."""

    weights: int
    kv_per_token: int  # of the pool, which is as large as the model's


NO_DRAFT = DraftNeed(0, 0)


def window_tokens(config: Config, model: ModelConfig) -> int:
    """Returns the number of tokens that one sequence needs window pages for; 0: all layers share one pool.

    They do in ranks and in models of transformers.
    """
    if has_ranks(config) or config.kernels == "tree" or config.model_impl == "transformers":
        return 0
    window = model.longest_window
    most = window + model.longest_step(config.chunked_prefill_size) + 2 * config.page_size
    return most if window else 0


def bytes_of_kv(config: Config, model: ModelConfig, width: int) -> KvBytes:
    """Returns the bytes of a KV cache of numbers that take `width` bytes."""
    in_windows = sum(layer.numbers for layer in model.kv_layers if layer.has_window)
    in_pages = sum(layer.numbers for layer in model.kv_layers) - in_windows
    return with_windows(config, model, KvBytes(width * in_pages, width * in_windows, window_tokens(config, model)))


def with_windows(config: Config, model: ModelConfig, kv_bytes: KvBytes) -> KvBytes:
    """Returns the bytes, with window pages only if these save memory in a full context."""
    context = min(config.context_length or model.default_context, model.context_len)
    has_windows = kv_bytes.window_tokens and context >= kv_bytes.break_even
    return kv_bytes if has_windows else kv_bytes.together()


def plan_capacity(
    config: Config, model: ModelConfig, *, kv_bytes: KvBytes, weight_bytes: int, device: DeviceInfo
) -> Capacity:
    """Computes how much a runner can hold beside its weights, which take `weight_bytes` of the memory that is free now.

    The context is no longer than the pool. Raises StartupError when the settings cannot be met, with the numbers and
    the settings to change.
    """
    wanted_len = _context_len(config, model)
    free = device.free_bytes() - weight_bytes
    whole = kv_bytes.together()
    if (config.max_total_tokens or free * config.mem_fraction_static // whole.per_token) < kv_bytes.break_even:
        kv_bytes = whole
    log.info(
        "memory: the weights need %d MiB, a context of %d tokens %d MiB of KV cache; %d MiB are free",
        weight_bytes >> 20, wanted_len, kv_bytes.fixed + wanted_len * kv_bytes.per_token >> 20,
        device.free_bytes() >> 20,
    )  # fmt: skip
    max_rows, num_states = _fit_states(config, model, free)
    free -= num_states * state_bytes(model) + kv_bytes.fixed
    num_pages = _fit_pages(config, token_bytes=kv_bytes.per_token, context_len=wanted_len, free=free, device=device)
    pool_len = num_pages * config.page_size
    if pool_len < wanted_len:
        log.warning(
            "the KV cache holds %d tokens, so that is the context length too, not %d; --kv-cache-dtype int8 makes it "
            "hold more, --context-length %d says that it is enough",
            pool_len, wanted_len, pool_len,
        )  # fmt: skip
    context_len = min(wanted_len, pool_len)
    num_window_pages = kv_bytes.num_window_pages(num_pages, config.page_size)
    if num_window_pages:
        log.info(
            "the KV cache holds %d tokens; layers with a window have a pool of %d and keep the last %d of each request",
            pool_len, num_window_pages * config.page_size, model.longest_window,
        )  # fmt: skip
    _log_rope_factors(model, context_len)
    return Capacity(
        num_pages=num_pages,
        page_size=config.page_size,
        max_rows=max_rows,
        vocab_size=model.vocab_size,
        context_len=context_len,
        hidden_size=model.hidden_size,
        kv_bytes_per_token=kv_bytes.in_pages + kv_bytes.in_window_pages * num_window_pages // num_pages,
        num_states=num_states,
        num_window_pages=num_window_pages,
        window=model.longest_window if num_window_pages else 0,
        embedding_size=model.hidden_size * (1 + model.num_deep_inputs),
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
            "at most %d requests run together, not --max-running-requests %d: the state of each takes %d MiB",
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
            "than with short factors; start with --context-length %d to use those",
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
