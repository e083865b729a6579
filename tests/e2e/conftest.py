"""One small random model for all commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.families import save_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model("llama", made)
    return made
