"""GRPO from random weights on a task that can be checked: `3=` is answered by `aaa` and the end."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.report.curves import Points
from benchmarks.training.experiments.runs import Found, run
from tests.support.training.post_training.policy_task import counting_job, write_task

WINDOW = 5
"""Steps of 80 completions each that a figure is the mean of."""


def counted(seed: int, folder: Path) -> Found:
    """The share of the completions that each step samples, at a temperature of 1, which are right."""
    write_task(folder)
    steps = run(counting_job(folder, folder / "run", seed=seed))
    curves = {
        name: _means([(step.metrics or {})[f"rewards/{key}/mean"] for step in steps])
        for name, key in (("right", "correct"), ("reward", "closeness"))
    }
    return Found({"before": curves["right"][0][1], "after": curves["right"][-1][1]}, curves)


def _means(values: list[float]) -> Points:
    """Of each `WINDOW` steps, at the last of them."""
    starts = range(0, len(values) - WINDOW + 1, WINDOW)
    return [(float(start + WINDOW), statistics.fmean(values[start : start + WINDOW])) for start in starts]
