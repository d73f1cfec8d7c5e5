"""A simulated hub and package index that the environment points to."""

from __future__ import annotations

import os

import pytest
from simulated_hub import Simulated

from tureen.fetching import download

SETTINGS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME",
            "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "PIP_NO_INDEX", "PIP_FIND_LINKS",
            "PIP_EXTRA_INDEX_URL", "XDG_CACHE_HOME")  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    simulated = Simulated()
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", simulated.url)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{simulated.url}/simple")
    monkeypatch.setattr(download, "_pause", lambda fault, failures: 0.0)
    yield simulated
    simulated.close()
