"""Makes the tensors of a step (ModelInput) from its Batch of plain integers."""

from __future__ import annotations

import numpy as np
import torch

from tureen.attention.base import ModelInput, Span
from tureen.contract.runner import Batch, Row
from tureen.contract.types import NO_TOKEN
from tureen.runner.forward import as_wide, drawn_tokens


def make_input(batch: Batch, page_size: int, device: torch.device) -> ModelInput:
    """Returns a step's tensors on the device. Tokens of all rows stand one after another, in the order of the rows."""
    spans: list[Span] = []
    first = 0
    for row in batch.rows:
        states = row.state_from, row.state_to, row.state_saves
        spans.append(Span(first, len(row.token_ids), row.start, row.pages, *states, _window_pages(row), row.pictures))
        first += len(row.token_ids)
    positions = np.concatenate([np.arange(span.start, span.start + span.length) for span in spans])
    token_ids = np.fromiter((token for row in batch.rows for token in row.token_ids), np.int64, first)
    embedded = _embedded(batch, spans, device)
    if embedded is not None:
        token_ids.clip(min=0, out=token_ids)
    kv_slots = np.concatenate([_kv_slots(span, span.pages, page_size) for span in spans])
    drawn = drawn_tokens(batch)
    token_ids_t, positions_t, kv_slots_t = torch.from_numpy(np.stack((token_ids, positions, kv_slots))).to(device)
    sampled = torch.tensor(drawn, dtype=torch.int64).to(device) if drawn else None
    window_slots = None
    if spans[0].window_pages:
        slots = np.concatenate([_kv_slots(span, span.window_pages, page_size) for span in spans])
        window_slots = torch.from_numpy(slots).to(device)
    places = _places(batch, spans, positions, device)
    return ModelInput(token_ids_t, positions_t, kv_slots_t, tuple(spans), sampled, embedded, places, window_slots)


def _window_pages(row: Row) -> tuple[int, ...]:
    """Returns a page table of window pages. Entries before the window repeat the first page of the window."""
    return (row.window_pages[0],) * row.window_from + row.window_pages if row.window_pages else ()


def _embedded(batch: Batch, spans: list[Span], device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the places of the step's tokens that come as embeddings, and these embeddings; see ModelInput."""
    places: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for row, span in zip(batch.rows, spans, strict=True):
        if row.embeds:
            offsets = np.flatnonzero(np.array(row.token_ids) == NO_TOKEN)
            places.append(span.first + offsets)
            values.append(np.frombuffer(row.embeds, np.float32).reshape(len(offsets), -1))
    if not places:
        return None
    return torch.from_numpy(np.concatenate(places)).to(device), torch.from_numpy(as_wide(values)).to(device)


def _places(batch: Batch, spans: list[Span], positions: np.ndarray, device: torch.device) -> torch.Tensor | None:
    """Returns the places of the step's tokens; see ModelInput. Those of rows without any are the positions."""
    if not any(row.places for row in batch.rows):
        return None
    places = np.repeat(positions[:, None], 3, axis=1)
    for row, span in zip(batch.rows, spans, strict=True):
        if row.places:
            places[span.first : span.first + span.length] = np.frombuffer(row.places, np.int32).reshape(-1, 3)
    return torch.from_numpy(places).to(device)


def _kv_slots(span: Span, pages: tuple[int, ...], page_size: int) -> np.ndarray:
    """Returns where each new token's K/V are stored, int64 [tokens]."""
    positions = np.arange(span.start, span.start + span.length)
    begin = span.start // page_size
    own = np.array(pages[begin : int(positions[-1]) // page_size + 1], dtype=np.int64)
    slots: np.ndarray = own[positions // page_size - begin] * page_size + positions % page_size
    return slots
