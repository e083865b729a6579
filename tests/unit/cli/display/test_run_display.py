"""What a run prints of itself as it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tllm.cli.display.run_display import RunDisplay
from tllm.training.report.events import RunBegan


@pytest.mark.parametrize(
    ("began", "said"),
    [
        (RunBegan(0, 1_900, 1e9), "run: 1,900 parameters"),
        (RunBegan(3, 1_900, 1e9, adapter_parameters=100), "run: trains 100 of 2,000 parameters, going on after step 3"),
    ],
)
def test_how_many_parameters_are_trained_and_of_how_many(
    began: RunBegan, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDisplay(10, quiet=True) as display:
        display.began(began, Path("run"))
    assert capsys.readouterr().out.splitlines()[0] == said
