"""What is written into the Hugging Face cache, which others may share."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from tllm.hub import folders
from tllm.hub.folders import commit_of, keep_reference

COMMIT, LATER = "a" * 40, "b" * 40


def test_a_reference_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may only read a shared cache could not start, though nothing was to be written."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    written: list[Path] = []
    write = folders.write_whole

    def noted(path: Path, content: bytes, variable: str) -> None:
        written.append(path)
        write(path, content, variable)

    monkeypatch.setattr(folders, "write_whole", noted)
    for revision, name in (("", "main"), ("v1", "v1")):
        path = tmp_path / "models--org--name" / "refs" / name
        for commit in (COMMIT, COMMIT, LATER, LATER):
            keep_reference("org/name", revision, commit)
            assert commit_of("org/name", revision) == commit == path.read_text()
        assert written == [path, path]
        written.clear()
    keep_reference("org/name", COMMIT, COMMIT)
    assert not written
