"""Knows the tokens by which models of code fill in a gap: what stands before and after it, and where to write.

Sources: https://github.com/QwenLM/Qwen2.5-Coder (fill in the middle), arXiv:2305.06161 (StarCoder), arXiv:2308.12950
(Code Llama), https://github.com/deepseek-ai/DeepSeek-Coder, https://docs.mistral.ai (Codestral).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tureen.text.tokenizer import Tokenizer


class FillInMarks(NamedTuple):
    """The texts of a family's tokens. The prompt is `before` and the text before the gap, `after` and the text after
    it, and `gap`; or, with `suffix_first`, these two the other way round, and `gap` is empty."""

    before: str
    after: str
    gap: str
    ends: tuple[str, ...] = ()  # further tokens with which models end what they fill in
    suffix_first: bool = False


FAMILIES = (
    FillInMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")),
    FillInMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<|endoftext|>")),
    FillInMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    FillInMarks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    FillInMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInMarks("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)
"""Qwen Coder and CodeGemma, StarCoder, SantaCoder, Code Llama, DeepSeek Coder, Codestral."""


class FillIn(NamedTuple):
    """The ids of a model's tokens for filling in a gap."""

    before: int
    after: int
    gap: int | None
    end_ids: tuple[int, ...]  # what is filled in ends with one of these, or an EOS
    suffix_first: bool

    def prompt(self, start: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Returns a prompt's token ids. `start`: those that begin every prompt; `before`, `after`: those of the texts
        before and after the gap."""
        parts = [(self.before, before), (self.after, after)]
        ids = list(start)
        for mark, text in reversed(parts) if self.suffix_first else parts:
            ids += (mark, *text)
        return ids if self.gap is None else [*ids, self.gap]


def fill_in_of(tokenizer: Tokenizer) -> FillIn | None:
    """Returns the tokens by which the tokenizer's model fills in a gap; None where it has none."""
    for marks in FAMILIES:
        ids = [tokenizer.token_id(mark) for mark in (marks.before, marks.after, marks.gap) if mark]
        if None not in ids:
            before, after, *gap = (token_id for token_id in ids if token_id is not None)
            ends = [tokenizer.token_id(end) for end in marks.ends]
            end_ids = (before, after, *gap, *(token_id for token_id in ends if token_id is not None))
            return FillIn(before, after, gap[0] if gap else None, end_ids, marks.suffix_first)
    return None
