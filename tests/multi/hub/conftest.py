"""A hub with one model, `org/name`, for tests that read it; whoever needs other files has a `content` of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub.fake_hub import FakeHub, fake_hub
from tests.support.hub.this_machine import use_hub
from tllm.hub.hub_client import list_repository
from tllm.hub.repository import Repository
from tllm.weights.file_chunks import CHUNK_MIN

FILE = "model.safetensors"
SIZE = 20 * CHUNK_MIN + 1234
ROOM = 1 << 30
"""Bytes that a cache of chunks may keep."""


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """Of the model's one file, in the folder that the hub gives."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / FILE).write_bytes(data := os.urandom(SIZE))
    return data


@pytest.fixture
def hub(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.add("org/name", tmp_path / "model")
        use_hub(monkeypatch, tmp_path, running)
        yield running


@pytest.fixture
def repository(hub: FakeHub) -> Repository:
    return list_repository("org/name", "main")
