"""What a run prints of itself as it begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tllm.cli.display.run_display import RunDisplay
from tllm.core.disk import print_line
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
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


def test_a_disk_without_room_is_told_as_the_run_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with RunDisplay(10, quiet=True) as display:
        display.began(RunBegan(0, 1_900, 1e9, disk="run on box has 1 B free"), Path("run"))
    assert "disk: run on box has 1 B free" in capsys.readouterr().out.splitlines()


def test_a_log_on_a_full_disk_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            with RunDisplay(10, quiet=False) as display:
                display.began(RunBegan(0, 1_900, 1e9), Path("run"))
                display.told("something")
                display.ended(RunEnded(10, "run/final"), Job("run", ("a.txt",), 10, config_name="c"))
        with pytest.raises(OSError, match="No space left"):
            full.close()
    print_line("")  # which is written


@pytest.mark.parametrize(
    ("keys", "final", "lines"),
    [
        ({}, "run/final", ["done after 9 steps; the model is in run/final", "tllm generate run/final --prompt TEXT"]),
        (
            {"task": "reward"},
            "my run/final",
            ["done after 9 steps; the model is in my run/final", "tllm serve 'my run/final'"],
        ),
        (
            {"lora": LoraJob()},
            "run/final",
            [
                "done after 9 steps; the adapter is in run/final",
                "tllm serve base --enable-lora --lora-modules adapter=run/final",
            ],
        ),
        (
            {"lora": LoraJob(r=32, quantize="int4")},
            "run/final",
            [
                "done after 9 steps; the adapter is in run/final",
                "tllm serve base --quantize int4 --enable-lora --max-lora-rank 32 --lora-modules adapter=run/final",
            ],
        ),
    ],
)
def test_a_run_that_is_done_says_what_it_made_and_how_to_use_it(
    keys: dict[str, Any], final: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job("run", ("a.txt",), 9, model_name_or_path="base", **keys)
    with RunDisplay(9, quiet=True) as display:
        display.ended(RunEnded(9, final), job)
    assert capsys.readouterr().out.splitlines() == [lines[0], f"to use it: {lines[1]}"]
