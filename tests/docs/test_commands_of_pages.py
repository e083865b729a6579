"""README, the quickstart and the guide for Python do what they say; a file of their own, so that two run at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.terminals import follow
from tests.house.tree import ROOT


@pytest.mark.timeout(240)  # half a minute where nothing else runs
@pytest.mark.parametrize("path", ["README.md", "docs/quickstart.md", "docs/guides/python.md"])
def test_page_with_commands(path: str, tmp_path: Path) -> None:
    assert follow(ROOT / path, tmp_path) > 0
