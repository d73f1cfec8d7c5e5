"""Reads the fields with pictures, videos and text files, and replaces placeholders with the loaded items."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, get_args

import msgspec

from tureen.contract.params import JsonObject
from tureen.contract.types import NO_TOKEN, PICTURE, VIDEO, MediaItem
from tureen.errors import InvalidRequest, RequestFailed, Unavailable, echo
from tureen.fields.ignored import tell
from tureen.media.base import Family, Modality, Prepared
from tureen.media.loader import MAX_REFERENCES, MediaLoader
from tureen.requests.offload import LARGE, offload
from tureen.requests.planning import per_prompt
from tureen.requests.prompts import Prompt, too_long
from tureen.requests.state import Context, ServerState

MediaReference = str | JsonObject
"""A URL, data URL, path or base64; or an object that has it as `url`."""
MediaReferences = MediaReference | list[MediaReference] | list[MediaReference | list[MediaReference] | None] | None
"""A body's field of pictures or videos: a reference, a list of them, or for a batch an entry a prompt."""

DIGEST_DIGITS = 15  # hex digits of a picture's digest in its token ids, which have 64 bits

MAX_PIXEL_BYTES = 256 << 20
"""Maximum bytes of pixels of all pictures and videos in one body; equal ones count once."""


class PromptMedia(NamedTuple):
    """The pictures and videos of one prompt, as references, and the names of their fields."""

    pictures: tuple[str, ...]
    videos: tuple[str, ...]
    modality: Modality  # of the pictures; "video": they are the frames of one video
    picture_field: str
    video_field: str

    @property
    def num_videos(self) -> int:
        """Number of videos of the prompt; pictures that are frames count as one."""
        return len(self.videos) + (1 if self.modality == "video" and self.pictures else 0)

    @property
    def num_pictures(self) -> int:
        """Number of pictures of the prompt, without frames of a video."""
        return 0 if self.modality == "video" else len(self.pictures)

    @property
    def field(self) -> str:
        """The field to name in an error that concerns pictures and videos together."""
        return self.picture_field if self.pictures or not self.videos else self.video_field


def read_media(
    image_data: MediaReferences,
    video_data: MediaReferences,
    modalities: Sequence[str] | None,
    batch: int,
    *,
    is_batch: bool,
) -> list[PromptMedia]:
    """Reads SGLang's fields image_data, video_data and modalities for each of `batch` prompts. Raises InvalidRequest.

    `is_batch`: the body has a list of prompts, so that each field may have an entry for each.
    """
    pictures, picture_fields = _per_prompt(image_data, batch, "image_data", is_batch=is_batch)
    videos, video_fields = _per_prompt(video_data, batch, "video_data", is_batch=is_batch)
    _check_modalities(modalities or ())
    if not any(pictures):
        modalities = None  # it says what image_data holds, which is nothing
    kinds = _modalities(modalities, [len(refs) for refs in pictures], is_batch=is_batch)
    fields = zip(pictures, videos, kinds, picture_fields, video_fields, strict=True)
    return [PromptMedia(*values) for values in fields]


def _per_prompt(
    references: MediaReferences, batch: int, field: str, *, is_batch: bool
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the references of each prompt, and the name of its field for errors."""
    if not isinstance(references, list):
        return [() if references is None else (_reference(references, field),)] * batch, [field] * batch
    if not is_batch:
        if not all(isinstance(reference, str | dict) for reference in references):
            raise InvalidRequest(f"{field} of one prompt is a string or a list of strings", field=field)
        return [_references(cast("list[MediaReference]", references), field)], [field]
    rows: list[Any] = per_prompt(cast("list[Any]", references), batch, field)
    fields = [f"{field}[{index}]" for index in range(batch)]
    return [_row(row, name) for row, name in zip(rows, fields, strict=True)], fields


def _row(row: MediaReference | list[MediaReference] | None, field: str) -> tuple[str, ...]:
    """Returns the references of one prompt of a batch."""
    if isinstance(row, list):
        return _references(row, field)
    return () if row is None else (_reference(row, field),)


def _references(references: Sequence[MediaReference], field: str) -> tuple[str, ...]:
    return tuple(_reference(reference, f"{field}[{index}]") for index, reference in enumerate(references))


def _reference(reference: MediaReference, field: str) -> str:
    """Returns a reference as text. Raises InvalidRequest for an object without one."""
    if isinstance(reference, str):
        return reference
    if "format" in reference:
        raise InvalidRequest(
            f"{field}.format: this server prepares pictures itself; send the picture, as a string or as "
            '{"url": …}, and not what a processor made of it',
            field=f"{field}.format",
        )
    url, others = reference.get("url"), sorted(reference.keys() - {"url", "detail"})
    if not isinstance(url, str) or others:
        got = f"got url {echo(url)}"
        if others:
            got = f"got {echo(others[0])}" + (" too" if "url" in reference else " and no url")
        raise InvalidRequest(
            f'{field}: an object for a picture is {{"url": URL, data: URL, path or base64}}; {got}', field=field
        )
    if reference.get("detail") not in (None, "auto", "high"):
        tell(f"{field}.detail", "pictures always have the model's full resolution")
    return url


def picture_modality(count: int) -> Modality:
    """Returns the modality of `count` pictures of one prompt when the body does not say it."""
    return "multi-images" if count > 1 else "image"


def _check_modalities(modalities: Sequence[str]) -> None:
    known = get_args(Modality)
    for modality in modalities:
        if modality not in known:
            raise InvalidRequest(f"modalities may be {', '.join(known)}; got {echo(modality)}", field="modalities")


def _modalities(modalities: Sequence[str] | None, counts: list[int], *, is_batch: bool) -> list[Modality]:
    """Returns the modality of each prompt's pictures, of which there are `counts`. Raises InvalidRequest."""
    if modalities is None:
        return [picture_modality(count) for count in counts]
    if is_batch and len(modalities) == len(counts):
        return cast("list[Modality]", list(modalities))
    fits = len(modalities) == 1 or (not is_batch and len(modalities) == counts[0] and len(set(modalities)) == 1)
    if not fits:
        raise InvalidRequest(
            f"modalities has {len(modalities)} entries; send one for all pictures of a prompt, or for a batch one a "
            "prompt",
            field="modalities",
        )
    return [cast("Modality", modalities[0])] * len(counts)


def check_count(token_ids: Sequence[int], sent_media: PromptMedia, name: str, family: Family) -> None:
    """Raises InvalidRequest unless a prompt has one placeholder (PICTURE or VIDEO) for each picture and video sent with
    it. `name`: what errors call the prompt."""
    if sent_media.num_videos and family.video_placeholder is None:
        field = sent_media.video_field if sent_media.videos else "modalities"
        raise InvalidRequest(f"{field}: this model takes no videos; send pictures", field=field)
    num_sent = sent_media.num_pictures + sent_media.num_videos
    if num_sent and family.inner_id in token_ids:
        raise InvalidRequest(
            f"{name} has token {family.inner_id}, which is a placeholder for a picture's embeddings; leave such "
            f"tokens out, and write one {family.placeholder} for each picture",
            field=name,
            code="image_placeholder_mismatch",
        )
    num_pictures, num_videos = token_ids.count(PICTURE), token_ids.count(VIDEO)
    if num_sent > MAX_REFERENCES:
        raise InvalidRequest(
            f"{sent_media.field}: {num_sent} pictures and videos came with {name}; a prompt may have {MAX_REFERENCES}",
            field=sent_media.field,
            code="invalid_image",
        )
    # a video may replace a picture's placeholder: models with both were trained with that
    if num_videos <= sent_media.num_videos and num_pictures + num_videos == num_sent:
        return
    if family.placeholder_id is None and name.startswith("input_ids"):
        raise InvalidRequest(
            f"{sent_media.field} needs a prompt of text: this model has no token for {family.placeholder}",
            field=sent_media.field,
            code="image_placeholder_mismatch",
        )
    placeholders = f"{num_pictures} {family.placeholder}"
    sent = f"{sent_media.num_pictures} pictures"
    if family.video_placeholder is not None:
        placeholders += f" and {num_videos} {family.video_placeholder}"
        sent += f" and {sent_media.num_videos} videos"
    raise InvalidRequest(
        f"{name} has {placeholders}, but {sent} were sent; there must be one placeholder for each",
        field=sent_media.field,
        code="image_placeholder_mismatch",
    )


class PlacedPart(NamedTuple):
    """The tokens of a part's text, and the item after them, whose `start` is not set; None = text ends the picture."""

    text_ids: list[int]
    item: MediaItem | None


Placeable = tuple[PlacedPart, ...]
"""The parts that replace the placeholder of a picture or a video."""


class MediaPlacer:
    """Loads the pictures and videos of one body and puts them in their prompts; equal references are loaded once."""

    def __init__(self, loader: MediaLoader, context: Context) -> None:
        self._loader = loader
        self._context = context
        self._loaded: dict[tuple[tuple[str, ...], Modality], list[Placeable]] = {}
        self._pixels: dict[str, bytes] = {}  # digest -> pixels
        self._num_bytes = 0

    async def place(self, prompt: Prompt, media: PromptMedia, name: str) -> Prompt:
        """Returns the prompt with an item for each PICTURE and VIDEO among its token ids. Raises InvalidRequest,
        Forbidden."""
        if not media.pictures and not media.videos:
            return prompt
        pictures = await self._load(media.pictures, media.modality, media.picture_field) if media.pictures else []
        videos: list[Placeable] = []
        self._check_length(prompt, pictures, name)
        for index, video in enumerate(media.videos):
            field = media.video_field if len(media.videos) == 1 else f"{media.video_field}[{index}]"
            videos += await self._load((video,), "video", field)
            self._check_length(prompt, (*pictures, *videos), name)
        if media.modality == "video":
            pictures, videos = [], pictures + videos
        return await offload.run(len(prompt.token_ids), lambda: _filled(prompt, pictures, videos))

    def _check_length(self, prompt: Prompt, items: Sequence[Placeable], name: str) -> None:
        num_tokens = len(prompt.token_ids) + sum(map(_num_tokens, items)) - len(items)
        if num_tokens > self._context.capacity:
            raise too_long(num_tokens, name, self._context)

    async def _load(self, references: tuple[str, ...], modality: Modality, field: str) -> list[Placeable]:
        """Loads references of one field."""
        items = self._loaded.get((references, modality))
        if items is None:
            prepared = await self._loader.load(references, modality, field)
            items = await offload.run_each(LARGE, lambda picture: self._placeable(picture, field), prepared)
            self._loaded[references, modality] = items
        return items

    def _placeable(self, prepared: Prepared, field: str) -> Placeable:
        """Returns the parts of a picture. Raises InvalidRequest when the body has too many pixels, RequestFailed."""
        parts = self._loader.family.parts(prepared)
        misfits = any(part.grid and math.prod(part.grid) != part.num_tokens for part in parts)
        if misfits or sum(part.num_tokens for part in parts) != prepared.num_tokens:
            raise RequestFailed(
                f"{field} could not be decoded: its helper process returned an invalid answer", field=field
            )
        whole = self._item(prepared, field)
        placed: list[PlacedPart] = []
        before = 0
        for part in parts:
            ids = self._context.tokenizer.encode(part.text, add_special_tokens=False) if part.text else []
            after = whole.num_tokens - before - part.num_tokens
            item = msgspec.structs.replace(
                whole,
                num_tokens=part.num_tokens,
                pixels=b"" if before else whole.pixels,
                rows_before=before,
                rows_after=after,
                grid=part.grid,
                is_whole=part.is_whole,
            )
            placed.append(PlacedPart(ids, item if part.num_tokens else None))
            before += part.num_tokens
        return tuple(placed)

    def _item(self, prepared: Prepared, field: str) -> MediaItem:
        """Makes an item of decoded pixels, equal pixels stored once. Raises InvalidRequest when the body has too
        many."""
        shape = cast("tuple[int, int, int, int]", prepared.pixels.shape)
        hashed = hashlib.sha256(repr((shape, prepared.layout)).encode())
        hashed.update(prepared.pixels.data)
        digest = hashed.hexdigest()
        if digest not in self._pixels:
            self._num_bytes += prepared.pixels.nbytes
            if self._num_bytes > MAX_PIXEL_BYTES:
                raise InvalidRequest(
                    f"{field}: all pictures of a body may take {MAX_PIXEL_BYTES >> 20} MiB after resizing; "
                    "send fewer at a time",
                    field=field,
                    code="invalid_image",
                )
            self._pixels[digest] = prepared.pixels.tobytes()
        return MediaItem(digest, 0, prepared.num_tokens, self._pixels[digest], shape, prepared.layout)


def _num_tokens(placeable: Placeable) -> int:
    return sum(len(ids) + (item.num_tokens if item else 0) for ids, item in placeable)


def _filled(prompt: Prompt, pictures: list[Placeable], videos: list[Placeable]) -> Prompt:
    """Returns the prompt with parts in place of each mark: their texts, and a negative id, made of its digest, for each
    of an item's tokens."""
    token_ids: list[int] = []
    media: list[MediaItem] = []
    for token, placeable in _placed(prompt.token_ids, pictures, videos):
        if placeable is None:
            token_ids.append(token)
        for text_ids, item in placeable or ():
            token_ids += text_ids
            if item is not None:
                media.append(msgspec.structs.replace(item, start=len(token_ids)))
                token_ids += [NO_TOKEN - 1 - int(item.digest[:DIGEST_DIGITS], 16)] * item.num_tokens
    return prompt._replace(token_ids=token_ids, media=tuple(media))


def _placed(
    token_ids: Sequence[int], pictures: list[Placeable], videos: list[Placeable]
) -> Iterator[tuple[int, Placeable | None]]:
    """Yields each token in order, with what replaces it when it is PICTURE or VIDEO."""
    left_pictures, left_videos = iter(pictures), iter(videos)
    for token in token_ids:
        if token == PICTURE:
            yield token, next(left_pictures, None) or next(left_videos)
        elif token == VIDEO:
            yield token, next(left_videos)
        else:
            yield token, None


DATA_URL = "data:"
PDF_TYPE, PDF_START = "application/pdf", "%PDF-"


def file_text(data: str, name: str | None, field: str, text_part: str) -> str:
    """Return a text file as the model reads it: its name on a line, and its text.

    `data`: the file in base64, as it is or as a data URL. `text_part`: the type of a part with text, for the error.
    Raises InvalidRequest with `field` for a file that is not text in UTF-8, and for a PDF.
    """
    head, _, encoded = data.partition(",") if data.startswith(DATA_URL) else ("", "", data)
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        text = None
    media_type = head.removeprefix(DATA_URL).partition(";")[0].strip().lower()
    if text is None or text.startswith(PDF_START) or media_type == PDF_TYPE:
        raise InvalidRequest(
            f"{field} is not a text file in base64 and UTF-8. The server does not read PDFs; send their text as a part "
            f"of type {text_part}",
            field=field,
            code="not_available",
        )
    return f"{name}:\n{text}" if name else text


@contextlib.asynccontextmanager
async def loading(
    state: ServerState, owner: str, names: Mapping[str, tuple[int, ...]], limits_ms: Mapping[str, int | None]
) -> AsyncIterator[None]:
    """Ends the block at the first of the deadlines, or when the client aborts one of `names`.

    `names`: name -> indices of its requests; `limits_ms`: field -> milliseconds from now, None = no limit. Raises
    InvalidRequest when a name is in use, Unavailable at a deadline or a shutdown, RequestFailed when aborted.
    """
    field, limit_ms = min(
        ((name, value) for name, value in limits_ms.items() if value is not None),
        key=lambda limit: limit[1],
        default=("", None),
    )
    reasons: list[str] = []
    try:
        async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000) as until:

            def abort(reason: str) -> None:
                if not until.expired():
                    reasons.append(reason)
                    until.reschedule(0)

            with state.loading(owner, names, abort):
                yield
    except TimeoutError:
        if not reasons:
            raise Unavailable(
                f"{field} cannot be met: the pictures were not loaded within {limit_ms} ms; try again later",
                field=field,
                code="deadline_unreachable",
            ) from None
        if "shutdown" in reasons:
            raise Unavailable("the server was shut down before the request ended", code="draining") from None
        raise RequestFailed("the request was aborted while its pictures were loaded", code="aborted") from None
