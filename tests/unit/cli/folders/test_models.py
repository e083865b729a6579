"""The list of models that are on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tllm.cli.main import main


def test_folders_are_looked_into_and_one_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder whose name was mistyped passed for one without models."""
    assert main(["models", str(ROOT / "models")]) == 0
    assert f"{ROOT / 'models' / 'tiny'}" in capsys.readouterr().out
    assert main(["models", str(tmp_path / "modles")]) != 0
    assert f"there is no folder {tmp_path / 'modles'}" in capsys.readouterr().err
    assert main(["models", __file__]) != 0
    assert f"there is no folder {__file__}" in capsys.readouterr().err
