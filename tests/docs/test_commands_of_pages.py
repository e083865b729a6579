"""README, the quickstart and the guide for Python do what they say; a file of their own, so that two run at once.

The commands of the quickstart are executed, as a reader's shell does it; those of the other pages are forked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.terminals import follow
from tests.house.tree import ROOT
from tests.support.commands.command_door import CommandDoor


@pytest.mark.slow
@pytest.mark.timeout(480)  # half a minute where nothing else runs
def test_the_quickstart(tmp_path: Path) -> None:
    assert follow(ROOT / "docs" / "quickstart.md", tmp_path) > 0


@pytest.mark.timeout(480)
@pytest.mark.parametrize("path", ["README.md", "docs/guides/python.md"])
def test_page_with_commands(path: str, tmp_path: Path) -> None:
    with CommandDoor() as door:
        assert follow(ROOT / path, tmp_path, door=door) > 0
