"""What a run prints of itself as it begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tllm.cli.display.run_display import RunDisplay
from tllm.core.disk import print_line
from tllm.training.report.events import RunBegan, RunEnded


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


def test_a_log_on_a_full_disk_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            with RunDisplay(10, quiet=False) as display:
                display.began(RunBegan(0, 1_900, 1e9), Path("run"))
                display.told("something")
                display.ended(RunEnded(10, "run/final"), Path("run"))
        with pytest.raises(OSError, match="No space left"):
            full.close()
    print_line("")  # which is written
