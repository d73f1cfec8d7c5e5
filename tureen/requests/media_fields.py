"""The fields that bring pictures and videos: from strings of a body to items that stand in prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast, get_args

import msgspec

from tureen.contract.types import NO_TOKEN, PICTURE, VIDEO, MediaItem
from tureen.errors import InvalidRequest, echo
from tureen.media.base import Family, Modality, Prepared
from tureen.media.loader import MAX_REFERENCES, MediaLoader
from tureen.requests.offload import LARGE, offload
from tureen.requests.planning import per_prompt
from tureen.requests.prompts import Prompt, too_long
from tureen.requests.state import Context

Given = str | list[str] | list[str | list[str] | None] | None

DIGEST_DIGITS = 15  # of hex: token ids fit 64 bits

MAX_PIXEL_BYTES = 256 << 20
"""Of all pictures of a body, each counted once."""


class Wanted(NamedTuple):
    """What one prompt asks for."""

    pictures: tuple[str, ...]
    videos: tuple[str, ...]
    modality: Modality  # of the pictures; "video": they are the frames of one
    picture_field: str
    video_field: str

    @property
    def num_videos(self) -> int:
        return len(self.videos) + (1 if self.modality == "video" and self.pictures else 0)

    @property
    def num_pictures(self) -> int:
        return 0 if self.modality == "video" else len(self.pictures)

    @property
    def field(self) -> str:
        """The one to name where both may be at fault."""
        return self.picture_field if self.pictures or not self.videos else self.video_field


def wanted_of(
    image_data: Given, video_data: Given, modalities: Sequence[str] | None, batch: int, *, is_batch: bool
) -> list[Wanted]:
    """What each prompt asks for. Raises InvalidRequest."""
    pictures, picture_fields = _per_prompt(image_data, batch, "image_data", is_batch=is_batch)
    videos, video_fields = _per_prompt(video_data, batch, "video_data", is_batch=is_batch)
    if any(videos) and not any(pictures) and modalities is not None and set(modalities) == {"video"}:
        modalities = None  # says what the other field does
    if modalities is not None and not any(pictures):
        raise InvalidRequest("modalities says what image_data holds; send image_data too", field="modalities")
    kinds = _modalities(modalities, [len(one) for one in pictures], is_batch=is_batch)
    return [Wanted(*one) for one in zip(pictures, videos, kinds, picture_fields, video_fields, strict=True)]


def _per_prompt(given: Given, batch: int, field: str, *, is_batch: bool) -> tuple[list[tuple[str, ...]], list[str]]:
    """What is given for each prompt, and what to call it."""
    if given is None or isinstance(given, str):
        return [() if given is None else (given,)] * batch, [field] * batch
    if not is_batch:
        if not all(isinstance(one, str) for one in given):
            raise InvalidRequest(f"{field} of one prompt is a string or a list of strings", field=field)
        return [tuple(cast("list[str]", given))], [field]
    rows: list[str | list[str] | None] = per_prompt(cast("list[str | list[str] | None]", given), batch, field)
    found = [() if row is None else (row,) if isinstance(row, str) else tuple(row) for row in rows]
    return found, [f"{field}[{index}]" for index in range(batch)]


def picture_modality(count: int) -> Modality:
    """Of so many pictures of one prompt, where nobody says."""
    return "multi-images" if count > 1 else "image"


def _modalities(given: Sequence[str] | None, counts: list[int], *, is_batch: bool) -> list[Modality]:
    """Of each prompt's pictures, which number `counts`."""
    if given is None:
        return [picture_modality(count) for count in counts]
    known = get_args(Modality)
    for one in given:
        if one not in known:
            raise InvalidRequest(f"modalities may be {', '.join(known)}; got {echo(one)}", field="modalities")
    if is_batch and len(given) == len(counts):
        return cast("list[Modality]", list(given))
    fits = len(given) == 1 or (not is_batch and len(given) == counts[0] and len(set(given)) == 1)
    if not fits:
        raise InvalidRequest(
            f"modalities has {len(given)} entries; send one for all pictures of a prompt, or for a batch one a prompt",
            field="modalities",
        )
    return [cast("Modality", given[0])] * len(counts)


def check_count(token_ids: Sequence[int], wanted: Wanted, name: str, family: Family) -> None:
    """Raises InvalidRequest where there are not as many placeholders as pictures and videos."""
    if wanted.num_videos and family.video_placeholder is None:
        field = wanted.video_field if wanted.videos else "modalities"
        raise InvalidRequest(f"{field}: this model takes no videos; send pictures", field=field)
    num_pictures, num_videos = token_ids.count(PICTURE), token_ids.count(VIDEO)
    num_wanted = wanted.num_pictures + wanted.num_videos
    if num_wanted > MAX_REFERENCES:
        raise InvalidRequest(
            f"{wanted.field}: {num_wanted} pictures and videos came with {name}; a prompt may have {MAX_REFERENCES}",
            field=wanted.field,
            code="invalid_image",
        )
    # a video may stand where a picture does: models that take both were trained so
    if num_videos <= wanted.num_videos and num_pictures + num_videos == num_wanted:
        return
    if family.placeholder_id is None and name.startswith("input_ids"):
        raise InvalidRequest(
            f"{wanted.field} needs a prompt of text: this model has no token for {family.placeholder}",
            field=wanted.field,
            code="image_placeholder_mismatch",
        )
    has = f"{num_pictures} {family.placeholder}"
    sent = f"{wanted.num_pictures} pictures"
    if family.video_placeholder is not None:
        has += f" and {num_videos} {family.video_placeholder}"
        sent += f" and {wanted.num_videos} videos"
    raise InvalidRequest(
        f"{name} has {has}, but {sent} came with it; there must be one placeholder for each",
        field=wanted.field,
        code="image_placeholder_mismatch",
    )


class Filling:
    """Puts the pictures of one body in their places; what is sent twice is loaded once."""

    def __init__(self, loader: MediaLoader, context: Context) -> None:
        self._loader = loader
        self._context = context
        self._loaded: dict[tuple[tuple[str, ...], Modality], list[MediaItem]] = {}
        self._pixels: dict[str, bytes] = {}  # by digest
        self._num_bytes = 0

    async def fill(self, prompt: Prompt, wanted: Wanted, name: str) -> Prompt:
        """Raises InvalidRequest, Forbidden."""
        if not wanted.pictures and not wanted.videos:
            return prompt
        pictures = await self._load(wanted.pictures, wanted.modality, wanted.picture_field) if wanted.pictures else []
        videos: list[MediaItem] = []
        self._check_length(prompt, pictures, name)
        for index, one in enumerate(wanted.videos):
            field = wanted.video_field if len(wanted.videos) == 1 else f"{wanted.video_field}[{index}]"
            videos += await self._load((one,), "video", field)
            self._check_length(prompt, (*pictures, *videos), name)
        if wanted.modality == "video":
            pictures, videos = [], pictures + videos
        return await offload.run(len(prompt.token_ids), lambda: _filled(prompt, pictures, videos))

    def _check_length(self, prompt: Prompt, items: Sequence[MediaItem], name: str) -> None:
        num_tokens = len(prompt.token_ids) + sum(item.num_tokens - 1 for item in items)
        if num_tokens > self._context.capacity:
            raise too_long(num_tokens, name, self._context)

    async def _load(self, references: tuple[str, ...], modality: Modality, field: str) -> list[MediaItem]:
        """Where they stand is not known yet."""
        found = self._loaded.get((references, modality))
        if found is None:
            prepared = await self._loader.load(references, modality, field)
            found = await offload.run_each(LARGE, lambda one: self._item(one, field), prepared)
            self._loaded[references, modality] = found
        return found

    def _item(self, prepared: Prepared, field: str) -> MediaItem:
        """Raises InvalidRequest where the body has too many of them."""
        shape = cast("tuple[int, int, int, int]", prepared.pixels.shape)
        hashed = hashlib.sha256(repr((shape, prepared.layout)).encode())
        hashed.update(prepared.pixels.data)
        digest = hashed.hexdigest()
        if digest not in self._pixels:
            self._num_bytes += prepared.pixels.nbytes
            if self._num_bytes > MAX_PIXEL_BYTES:
                raise InvalidRequest(
                    f"{field}: the pictures of one body may have {MAX_PIXEL_BYTES >> 20} MiB as the model takes them; "
                    "send fewer at a time",
                    field=field,
                    code="invalid_image",
                )
            self._pixels[digest] = prepared.pixels.tobytes()
        return MediaItem(digest, 0, prepared.num_tokens, self._pixels[digest], shape, prepared.layout)


def _filled(prompt: Prompt, pictures: list[MediaItem], videos: list[MediaItem]) -> Prompt:
    token_ids: list[int] = []
    media: list[MediaItem] = []
    for token, item in _placed(prompt.token_ids, pictures, videos):
        if item is None:
            token_ids.append(token)
        else:
            media.append(msgspec.structs.replace(item, start=len(token_ids)))
            token_ids += [NO_TOKEN - 1 - int(item.digest[:DIGEST_DIGITS], 16)] * item.num_tokens
    return prompt._replace(token_ids=token_ids, media=tuple(media))


def _placed(
    token_ids: Sequence[int], pictures: list[MediaItem], videos: list[MediaItem]
) -> Iterator[tuple[int, MediaItem | None]]:
    """Each token, and what it stands for where it is a mark; in order."""
    left_pictures, left_videos = iter(pictures), iter(videos)
    for token in token_ids:
        if token == PICTURE:
            yield token, next(left_pictures, None) or next(left_videos)
        elif token == VIDEO:
            yield token, next(left_videos)
        else:
            yield token, None
