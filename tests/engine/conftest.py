"""Fixtures of several files."""

from __future__ import annotations

import draft_engines
import pytest


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The models and the adapter of `draft_engines`."""
    folder = tmp_path_factory.mktemp("drafts")
    draft_engines.write_models(folder)
    return folder
