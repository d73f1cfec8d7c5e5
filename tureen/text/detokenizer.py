"""Decodes output tokens to text one by one: whole characters, cut at the first stop, only text that is safe to send."""

from __future__ import annotations

import codecs

from tureen.contract.params import SamplingParams
from tureen.text.stops import Match, StopPatterns, StopStrings
from tureen.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one sequence's output.

    Its text is what the tokens add to running text, as after a prompt: a first token "▁Paris" gives " Paris". Stops
    must match within the output. Of several matches that one token completes, the one that begins first counts.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._cut = b""  # the first bytes of an unfinished character
        self._strings = StopStrings(params.stop) if params.stop or params.stop_regex else None  # None: nothing stops
        self._patterns = StopPatterns(params.stop_regex) if params.stop_regex else None
        self._special_stops = _special_stops(tokenizer, params)
        self._after_special = False
        self._held = ""  # text decoded and not returned yet
        self._taken = 0  # characters returned so far
        self._end: int | None = None  # position at which a stop cuts the text
        self.stop_pattern = ""  # the stop pattern that ended the output

    def append(self, token_id: int, *, stops_allowed: bool) -> str | None:
        """Decodes one more token. Returns the stop that it completes: the stop string, or the text a pattern matched.

        A match completed while `stops_allowed` is False is ignored for good. No token may be appended after a stop.
        Raises RequestFailed when a stop pattern takes too long.
        """
        if token_id in self._tokenizer.special_ids:
            piece = self._special_piece(token_id)
        else:
            self._after_special = False
            piece = self._tokenizer.token_bytes(token_id)
        text = self._decode(piece)
        self._held += text
        if self._strings is None:
            return None
        stop = self._find(self._strings, text, stops_allowed)
        if stop is None and stops_allowed and token_id in self._special_stops:
            stop = Match(self.length, self.length, self._special_stops[token_id])
        if stop is None:
            return None
        self.stop_pattern = stop.pattern
        self._end = max(stop.end if self._params.no_stop_trim else stop.start, self._taken)
        return stop.text

    @property
    def length(self) -> int:
        """Characters decoded so far, taken or not."""
        return self._taken + len(self._held)

    def take(self, end: int | None = None) -> str:
        """Returns text newly safe to send: whole characters that no stop can include any more, none of them behind the
        position `end`."""
        if self._strings is not None:
            safe_end = self._safe_end(self._strings)
            return self._take_to(safe_end if end is None else min(safe_end, end))
        if end is not None:
            return self._take_to(end)
        text, self._held = self._held, ""
        self._taken += len(text)
        return text

    def _safe_end(self, strings: StopStrings) -> int:
        if self._end is not None:
            return self._end
        hold_from = strings.hold_from
        if self._patterns is not None:
            hold_from = min(hold_from, self._patterns.hold_from)
        return hold_from

    def close(self, end: int | None = None) -> str:
        """Returns the rest of the text up to the position `end`. An unfinished character becomes U+FFFD."""
        if self._end is None:
            self._held += self._decode(b"", is_last=True)
            self._end = self.length
        return self._take_to(self._end if end is None else min(self._end, end))

    def _special_piece(self, token_id: int) -> bytes:
        if self._params.skip_special_tokens:
            return b""
        piece = self._tokenizer.token_bytes(token_id)
        if self._after_special and not self._params.spaces_between_special_tokens:
            piece = piece.lstrip()
        self._after_special = True
        return piece

    def _decode(self, piece: bytes, *, is_last: bool = False) -> str:
        """Returns the characters that these bytes complete."""
        data = self._cut + piece
        text, num_used = codecs.utf_8_decode(data, "replace", is_last)
        self._cut = data[num_used:]
        return text

    def _find(self, strings: StopStrings, text: str, stops_allowed: bool) -> Match | None:
        """Returns the first match that this text completes."""
        matches = strings.feed(text) if text else []
        if not stops_allowed:
            matches = []
        if self._patterns is not None and text:
            matches += self._patterns.feed(text, ignore=not stops_allowed)
        return min(matches, default=None)

    def _take_to(self, end: int) -> str:
        count = max(end - self._taken, 0)
        text, self._held = self._held[:count], self._held[count:]
        self._taken += len(text)
        return text


def _special_stops(tokenizer: Tokenizer, params: SamplingParams) -> dict[int, str]:
    """Returns the stop strings that are the text of a special token, by its id: they match the token when its text
    is left out of the output."""
    if not params.skip_special_tokens:
        return {}
    ids = {stop: tokenizer.token_id(stop) for stop in params.stop}
    return {token_id: stop for stop, token_id in ids.items() if token_id in tokenizer.special_ids}
