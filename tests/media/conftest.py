"""A loader whose pictures are decoded in this process, for a family that takes them as they are."""

from __future__ import annotations

import asyncio
from functools import partial

import inline_workers
import pytest
from plain_family import PlainFamily

from tureen.media import decode_worker
from tureen.media.loader import MediaLoader

inline_program = partial(decode_worker.program, lambda setup: PlainFamily())


class Studio:
    """A loader with an event loop of its own, which goes on between calls."""

    def __init__(self, hf=None, preprocessor=None, media_path=None, allowed_domains=(), **options):
        self._runner = asyncio.Runner()
        places = {"media_path": media_path, "allowed_domains": allowed_domains}
        self.loader = MediaLoader(hf or {}, preprocessor or {}, **places, **options)

    def run(self, coroutine):
        return self._runner.run(coroutine)

    def load(self, *references, modality="image", field="image_data"):
        return self.run(self.loader.load(references, modality, field))

    def close(self):
        self._runner.run(self.loader.close())
        self._runner.close()


@pytest.fixture(scope="module")
def plain_family():
    with pytest.MonkeyPatch.context() as patch:
        inline_workers.use(patch, "tureen.media.loader", inline_program)
        patch.setattr("tureen.media.loader.find_family", lambda hf, preprocessor: PlainFamily())
        yield


@pytest.fixture(scope="module")
def studio(plain_family):
    """Takes base64 only."""
    made = Studio()
    yield made
    made.close()


@pytest.fixture
def make_studio(plain_family):
    """Others, closed at the end."""
    made = []

    def make(**options):
        made.append(Studio(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()
