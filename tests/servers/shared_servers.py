"""Servers that many files share: one for each set of flags, from the first test that asks it to the last test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import shape_drawings
from server_process import ServerProcess

from tureen.log import no_progress
from tureen.recipes import shapes_vlm


@pytest.fixture(scope="session")
def server(default_model_source) -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def seeing_server(default_model_source, tmp_path_factory) -> Iterator[ServerProcess]:
    """Started where there is a picture of that name."""
    folder = shapes_vlm.build(default_model_source.path.parents[2], no_progress)
    start = tmp_path_factory.mktemp("start")
    shape_drawings.load().draw(shape_drawings.UNSEEN, "one").picture.save(start / "example_image.png")
    with ServerProcess("--model-path", str(folder), cwd=start) as running:
        yield running.wait_ready()
